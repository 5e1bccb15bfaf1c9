# A model of 1.0 billion parameters in fp32 goes from one GPU to two and back, by the command line, and is compared with a run on
# one GPU that never stops. Run it in an empty folder on a machine with two GPUs: bash two_gpus.sh TEXT.jsonl
# A checkpoint has 15.6 GB, and two are on disk while one is replaced. The losses are in runs/*/events.jsonl; results/two-gpus.json has those of 2026-11-24.
set -euo pipefail
cat > job.yaml <<JOB
name: run
output: runs
model: {source: tinyllama-1.1b, weights: random, tokenizer: train, tokenizer_vocab: 2048}
data: {train: $1, format: text, eval_fraction: 0.0, sequence_length: 1024, packing: true}
optimizer: {learning_rate: 1.0e-4, warmup_steps: 1, schedule: constant}
train: {steps: 10, global_batch: 4, micro_batch: 2, precision: fp32, eval_every: 0, save_every: 0, keep: 1}
strategy: single
tracking: []
JOB
hop() { shardwise train runs/run --resume --set strategy="$1" --processes "$2" --max-steps "$3"; }
shardwise train job.yaml --processes 1 --set name=base
shardwise train job.yaml --set strategy=zero3 --processes 1 --max-steps 4
hop fsdp2 2 6
hop zero2 1 8
hop zero3 2 10
