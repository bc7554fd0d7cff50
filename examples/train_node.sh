#!/usr/bin/env bash
# One node's part of a training job. Run the same line on every node, with its own NODE_RANK:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 FEATURE_STORE=/shared/data/train \
#       CHECKPOINTS=/shared/run bash examples/train_node.sh
# Run it again and training goes on from the latest checkpoint. Arguments replace the model and the
# schedule below. docs/multi-node.md says what the variables are for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${FEATURE_STORE:?a folder that splitkv prepare wrote, the same path on every node}"
: "${CHECKPOINTS:?a folder on storage that all nodes share}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
# Ranks of one context-parallel group are neighbours: up to this many stay on one node.
CP_SIZE="${CP_SIZE:-$GPUS_PER_NODE}"

# A drafter for Qwen3-8B.
if [ $# -eq 0 ]; then
  set -- --bf16 --num-layers 5 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 \
    --ffn-hidden-size 12288 --seq-length 8192 --global-batch-size 64 --train-iters 10000 \
    --lr 6e-4 --save-interval 500
fi

export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m torch.distributed.run \
  --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$GPUS_PER_NODE" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
  -m megatron_splitkv.pretrain_dflash \
  --context-parallel-size "$CP_SIZE" --cp-comm-type splitkv --calculate-per-token-loss \
  --feature-store "$FEATURE_STORE" --save "$CHECKPOINTS" --load "$CHECKPOINTS" "$@"
