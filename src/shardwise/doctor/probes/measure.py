"""One rank of `doctor --calibrate`: times products, memory, copies and collectives. All ranks work at once.

So it is in a training step: GPUs that share a link, or the host's memory, get their share of it. Seconds are
the median over rounds, of one call among several in a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise.doctor.probes.collective import finish, join

ROUNDS = 3
SIDES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (128, 256, 512)}
"""Of square matrices; CPUs without units for bf16 take a second for 10^9 FLOPs."""
MEMORY_BYTES = {"cuda": 2**30, "cpu": 2**28}
COPIES = (2**16, 2**20, 2**24, 2**28)
COLLECTIVES = {
    "cuda": (2**12, 2**16, 2**20, 2**24, 2**27, 2**29),
    "cpu": (2**12, 2**16, 2**20, 2**22),
}
"""Bytes of the whole tensor, before or after it is in parts."""
HOST_CALLS = 5000


def measure(stage: Callable[[str], None]) -> dict[str, Any]:
    """What this rank measured: `products`, `samples` (what, bytes, seconds), rates, and `skipped`."""
    rank, size, device = join(stage)
    bench = _Bench(device)
    found: dict[str, Any] = {"ranks": size, "device": device.type, "samples": [], "skipped": []}
    stage("timing calls of torch on the host")
    found["host_call_seconds"] = host_call_seconds()
    stage("timing memory")
    found["memory_bytes_per_second"] = _memory(bench)
    found["products"] = list(_products(bench, stage))
    if device.type == "cuda":
        found["samples"] += _copies(bench, stage)
    else:
        found["skipped"].append("copies between host and GPU: there is no GPU")
    if size > 1:
        for name, act in _collectives(rank, size, device):
            try:
                for num_bytes in COLLECTIVES[device.type]:
                    stage(f"{name} of {num_bytes} bytes")
                    seconds = bench.seconds(act(num_bytes), calls=_calls(num_bytes))
                    found["samples"].append({"what": name, "bytes": num_bytes, "seconds": seconds})
            except RuntimeError as error:  # gloo of older versions of torch knows fewer of them
                if device.type == "cuda":
                    raise
                found["skipped"].append(f"{name}: {' '.join(str(error).split())[:120]}")
    else:
        found["skipped"].append("links between GPUs: there is one GPU")
    stage("leaving")
    dist.destroy_process_group()
    return found


class _Bench:
    """Times calls on one device, all ranks beginning together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, act: Callable[[], object], *, calls: int) -> float:
        act()
        finish(self.device)
        rounds = []
        for _ in range(ROUNDS):
            dist.barrier()
            finish(self.device)
            start = time.perf_counter()
            for _ in range(calls):
                act()
            finish(self.device)
            rounds.append((time.perf_counter() - start) / calls)
        return statistics.median(rounds)


def _calls(num_bytes: int) -> int:
    return 50 if num_bytes <= 2**20 else 10 if num_bytes <= 2**24 else 5


def host_call_seconds() -> float:
    """What a call of torch costs this processor, at best: an addition of two numbers on the CPU."""
    number = torch.zeros(())
    rounds = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            number.add_(1.0)
        rounds.append((time.perf_counter() - start) / HOST_CALLS)
    return min(rounds)


def _memory(bench: _Bench) -> float:
    """Bytes read and written a second by a copy within the device's memory, or the host's."""
    num_bytes = MEMORY_BYTES[bench.device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / bench.seconds(lambda: target.copy_(source), calls=5)


def _products(bench: _Bench, stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """FLOP/s of square bf16 products. All ranks take the same sizes: they begin each together."""
    for side in SIDES[bench.device.type]:
        stage(f"multiplying matrices of {side} x {side}")
        calls = 1 if bench.device.type == "cpu" else 100 if side <= 4096 else 10
        a, b = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        seconds = bench.seconds(partial(torch.mm, a, b, out=out), calls=calls)
        yield {"side": side, "flops_per_second": 2 * side**3 / seconds}


def _copies(bench: _Bench, stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Host memory to the GPU and back, page-locked and not."""
    for num_bytes in COPIES:
        gpu = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
        for kind in ("pinned", "pageable"):
            stage(f"copying {num_bytes} {kind} bytes")
            host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
            for what, target, source in ((f"{kind}_to_gpu", gpu, host), (f"gpu_to_{kind}", host, gpu)):
                copy = partial(target.copy_, source, non_blocking=True)
                seconds = bench.seconds(copy, calls=_calls(num_bytes))
                yield {"what": what, "bytes": num_bytes, "seconds": seconds}


def _collectives(
    rank: int, size: int, device: torch.device
) -> Iterator[tuple[str, Callable[[int], Callable[[], object]]]]:
    """Each with what makes a call of it for a number of bytes."""

    def tensor(num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes // size // 4 * size, device=device)

    def all_reduce(num_bytes: int) -> Callable[[], object]:
        values = tensor(num_bytes)
        return lambda: dist.all_reduce(values)

    def all_gather(num_bytes: int) -> Callable[[], object]:
        whole = tensor(num_bytes)
        part = torch.zeros(whole.numel() // size, device=device)
        return lambda: dist.all_gather_into_tensor(whole, part)

    def reduce_scatter(num_bytes: int) -> Callable[[], object]:
        whole = tensor(num_bytes)
        part = torch.zeros(whole.numel() // size, device=device)
        return lambda: dist.reduce_scatter_tensor(part, whole)

    def neighbour(num_bytes: int) -> Callable[[], object]:
        mine, theirs = tensor(num_bytes), tensor(num_bytes)
        ops = [
            dist.P2POp(dist.isend, mine, (rank + 1) % size),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % size),
        ]
        return lambda: [work.wait() for work in dist.batch_isend_irecv(ops)]

    yield "all_reduce", all_reduce
    yield "all_gather", all_gather
    yield "reduce_scatter", reduce_scatter
    yield "send_to_neighbour", neighbour
