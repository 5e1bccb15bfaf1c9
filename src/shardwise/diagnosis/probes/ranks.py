"""Probes of one rank among all local GPUs (NCCL), or among the processes of a CPU (gloo).

`measure`, for `doctor --calibrate`, times products, memory, copies and collectives on all ranks at once, as
in a training step: GPUs that share a link, or the host's memory, get their share of it. Seconds are of one
call among several in a row, the median over rounds.
"""

import os
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

SUM_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}
SUM_CALLS, HOST_CALLS, ROUNDS = 5, 5000, 3
TIMEOUT = timedelta(minutes=10)  # longer than the parent waits, which reports the hang
# sides of square matrices; CPUs without units for bf16 take a second for 10^9 FLOPs
SIDES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (128, 256, 512)}
MEMORY_BYTES = {"cuda": 2**30, "cpu": 2**28}
COPIES = (2**16, 2**20, 2**24, 2**28)
# bytes of the full tensor: after a gather, before a scatter
COLLECTIVES = {"cuda": (2**12, 2**16, 2**20, 2**24, 2**27, 2**29), "cpu": (2**12, 2**16, 2**20, 2**22)}


def all_reduce(stage: Callable[[str], None]) -> dict[str, Any]:
    """Sum rank + 1 over the ranks, check every element, and time it."""
    rank, size, device = _join(stage)
    num_bytes = SUM_BYTES[device.type]
    values = torch.full((num_bytes // 4,), rank + 1.0, device=device)
    stage(f"rank {rank} of {size} sums {num_bytes} bytes")
    dist.all_reduce(values)
    _finish(device)
    right = bool((values == size * (size + 1) / 2).all())
    seconds = _round(device, partial(dist.all_reduce, values), SUM_CALLS)
    stage(f"rank {rank} of {size} leaves")
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {"backend": backend, "ranks": size, "right": right, "bytes": num_bytes, "seconds": seconds}


def measure(stage: Callable[[str], None]) -> dict[str, Any]:
    """What this rank measured: `products`, `samples` (what, bytes, seconds), rates, and `skipped`."""
    rank, size, device = _join(stage)
    found: dict[str, Any] = {"ranks": size, "device": device.type, "samples": [], "skipped": []}
    stage("timing calls of torch on the host")
    found["host_call_seconds"] = host_call_seconds()
    stage("timing memory")
    found["memory_bytes_per_second"] = _memory(device)
    found["products"] = list(_products(device, stage))
    if device.type == "cuda":
        found["samples"] += _copies(device, stage)
    else:
        found["skipped"].append("copies between host and GPU: there is no GPU")
    for name, act in _collectives(rank, size, device) if size > 1 else ():
        try:
            for num_bytes in COLLECTIVES[device.type]:
                stage(f"{name} of {num_bytes} bytes")
                seconds = seconds_of(device, act(num_bytes), calls=calls_for(num_bytes))
                found["samples"].append({"what": name, "bytes": num_bytes, "seconds": seconds})
        except RuntimeError as error:  # gloo of older versions of torch has fewer of them
            if device.type == "cuda":
                raise
            found["skipped"].append(f"{name}: {' '.join(str(error).split())[:120]}")
    if size == 1:
        found["skipped"].append("links between GPUs: there is one GPU")
    stage("leaving")
    dist.destroy_process_group()
    return found


def host_call_seconds() -> float:
    """The shortest time of a torch call on this processor: an addition of two numbers on the CPU."""
    names = {"number": torch.zeros(())}
    rounds = timeit.repeat("number.add_(1.0)", globals=names, repeat=10, number=HOST_CALLS)
    return min(rounds) / HOST_CALLS


def _join(stage: Callable[[str], None]) -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks and the device, all in one process group."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device, backend = (torch.device("cuda", rank), "nccl") if on_gpu else (torch.device("cpu"), "gloo")
    if on_gpu:
        torch.cuda.set_device(device)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stage(f"rank {rank} of {size} meets the others on {host}:{port}")
    store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=TIMEOUT)  # type: ignore[attr-defined]
    stage(f"rank {rank} of {size} connects over {backend}")
    place: dict[str, Any] = {"rank": rank, "world_size": size, "device_id": device if on_gpu else None}
    dist.init_process_group(backend, store=store, timeout=TIMEOUT, **place)
    return rank, size, device


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, act: Callable[[], object], *, calls: int) -> float:
    """Seconds of a call on `device`; all ranks begin together."""
    act()
    rounds = []
    for _ in range(ROUNDS):
        _finish(device)
        dist.barrier()
        _finish(device)
        rounds.append(_round(device, act, calls))
    return statistics.median(rounds)


def _round(device: torch.device, act: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        act()
    _finish(device)
    return (time.perf_counter() - start) / calls


def calls_for(num_bytes: int) -> int:
    """How often a transfer of so many bytes is timed in a row."""
    return 50 if num_bytes <= 2**20 else 10 if num_bytes <= 2**24 else 5


def _memory(device: torch.device) -> float:
    """Bytes read and written per second by a copy within the device's memory, or the host's."""
    num_bytes = MEMORY_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(device, lambda: target.copy_(source), calls=5)


def _products(device: torch.device, stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """FLOP/s of square bf16 products. All ranks take the same sizes: they begin each together."""
    for side in SIDES[device.type]:
        stage(f"multiplying matrices of {side} x {side}")
        calls = 1 if device.type == "cpu" else 100 if side <= 4096 else 10
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        seconds = seconds_of(device, partial(torch.mm, a, b, out=torch.empty_like(a)), calls=calls)
        yield {"side": side, "flops_per_second": 2 * side**3 / seconds}


def _copies(device: torch.device, stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for num_bytes in COPIES:
        gpu = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for kind in ("pinned", "pageable"):
            stage(f"copying {num_bytes} {kind} bytes")
            host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
            for what, target, source in ((f"{kind}_to_gpu", gpu, host), (f"gpu_to_{kind}", host, gpu)):
                copy = partial(target.copy_, source, non_blocking=True)
                seconds = seconds_of(device, copy, calls=calls_for(num_bytes))
                yield {"what": what, "bytes": num_bytes, "seconds": seconds}


def _collectives(rank: int, size: int, device: torch.device) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Each with a function that prepares a call of it for a number of bytes."""

    def tensor(num_bytes: int, parts: int = 1) -> torch.Tensor:
        return torch.zeros(num_bytes // size // 4 * size // parts, device=device)

    def neighbour(num_bytes: int) -> Callable[[], object]:
        send = dist.P2POp(dist.isend, tensor(num_bytes), (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, tensor(num_bytes), (rank - 1) % size)
        return lambda: [work.wait() for work in dist.batch_isend_irecv([send, receive])]

    yield "all_reduce", lambda n: partial(dist.all_reduce, tensor(n))
    yield "all_gather", lambda n: partial(dist.all_gather_into_tensor, tensor(n), tensor(n, size))
    yield "reduce_scatter", lambda n: partial(dist.reduce_scatter_tensor, tensor(n, size), tensor(n))
    yield "send_to_neighbour", neighbour
