"""One rank of an all-reduce over all local GPUs (NCCL), or over two processes of a CPU (gloo)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GPU_BYTES, CPU_BYTES = 64 * 2**20, 2**20
CALLS = 5
TIMEOUT = timedelta(minutes=10)
"""Longer than the parent waits: it is the parent that calls it a hang."""


def join(stage: Callable[[str], None]) -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks and the device, all in one process group."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stage(f"rank {rank} of {size} meets the others on {host}:{port}")
    store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=TIMEOUT)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    stage(f"rank {rank} of {size} connects over {backend}")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return rank, size, device


def finish(device: torch.device) -> None:
    """Waits for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_reduce(stage: Callable[[str], None]) -> dict[str, Any]:
    """Sums rank + 1 over the ranks, looks at every element, and takes the time."""
    rank, size, device = join(stage)
    num_bytes = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    values = torch.full((num_bytes // 4,), rank + 1.0, device=device)
    stage(f"rank {rank} of {size} sums {num_bytes} bytes")
    dist.all_reduce(values)
    finish(device)
    right = bool((values == size * (size + 1) / 2).all())
    start = time.perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(values)
    finish(device)
    seconds = (time.perf_counter() - start) / CALLS
    stage(f"rank {rank} of {size} leaves")
    dist.destroy_process_group()
    backend = "nccl" if device.type == "cuda" else "gloo"
    return {"backend": backend, "ranks": size, "right": right, "bytes": num_bytes, "seconds": seconds}
