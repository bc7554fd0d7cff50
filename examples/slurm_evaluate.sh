#!/usr/bin/env bash
# Export the latest checkpoint and measure its acceptance length under Slurm:
#   CHECKPOINTS=/shared/run DRAFTER=/shared/drafter TARGET=/models/Qwen3-8B \
#       PROMPTS=/shared/data/prompts.jsonl sbatch examples/slurm_evaluate.sh
#SBATCH --job-name=splitkv-evaluate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
set -euo pipefail
: "${CHECKPOINTS:?the --save folder}" "${DRAFTER:?a new folder}" "${TARGET:?a local folder}"
: "${PROMPTS:?prompts.jsonl of splitkv prepare}"

run() { srun "${PYTHON:-python3}" -m megatron_splitkv "$@"; }
run doctor --checkpoint "$CHECKPOINTS"
run export --checkpoint "$CHECKPOINTS" --output "$DRAFTER"
run evaluate --drafter "$DRAFTER" --target "$TARGET" --prompts "$PROMPTS" --device cuda "$@"
