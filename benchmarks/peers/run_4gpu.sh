#!/usr/bin/env bash
# Four GPUs: all weights of a Llama-2-7B shape, 2 rows of 2048 tokens per GPU, bf16.
#   run_4gpu.sh TEXT...        results in $OUT, or results/ next to this script
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
name=4gpu
. "$here/rows.sh"
assets=${ASSETS:-/tmp/shardwise-bench/7b}
[ -e "$assets/text.jsonl" ] || "$python" "$here/make_assets.py" --shape llama-2-7b --out "$assets" "$@" || exit 1
# a small learning rate: random weights without a warm-up make larger ones spike, and hide whether losses agree
shape=(--assets "$assets" --micro-batch 2 --sequence 2048 --learning-rate 1e-5)
gathered='{"engine": "deepspeed", "stage": 3, "reshard": false}'
kept='{"engine": "fsdp2", "reshard": false}'

for strategy in zero2 fsdp2 zero3 "$gathered" "$kept"; do
  row 100 shardwise_run.py "${shape[@]}" --processes 4 --strategy "$strategy"
done
for engine in zero2 fsdp2 zero3; do
  gpus=4 row 100 bare.py "${shape[@]}" --engine $engine
done
for strategy in zero2 fsdp2 zero3; do
  row 100 shardwise_run.py "${shape[@]}" --processes 4 --strategy $strategy --checkpointing full
done
row 200 shardwise_run.py "${shape[@]}" --processes 4 --strategy zero3-offload --checkpointing full --steps 5 --warmup 2
finish
