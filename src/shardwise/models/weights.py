"""Weights for a model that was built on the meta device: one part at a time, on any device, in any order.

Engines call `Weights.fill`. A source provides the values by name: `RandomWeights`, a fresh initialisation, or
a published model's files (`file_weights`). Adapters are in no source: they start from PEFT's initialisation.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.errors import CheckpointError
from shardwise.kernels.quantized_linear import QuantizedLinear
from shardwise.models.adapters import base_name, initial_values, is_adapter
from shardwise.models.structure import children_first, find_blocks, join, own_tensors, seeded


class WeightSource(Protocol):
    """Tensors by their name in the Hugging Face model without adapters."""

    def read(self, names: Sequence[str], device: torch.device) -> Mapping[str, Tensor]:
        """Return the named tensors on `device`, in the source's dtype; a tied one by its first name."""

    def release(self) -> None:
        """Free memory kept between reads; by default there is none."""
        return


@dataclass(frozen=True)
class _Slot:
    """A meta tensor to fill, with every place that holds it: several for tied weights."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    layer: QuantizedLinear | None = None
    """The layer whose quantised weight it is."""


class Weights:
    """The values of one model's parameters and persistent buffers, on demand."""

    def __init__(self, model: nn.Module, source: WeightSource, *, seed: int) -> None:
        """`model` may hold adapters, which `seed` initialises; `source` knows the model without them."""
        self._model = model
        self._seed = seed
        self.source = source

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Give every meta parameter and persistent buffer below `module` its value, on `device`.

        Each keeps its dtype, its `requires_grad` and its attributes; tied ones stay tied everywhere. A
        quantised layer quantises its value. Tensors that are not on the meta device stay as they are. Raises
        CheckpointError where a file is damaged.
        """
        slots = self._slots(module)
        base = {base_name(slot.names[0]): slot for slot in slots if not is_adapter(slot.names[0])}
        values = dict(self.source.read(list(base), device)) if base else {}
        for name, slot in base.items():
            _put(slot, values.pop(name))  # so that only one tensor ever exists twice
        for slot in slots:
            name = slot.names[0]
            if is_adapter(name):
                with seeded(device) as seed:
                    seed(self._seed, name)
                    _put(slot, initial_values(self._model, name, slot.tensor.shape, device))
        left = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        if left:
            raise RuntimeError(f"{len(left)} parameters are not of the model that was built, e.g. {left[0]}")

    @torch.no_grad()
    def verify(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Compare full tensors, named as in the model, with their source; return how many were compared.

        Quantised weights may differ by the rounding error of quantising. Adapters are skipped, and quantised
        weights of other stages of a pipeline, whose scales are not in this process. Of a sharded model pass a
        few gathered parameters: reading every one again takes as long as loading. Raises CheckpointError
        where a tensor holds other values.
        """
        compared = 0
        for full_name, tensor in tensors:
            if is_adapter(full_name):
                continue
            name = base_name(full_name)
            expected = self.source.read([name], tensor.device)[name]
            prefix, _, last = full_name.rpartition(".")
            owner = self._model.get_submodule(prefix)
            if _is_quantized(owner, last):
                if any(scale.is_meta for scale in owner.buffers(recurse=False)):
                    continue
                right = owner.holds(expected, tensor)
            else:
                right = torch.equal(expected.to(tensor.dtype), tensor)
            if not right:
                what = "a weight of the model in memory differs from the one that was loaded"
                fix = "train with another strategy, and report this one"
                raise CheckpointError(what, where=full_name, fix=fix)
            compared += 1
        return compared

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


def _is_quantized(owner: nn.Module, name: str) -> TypeGuard[QuantizedLinear]:
    return isinstance(owner, QuantizedLinear) and name == "weight"


def _put(slot: _Slot, value: Tensor) -> None:
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


_OUTSIDE = -1
"""Number of the unit that holds everything outside the blocks."""


class RandomWeights(WeightSource):
    """Initial values by name, from a seed per module.

    They depend on the seed and on the kind of device, and not on the order or the process in which they are
    read. A block is initialised at once, and so is everything outside the blocks, because a module may set
    its children's weights again (GPT-2 scales its residual projections).
    """

    def __init__(self, make_skeleton: Callable[[], PreTrainedModel], *, seed: int) -> None:
        """The skeleton is the model on the meta device without adapters, which nothing else changes."""
        self._make_skeleton, self._seed = make_skeleton, seed
        self._units: dict[int, list[tuple[nn.Module, PreTrainedModel]]] = defaultdict(list)
        self._unit_of_tensor: dict[str, int] = {}

    def _find_units(self) -> None:
        skeleton = self._make_skeleton()
        self._names = {module: name for name, module in skeleton.named_modules()}
        blocks = enumerate(find_blocks(skeleton))
        unit_of = {module: index for index, block in blocks for module in block.modules()}
        for module, initialiser in children_first(skeleton, skeleton):
            unit = unit_of.get(module, _OUTSIDE)
            self._units[unit].append((module, initialiser))
            for _, name, _ in own_tensors(module):
                self._unit_of_tensor[join(self._names[module], name)] = unit

    def read(self, names: Sequence[str], device: torch.device) -> Mapping[str, Tensor]:
        """Initial values in fp32, from which every other dtype is rounded."""
        if not self._units:
            self._find_units()
        found: dict[str, Tensor] = {}
        for unit in sorted({self._unit_of_tensor[name] for name in names}):
            values = self._initialise(self._units[unit], device)
            found |= {name: values[name] for name in names if name in values}
        return found

    @torch.no_grad()
    def _initialise(
        self, unit: Sequence[tuple[nn.Module, PreTrainedModel]], device: torch.device
    ) -> dict[str, Tensor]:
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


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    real = torch.empty(tensor.shape, dtype=dtype, device=device)
    return nn.Parameter(real, requires_grad=False) if isinstance(tensor, nn.Parameter) else real
