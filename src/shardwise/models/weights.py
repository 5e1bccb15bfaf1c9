"""Weights for a model that was built on the meta device: one part at a time, on any device, in any order.

`Weights.fill` is what engines call. A source gives it the values by name: `RandomWeights`, a fresh
initialisation, or `SafetensorsWeights`, a published model's files. Adapters are in no source: they start
from PEFT's initialisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.kernels.quantized_linear import QuantizedLinear
from shardwise.models.adapters import base_name, initial_values, is_adapter
from shardwise.models.seeding import seeded
from shardwise.models.structure import join, own_tensors


class WeightSource(Protocol):
    """Gives tensors by their name in the Hugging Face model without adapters."""

    def read(self, names: Sequence[str], device: torch.device) -> Mapping[str, torch.Tensor]:
        """The named tensors on `device`, in the source's dtype; of a tied one, the first name asks for it."""

    def release(self) -> None:
        """Frees what is kept from one reading to the next."""


@dataclass(frozen=True)
class _Slot:
    """A meta tensor to be filled, and every place where it stands: several for tied weights."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    layer: QuantizedLinear | None = None
    """Whose weight it is, and stored in fewer bits."""


class Weights:
    """The values of one model's parameters and persistent buffers, given out on demand."""

    def __init__(self, model: nn.Module, source: WeightSource, *, seed: int) -> None:
        """`model` may hold adapters, which `seed` is for; `source` knows the model without them."""
        self._model = model
        self._seed = seed
        self.source = source

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Gives every meta parameter and persistent buffer below `module` its value, on `device`.

        Each keeps its dtype, its `requires_grad` and its attributes; tied ones stay tied, wherever
        they stand. A quantised layer quantises its value. What is not on the meta device is left alone.

        Raises:
            CheckpointError: a file is damaged.
        """
        slots = self._slots(module)
        base = {base_name(slot.names[0]): slot for slot in slots if not is_adapter(slot.names[0])}
        values = dict(self.source.read(list(base), device)) if base else {}
        for name, slot in base.items():
            _put(slot, values.pop(name))  # so that only one part of it ever exists twice
        for slot in slots:
            if is_adapter(slot.names[0]):
                _put(slot, self._adapter(slot, device))
        left = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        if left:
            raise RuntimeError(f"{len(left)} parameters are not of the model that was built, e.g. {left[0]}")

    @torch.no_grad()
    def verify(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Compares whole tensors, named as in the model, with their source; returns how many were compared.

        Quantised weights may differ by what quantising rounds.

        For a sharded model gather a few parameters and hand them in: reading every one again takes as
        long as loading. Adapters are skipped.

        Raises:
            CheckpointError: a tensor holds other values.
        """
        compared = 0
        for full_name, tensor in tensors:
            if is_adapter(full_name):
                continue
            name = base_name(full_name)
            expected = self.source.read([name], tensor.device)[name]
            owner = self._model.get_submodule(full_name.rpartition(".")[0])
            if _is_quantized(owner, full_name.rpartition(".")[2]):
                right = owner.holds(expected, tensor)
            else:
                right = torch.equal(expected.to(tensor.dtype), tensor)
            if not right:
                raise CheckpointError(
                    "a weight of the model in memory is not the one that was loaded",
                    where=full_name,
                    fix="train with another strategy, and report this one",
                )
            compared += 1
        return compared

    def release(self) -> None:
        """Frees the host memory that the source keeps for further parts of the model."""
        self.source.release()

    def _slots(self, module: nn.Module) -> list[_Slot]:
        below = set(module.modules())
        slots: dict[int, _Slot] = {}
        wanted: set[int] = set()
        for prefix, owner in self._model.named_modules():
            for place, name, tensor in own_tensors(owner):
                if not tensor.is_meta:
                    continue
                layer = owner if _is_quantized(owner, name) else None
                slot = slots.setdefault(id(tensor), _Slot(tensor, layer=layer))
                slot.names.append(join(prefix, name))
                slot.places.append((place, name))
                if owner in below:
                    wanted.add(id(tensor))
        return [slot for key, slot in slots.items() if key in wanted]

    def _adapter(self, slot: _Slot, device: torch.device) -> torch.Tensor:
        with seeded(device) as seed:
            seed(self._seed, slot.names[0])
            return initial_values(slot.names[0], slot.tensor.shape, device)


def _is_quantized(owner: nn.Module, name: str) -> TypeGuard[QuantizedLinear]:
    """Whether the tensor of that name is a weight in fewer bits."""
    return isinstance(owner, QuantizedLinear) and name == "weight"


def _put(slot: _Slot, value: torch.Tensor) -> None:
    old = slot.tensor
    if slot.layer is not None:
        slot.layer.quantize(value)
        return
    new = value.to(old.dtype)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    for place, name in slot.places:
        place[name] = new
