"""The GPU that meta tensors stand for: kernels that look at the device treat them as tensors on that GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from shardwise.simulate.time.roofline import MULTIPROCESSORS


@dataclass(frozen=True, kw_only=True)
class Target:
    """Properties of a GPU that decide which kernels run."""

    capability: tuple[int, int]
    """CUDA compute capability."""
    multiprocessors: int
    flash4: bool = False
    """Whether flash attention 4 is installed, for packed rows (`kernels.flash4`)."""


HOPPER = Target(capability=(9, 0), multiprocessors=MULTIPROCESSORS)

_TARGET: ContextVar[Target] = ContextVar("target", default=HOPPER)


@contextmanager
def meta_stands_for(target: Target) -> Iterator[None]:
    """Within the context, treat tensors on the meta device as tensors on `target`."""
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def target() -> Target:
    """The GPU that meta tensors stand for."""
    return _TARGET.get()


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on a GPU, or stands for one that is."""
    return tensor.is_cuda or tensor.is_meta


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability; (0, 0) for a CPU."""
    if device.type == "meta":
        return target().capability
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def run_on_cuda(operator: Any, module: str, function: str) -> None:
    """Register a function of `kernels/MODULE.py` as the CUDA side of a custom operator.

    The module is imported by the first call, because Triton is not installed without a GPU.
    """

    def launch(*arguments: Any) -> Any:
        return getattr(import_module(f"shardwise.kernels.{module}"), function)(*arguments)

    operator.register_kernel("cuda")(launch)
