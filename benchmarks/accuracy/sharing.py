"""A worker beside others on its GPU: NCCL takes each for a machine of its own, reached by the network.

Started by the launcher in place of shardwise's own worker. What torch's allocator does is what it does on a
GPU for each; time, energy and NCCL's own memory are not.
"""

from __future__ import annotations

import os
import sys

from shardwise.train.worker import main

if __name__ == "__main__":  # torch reads these when it is first asked for a GPU
    rank, gpus = os.environ["RANK"], os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": gpus[int(rank) % len(gpus)],
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank-{rank}",
    }
    sys.exit(main())
