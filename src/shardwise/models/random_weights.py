"""A fresh initialisation, as transformers does it for the architecture, of any part of a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.models.structure import children_first, find_blocks, join, own_tensors, seeded

_OUTSIDE = -1
"""Number of the unit that holds everything outside the blocks."""


class RandomWeights:
    """Initial values by name, from a seed per module.

    They depend on the seed and on the kind of device, and not on the order or the process in which they are
    read. A block is initialised at once, and so is everything outside the blocks, because a module may set
    its children's weights again (GPT-2 scales its residual projections).
    """

    def __init__(self, skeleton: PreTrainedModel, *, seed: int) -> None:
        """`skeleton` is the model on the meta device without adapters, which nothing else changes."""
        self._seed = seed
        self._names = {module: name for name, module in skeleton.named_modules()}
        unit_of = {
            module: index for index, block in enumerate(find_blocks(skeleton)) for module in block.modules()
        }
        self._units: dict[int, list[tuple[nn.Module, PreTrainedModel]]] = defaultdict(list)
        self._unit_of_tensor: dict[str, int] = {}
        for module, initialiser in children_first(skeleton, skeleton):
            unit = unit_of.get(module, _OUTSIDE)
            self._units[unit].append((module, initialiser))
            for _, name, _ in own_tensors(module):
                self._unit_of_tensor[join(self._names[module], name)] = unit

    def read(self, names: Sequence[str], device: torch.device) -> Mapping[str, torch.Tensor]:
        """Initial values in fp32, from which every other dtype is rounded."""
        found: dict[str, torch.Tensor] = {}
        for unit in sorted({self._unit_of_tensor[name] for name in names}):
            values = self._initialise(self._units[unit], device)
            found |= {name: values[name] for name in names if name in values}
        return found

    def release(self) -> None:
        """Nothing is kept: values are computed again."""

    @torch.no_grad()
    def _initialise(
        self, unit: Sequence[tuple[nn.Module, PreTrainedModel]], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Values of all tensors of a unit, which the skeleton holds only during this call."""
        places = [
            (place, name, tensor, join(self._names[module], name))
            for module, _ in unit
            for place, name, tensor in own_tensors(module)
        ]
        uses = Counter(id(tensor) for _, _, tensor, _ in places)
        real = {id(tensor): _real(tensor, device) for _, _, tensor, _ in places}
        tied = {id(real[key]) for key, count in uses.items() if count > 1}
        for place, name, tensor, _ in places:
            place[name] = real[id(tensor)]
        try:
            with seeded(device) as seed:
                for module, initialiser in unit:
                    seed(self._seed, self._names[module])
                    initialiser._init_weights(module)
                    for _, _, tensor in own_tensors(module):
                        if id(tensor) in tied:
                            # transformers' functions skip tensors with this mark: the next owner keeps them
                            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        finally:
            for place, name, tensor, _ in places:
                place[name] = tensor
        return {full_name: real[id(tensor)].detach() for _, _, tensor, full_name in places}


def _real(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    real = torch.empty(tensor.shape, dtype=dtype, device=device)
    return nn.Parameter(real, requires_grad=False) if isinstance(tensor, nn.Parameter) else real
