"""Random numbers that depend on a seed and a name, and on nothing that happened before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(device: torch.device) -> Iterator[Callable[[int, str], None]]:
    """Gives a function that seeds torch's generators, of the CPU and of `device`, from a number and a name.

    Both are restored afterwards.
    """

    def seed(number: int, name: str) -> None:
        digest = hashlib.blake2b(f"{number}/{name}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(value)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(value)

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield seed
