#!/usr/bin/env bash
# Measure the link and the rows of two_nodes.toml on four GPUs of one machine: two_nodes.sh TEXT OUT_FOLDER
set -euo pipefail
export NCCL_IB_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo
python3 "$(dirname "$0")/link.py" --out "$2/two-nodes.json"
python3 "$(dirname "$0")/run.py" --text "$1" --rows "$(dirname "$0")/two_nodes.toml" --out "$2/two_nodes.jsonl" \
  --timeout 100 --row-seconds 10 --steady-seconds 3 --warmup 2 --steps 4 "${@:3}"
