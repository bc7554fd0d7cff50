#!/usr/bin/env bash
# Let a target read text under Slurm, then train on it:
#   job=$(TARGET=/models/Qwen3-8B TEXT=/shared/corpus.jsonl DATA=/shared/data \
#       sbatch --parsable examples/slurm_prepare.sh)
#   FEATURE_STORE=/shared/data/train CHECKPOINTS=/shared/run \
#       sbatch --dependency "afterok:$job" --nodes 4 examples/slurm_train.sh
#SBATCH --job-name=splitkv-prepare
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
set -euo pipefail
: "${TARGET:?a local Hugging Face folder}" "${TEXT:?a text or JSONL file}" "${DATA:?a new folder}"

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
run() { srun "${PYTHON:-python3}" -m megatron_splitkv "$@"; }
run prepare --target "$TARGET" --text "$TEXT" --output "$DATA" --dtype bfloat16 "$@"
run doctor --feature-store "$DATA/train" "$DATA/valid"
