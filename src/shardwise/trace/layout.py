"""A model's parameters and units, and copies of it with some of its blocks, to be traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.kernels.quantized_linear import QuantizedLinear
from shardwise.models.build import BuiltModel
from shardwise.models.structure import copied
from shardwise.simulate.step_trace import Parameter, Unit


@dataclass(frozen=True, kw_only=True)
class Part:
    """A copy of a model with some of its blocks."""

    model: PreTrainedModel
    parameters: Mapping[int, nn.Parameter]
    units: Mapping[int, nn.Module]
    """Both by their index in the full model."""


class Layout:
    """Parameters and units of a model: its blocks in order, then the leaf modules outside them."""

    def __init__(self, built: BuiltModel, *, full: Layout | None = None) -> None:
        """`full`: the layout of the model that `built` is a tensor-parallel rank's part of."""
        self._model, self._blocks = built.model, built.blocks
        named = list(built.model.named_parameters())
        self._originals = [p for _, p in named]
        index = {id(p): i for i, p in enumerate(self._originals)}
        modules = {module: name for name, module in built.model.named_modules()}
        layers = [module for module in modules if isinstance(module, QuantizedLinear)]
        quantized = {id(layer.weight): layer.in_features * layer.out_features for layer in layers}
        shapes = [full.parameters[i].shape if full else tuple(p.shape) for i, (_, p) in enumerate(named)]
        self.parameters: tuple[Parameter, ...] = tuple(
            Parameter(
                name=name,
                shape=tuple(p.shape),
                item_bytes=p.element_size(),
                trainable=p.requires_grad,
                made_of=quantized.get(id(p), 0),
                cut_from=None if p.shape == shape else shape,
            )
            for (name, p), shape in zip(named, shapes, strict=True)
        )
        self.buffers = tuple(b.numel() * b.element_size() for b in built.model.buffers())
        inside = {module for block in built.blocks for module in block.modules()}
        outside = [module for module in modules if module not in inside]
        owners = [m for m in outside if next(m.parameters(recurse=False), None) is not None]
        self._modules: list[nn.Module] = [*built.blocks, *owners]
        self.units = tuple(
            Unit(
                name=modules[module],
                block=i if i < len(built.blocks) else -1,
                parameters=tuple(index[id(p)] for p in module.parameters()),
            )
            for i, module in enumerate(self._modules)
        )
        self._place = {
            p: (block, place)
            for block in range(len(built.blocks))
            for place, p in enumerate(self.units[block].parameters)
        }

    def block(self, parameter: int) -> int:
        """The block of a parameter; -1 where it is in none."""
        return self._place.get(parameter, (-1, 0))[0]

    def further(self, parameter: int, shift: int) -> int:
        """The same parameter `shift` blocks later; itself where it is in no block."""
        if parameter not in self._place:
            return parameter
        block, place = self._place[parameter]
        return self.units[block + shift].parameters[place]

    def part(self, kept: Sequence[int]) -> Part:
        """Copy the model with only the blocks `kept`; the model itself stays as it is."""
        lists = [module for module in self._model.modules() if isinstance(module, nn.ModuleList)]
        (holder,) = [blocks for blocks in lists if list(blocks) == self._blocks]
        copies: dict[int, Any] = {}
        everything = holder._modules
        holder._modules = {str(place): self._blocks[block] for place, block in enumerate(kept)}
        try:
            model = copied(self._model, copies)
        finally:
            holder._modules = everything
        return Part(
            model=model,
            parameters={i: copies[id(p)] for i, p in enumerate(self._originals) if id(p) in copies},
            units={i: copies[id(m)] for i, m in enumerate(self._modules) if id(m) in copies},
        )
