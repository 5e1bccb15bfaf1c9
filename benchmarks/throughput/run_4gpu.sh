#!/usr/bin/env bash
# Four GPUs: all weights of a Llama-2-7B shape, 2 rows of 2048 tokens per GPU, bf16.
#   run_4gpu.sh TEXT...        results in $OUT, or results/ beside this script
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/rows.sh"
assets=${ASSETS:-/tmp/shardwise-bench/7b}
[ -e "$assets/text.jsonl" ] || "$python" "$here/make_assets.py" --shape llama-2-7b --out "$assets" "$@" || exit 1
shape=(--assets "$assets" --micro-batch 2 --sequence 2048)

for strategy in zero2 fsdp2 zero3; do
  row 180 shardwise_run.py "${shape[@]}" --processes 4 --strategy $strategy
done
for engine in zero2 fsdp2 zero3; do
  gpus=4 row 150 bare.py "${shape[@]}" --engine $engine
done
for strategy in zero2 fsdp2 zero3; do
  row 180 shardwise_run.py "${shape[@]}" --processes 4 --strategy $strategy --checkpointing
done
row 300 shardwise_run.py "${shape[@]}" --processes 4 --strategy zero3-offload --checkpointing --steps 6 --warmup 2
gpus=4 row 300 bare.py "${shape[@]}" --engine zero3 --offload --checkpointing --steps 6 --warmup 2
finish 4gpu
