#!/usr/bin/env bash
# One GPU: LoRA rank 16 on all linears of a Llama-3.1-8B shape, rows of 4096 packed tokens, bf16.
#   run_1gpu.sh TEXT...        results in $OUT, or results/ next to this script
# Unsloth and LLaMA-Factory need other packages than shardwise: $UNSLOTH and $LLAMAFACTORY name folders of theirs
# (pip install --target), and $FLASH4 one of flash-attn-4, with which ours is measured once more. Without them, their
# rows are left out. NF4=1 measures NF4 under a cap of 24 GiB instead.
# LONG=1 lets the fastest run longer: shardwise records kinds of micro-batches, most of them in the first steps.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}  # LLaMA-Factory refuses more
name=1gpu${NF4:+-nf4}${LONG:+-long}
. "$here/rows.sh"
assets=${ASSETS:-/tmp/shardwise-bench/8b}
weights=${UNSLOTH:+--weights}${LLAMAFACTORY:+--weights}
[ -e "$assets/text.jsonl" ] ||
  "$python" "$here/make_assets.py" --shape llama-3.1-8b --out "$assets" ${weights:+--weights} "$@" || exit 1

unsloth() { [ -z "${UNSLOTH:-}" ] || site=$UNSLOTH row 180 unsloth_sft.py --assets "$assets" $steps "$@"; }
llamafactory() { [ -z "${LLAMAFACTORY:-}" ] || site=$LLAMAFACTORY row 180 llamafactory_sft.py --assets "$assets" $steps "$@"; }
ours() {
  row 150 shardwise_run.py --assets "$assets" --lora 16 $steps "$@"
  [ -z "${FLASH4:-}" ] || site=$FLASH4 row 150 shardwise_run.py --assets "$assets" --lora 16 $steps "$@"
}
steps="--steps 40 --warmup 20"
[ -z "${LONG:-}" ] || steps="--steps 120 --warmup 80"

if [ -n "${NF4:-}" ]; then
  capped=(--nf4 --memory-cap 24)
  ours "${capped[@]}"
  ours "${capped[@]}" --checkpointing 4
  ours "${capped[@]}" --micro-batch 2 --checkpointing full
  unsloth "${capped[@]}"
  unsloth "${capped[@]}" --checkpointing
  unsloth "${capped[@]}" --micro-batch 2 --checkpointing
  finish
  exit
fi
if [ -n "${LONG:-}" ]; then
  ours --micro-batch 2
  unsloth --micro-batch 2
  unsloth --micro-batch 2 --compiled
  llamafactory --micro-batch 2
  finish
  exit
fi
ours --micro-batch 2
ours --micro-batch 2 --checkpointing 4
unsloth --micro-batch 2
unsloth --micro-batch 2 --compiled
unsloth --micro-batch 2 --packing
unsloth --micro-batch 2 --checkpointing
llamafactory --micro-batch 2
row 120 trl_sft.py --assets "$assets" $steps --tuned --micro-batch 2
row 120 trl_sft.py --assets "$assets" $steps --tuned --packing wrapped --micro-batch 2
row 120 bare.py --assets "$assets" $steps --lora 16 --micro-batch 2
finish
