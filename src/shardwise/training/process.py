"""This process and the other ranks: joining them, exchanging values, stopping."""

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engines.runtime.protocol import World
from shardwise.errors import MachineError

# A slow rank 0 (hashing a large checkpoint, a cold file system) must not look like a hang.
TIMEOUT = timedelta(minutes=30)


def place() -> tuple[int, int, int]:
    """(rank, world size, local rank) from the launcher's environment; one process when there is none."""
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    fix = "start with `shardwise train` or torchrun"
    try:
        rank, size, local_rank = (int(os.environ.get(key, value)) for key, value in single.items())
    except ValueError as error:
        what = f"the launcher's environment is not numeric: {error}"
        where = ", ".join(f"{key}={os.environ.get(key)}" for key in single)
        raise MachineError(what, where=where, fix=fix) from None
    if not 0 <= rank < size:
        raise MachineError(f"RANK={rank} is not below WORLD_SIZE={size}", fix=fix)
    return rank, size, local_rank


def device_of(local_rank: int) -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        what = f"process {local_rank} has no GPU: this machine shows {count}"
        where = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}"
        raise MachineError(what, where=where, fix=f"--processes {count}, or make more GPUs visible")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def join(
    *,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    reserve_at_most_bytes: int | None = None,
    local_disks: bool = False,
) -> World:
    """Join the process group (NCCL on GPUs, gloo on CPUs) and take a device.

    Ranks are counted stage by stage, within a stage row by row, and those that share rows come after each
    other. `reserve_at_most_bytes`: of GPU memory, by torch's allocator. `local_disks`: see `World`.
    """
    rank, size, local_rank = place()
    device = device_of(local_rank)
    if reserve_at_most_bytes is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, reserve_at_most_bytes / total), device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_store(rank, size),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        device=device,
        data_rank=rank % (size // pipeline) // tensor_parallel,
        data_size=size // pipeline // tensor_parallel,
        local_disks=local_disks,
    )


def _store(rank: int, size: int) -> Any:
    """Where the ranks find each other. It listens on the rendezvous address alone: it asks nobody who he is.

    torch's own listens on every address of the machine. torchrun has a store already, which is kept.
    """
    if size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]  # needs no port
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "MASTER_ADDR" not in os.environ:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = None
    if rank == 0:
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((address, port), family=family).detach()
        except OSError as error:
            what = f"the processes cannot meet at {address}:{port}: {error.strerror}"
            fix = "name a free port of the machine of rank 0"
            raise MachineError(what, where="MASTER_ADDR, MASTER_PORT", fix=fix) from None
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, size, rank == 0, TIMEOUT, master_listen_fd=listener
    )


@contextmanager
def settled() -> Iterator[None]:
    """Keep the garbage collector from searching what exists now, which would delay steps.

    It is unfrozen afterwards: what is frozen when Python ends is never freed, and Triton then prints pages
    about leaks.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Ranks:
    """Small exchanges between the ranks, on the CPU: they never wait for the GPU."""

    def __init__(self, world: World, name: str = "exchange") -> None:
        """`name`: of their group, in records of what they wait for."""
        self.world = world
        self._group = None
        if world.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc=name)

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(self, numbers: list[float]) -> Callable[[], list[list[float]]]:
        """Start sharing a few numbers; the returned function waits and gives them by rank. Collective."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self._group is None:
            return lambda: [mine.tolist()]
        all_numbers = [torch.empty_like(mine) for _ in range(self.world.size)]
        work = dist.all_gather(all_numbers, mine, group=self._group, async_op=True)

        def read() -> list[list[float]]:
            work.wait()
            return [numbers.tolist() for numbers in all_numbers]

        return read


@dataclass
class StopSignal:
    """Remembers that this process was asked to stop; the loop decides when."""

    requested: bool = field(default=False, init=False)

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda *_: self.ask())

    def ask(self) -> None:
        """As a signal does."""
        self.requested = True
