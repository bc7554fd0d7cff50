#!/usr/bin/env bash
# Makes the environments, then runs the linters and the tests. Arguments go to pytest:
#   bash tools/test.sh                    everything, then what depends on Megatron with its oldest
#   bash tools/test.sh -m "not job"       without the tests that start whole training jobs
#   bash tools/test.sh --oldest [-k ...]  the second part alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

# Tests wait for each other's processes more than for the cores: two at a time, file by file, so
# that a file's fixtures and gloo workers are made once.
SIDE_BY_SIDE=(-n 2 --dist loadfile)

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# What stands directly on Megatron: patches and signatures, a step of the drafter and its
# checkpoint at several layouts, stock layers with our attention, a job that trains, saves and goes
# on, and a stock GPT job. All else does not know which Megatron is installed.
WITH_OLDEST=(
  tests/test_versions.py tests/test_compat.py tests/test_hooks.py tests/test_cpu.py
  tests/distributed/test_drafter_step.py tests/distributed/test_layouts_checkpoint.py
  tests/distributed/test_general_attention.py tests/distributed/test_cp_comm_type.py
  tests/distributed/test_pretrain.py::test_a_run_logs_what_it_should
  tests/distributed/test_pretrain.py::test_resume_at_the_same_layout_is_bitwise
  tests/distributed/test_pretrain_gpt.py
  tests/train tests/examples/test_custom_cross_attention.py
)

test_with_oldest_megatron() {
  prepare_oldest_environment
  echo "the tests that depend on Megatron, with megatron-core $OLDEST_MEGATRON_CORE"
  SPLITKV_EXPECTED_MEGATRON="$OLDEST_MEGATRON_CORE" \
    "$OLDEST_PYTHON" -m pytest "${SIDE_BY_SIDE[@]}" -o cache_dir=.pytest_cache/oldest "$@" "${WITH_OLDEST[@]}"
}

if [ "${1:-}" = "--oldest" ]; then
  shift
  test_with_oldest_megatron "$@"
  exit
fi
prepare_environment
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest "${SIDE_BY_SIDE[@]}" "$@"
if [ $# -eq 0 ]; then
  test_with_oldest_megatron
fi
