#!/usr/bin/env bash
# One GPU: LoRA rank 16 on all linears of a Llama-3.1-8B shape, rows of 4096 packed tokens, bf16.
#   run_1gpu.sh TEXT...        results in $OUT, or results/ next to this script
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/rows.sh"
assets=${ASSETS:-/tmp/shardwise-bench/8b}
[ -e "$assets/text.jsonl" ] || "$python" "$here/make_assets.py" --shape llama-3.1-8b --out "$assets" "$@" || exit 1

row 150 shardwise_run.py --assets "$assets" --lora 16
row 120 trl_sft.py --assets "$assets"
row 120 trl_sft.py --assets "$assets" --tuned
row 120 trl_sft.py --assets "$assets" --tuned --packing wrapped
row 120 bare.py --assets "$assets" --lora 16
row 150 shardwise_run.py --assets "$assets" --lora 16 --micro-batch 2
row 120 trl_sft.py --assets "$assets" --tuned --packing wrapped --micro-batch 2
row 120 bare.py --assets "$assets" --lora 16 --micro-batch 2
finish 1gpu
