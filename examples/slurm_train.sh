#!/usr/bin/env bash
# Train on several nodes under Slurm, one torchrun a node:
#   FEATURE_STORE=/shared/data/train CHECKPOINTS=/shared/run sbatch --nodes 4 examples/slurm_train.sh
# Submit it again to go on; arguments are those of examples/train_node.sh.
#SBATCH --job-name=splitkv-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
set -euo pipefail
# Slurm runs a copy of this file, from the folder in which it was submitted.
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")  # the first line
# Two jobs that share a node must not share a port.
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
export NNODES="$SLURM_JOB_NUM_NODES"

# Every node is looked at first: a red line ends the job before it costs anything.
srun --kill-on-bad-exit=1 "${PYTHON:-python3}" -m megatron_splitkv doctor
# The first dollar sign is for the shell on each node.
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash examples/train_node.sh "$@"' \
  train_node "$@"
