#!/usr/bin/env bash
# Calibrate and measure the rows of slow.toml on two GPUs over sockets: slow_link.sh TEXT OUT_FOLDER
set -euo pipefail
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo
export SHARDWISE_CACHE="$2/cache"
python3 -m shardwise doctor --calibrate || true  # 4 also where training would miss something; cp ends without a file
cp "$SHARDWISE_CACHE"/calibration/*.json "$2/slow-link.json"
python3 "$(dirname "$0")/run.py" --text "$1" --rows "$(dirname "$0")/slow.toml" --out "$2/slow.jsonl" \
  --timeout 60 --row-seconds 10 --steady-seconds 3 --warmup 2 --steps 4 "${@:3}"
