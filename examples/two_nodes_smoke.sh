#!/usr/bin/env bash
# Two "nodes" on this machine: two torchrun agents that meet on the loopback interface, one rank
# each, one context-parallel group across both. Trains, saves, and goes on from the checkpoint.
# Needs no GPU and no data; the way to see whether a cluster's script can work before queueing it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

"$PYTHON" - "$folder/store" <<'PROGRAM'
import sys
from megatron_splitkv.testing.synthetic import make_synthetic_store
make_synthetic_store(sys.argv[1], (70, 50, 20, 63, 41, 30, 57, 44), hidden_size=32, prompt_length=1)
PROGRAM

export PYTHON NNODES=2 GPUS_PER_NODE=1 CP_SIZE=2 MASTER_ADDR=127.0.0.1
export FEATURE_STORE="$folder/store" CHECKPOINTS="$folder/checkpoints"
train() { # until an iteration, on both nodes
  MASTER_PORT="$("$PYTHON" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')"
  export MASTER_PORT
  local node nodes=() failed=0
  for node in 0 1; do
    NODE_RANK=$node bash examples/train_node.sh --num-layers 1 --num-attention-heads 4 \
      --num-query-groups 2 --kv-channels 8 --ffn-hidden-size 48 --seq-length 96 --block-size 4 \
      --num-anchors 6 --lr 1e-2 --train-iters 4 --exit-interval "$1" --log-interval 1 \
      > "$folder/node$node.log" 2>&1 &
    nodes+=($!)
  done
  local ended pid left
  while [ ${#nodes[@]} -gt 0 ]; do # whichever ends first; without one the other would wait
    wait -n -p ended "${nodes[@]}" || { failed=1; kill "${nodes[@]}" 2> /dev/null || true; break; }
    left=()
    for pid in "${nodes[@]}"; do [ "$pid" = "$ended" ] || left+=("$pid"); done
    nodes=("${left[@]}")
  done
  wait
  if [ $failed = 1 ]; then
    tail -n 25 "$folder"/node?.log >&2
    return 1
  fi
  grep -h "drafter loss:" "$folder"/node?.log
}

train 2
train 4
test "$(cat "$CHECKPOINTS/latest_checkpointed_iteration.txt")" = 4
echo "two nodes trained, saved and went on"
