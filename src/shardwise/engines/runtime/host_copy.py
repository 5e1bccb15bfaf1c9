"""A rank's state in host memory, from where a thread writes it while training goes on (decision 0069)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.engines.runtime.protocol import World
from shardwise.engines.runtime.state import KINDS, Part, header_of, path_of
from shardwise.models.tensor_file import write_file

SMALL = 1 << 20
"""Bytes of a tensor that is copied on the GPU first. A copy to the host waits for those that were asked for
before it, on whatever stream: training would wait for all of the state because of one scalar."""
BLOCK = 1 << 26
"""Bytes of page-locked memory that are reserved at a time: torch rounds them up to a power of two."""


class HostCopy:
    """The content of this rank's file. Its memory is reserved once: that takes longer than filling it."""

    def __init__(self, world: World) -> None:
        self._world, self._on_gpu = world, world.device.type == "cuda"
        self._blocks: list[torch.Tensor] = []
        self._header, self._size = b"", 0
        if self._on_gpu:
            self._stream, self._copied = torch.cuda.Stream(world.device), torch.cuda.Event()
            register_optimizer_step_pre_hook(self._wait)

    @staticmethod
    def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
        """Host memory for a copy of these."""
        return -(-sum(t.numel() * t.element_size() for t in tensors.values()) // BLOCK) * BLOCK

    def reserve(self, size: int) -> None:
        """See that there are blocks for so many bytes."""
        while len(self._blocks) * BLOCK < size:
            self._blocks.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=self._on_gpu))

    def take(self, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, Part]) -> None:
        """Copy tensors; the copy before is overwritten. On a GPU, what is issued later waits where it has to.

        Weights and moments change in the optimizer's step alone. They are copied during the next forward and
        backward pass, and the optimizer waits. All else is copied before these begin: small tensors on the
        GPU.
        """
        self._header, self._size = header_of(tensors, self._world.size, parts), 0
        if not self._on_gpu:
            for tensor in tensors.values():
                self._append(tensor)
            return
        compute = torch.cuda.current_stream(self._world.device)
        others = {key: t for key, t in tensors.items() if key.partition("/")[0] not in KINDS}
        small = {key: t.clone() for key, t in others.items() if t.nbytes <= SMALL}
        self._stream.wait_stream(compute)
        for key, tensor in {**tensors, **small}.items():
            stream = self._stream if key in small or key not in others else compute
            with torch.cuda.stream(stream):
                self._append(tensor)
            if tensor.is_cuda:
                tensor.record_stream(stream)  # its memory is not used again before it is copied
        self._stream.wait_stream(compute)
        self._copied.record(self._stream)

    def write(self, directory: Path) -> None:
        """Write the file into an existing folder."""
        if self._on_gpu:
            self._copied.synchronize()
        ends = range(self._size, 0, -BLOCK)  # what is left from each block on
        chunks = (block[:left] for block, left in zip(self._blocks, ends, strict=False))
        write_file(path_of(directory, self._world.rank), self._header, chunks)

    def _append(self, tensor: torch.Tensor) -> None:
        data = tensor.detach().reshape(-1).view(torch.uint8)
        while len(data):
            self.reserve(self._size + 1)
            index, at = divmod(self._size, BLOCK)
            count = min(len(data), BLOCK - at)
            self._blocks[index][at : at + count].copy_(data[:count], non_blocking=True)
            data = data[count:]
            self._size += count

    def _wait(self, *_: Any) -> None:
        torch.cuda.current_stream(self._world.device).wait_event(self._copied)
