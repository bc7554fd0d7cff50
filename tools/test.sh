#!/usr/bin/env bash
# Makes the environment, then runs the linters and all tests. Arguments go to pytest:
#   bash tools/test.sh                    everything
#   bash tools/test.sh -m "not job"       without the tests that start whole training jobs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest "$@"
