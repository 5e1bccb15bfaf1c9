"""LoRA layers that read the same input are computed as one node, by the first of them that is called."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.kernels.lora_linear import Parts, is_fused, outputs, parts_of

TOGETHER = (("q_proj", "q_a_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
"""Names of layers in the order in which transformers calls them."""


def share_inputs(model: nn.Module) -> None:
    """Join layers of one module, after `fuse_lora`. Where inputs or the order differ, they part again."""
    for module in model.modules():
        for names in TOGETHER:
            layers = [layer for name in names if is_fused(layer := module._modules.get(name))]
            if len(layers) > 1:
                _Shared(layers)


class _Shared:
    def __init__(self, layers: list[Any]) -> None:
        self._layers, self._forwards = layers, [layer.forward for layer in layers]
        self._x: Tensor | None = None  # What `_ready` were computed from
        self._ready: list[Tensor] = []  # Outputs of the last layers, the next one first
        self._together = True
        for index, layer in enumerate(layers):
            layer.forward = partial(self._output, index)

    def _output(self, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            return self._forwards[index](x, *args, **kwargs)  # type: ignore[no-any-return]
        if x is self._x and index == len(self._layers) - len(self._ready):
            y = self._ready.pop(0)
            self._x = x if self._ready else None
            return y
        if self._ready:  # computed for nothing: other inputs, or another order
            self._together, self._x, self._ready = False, None, []
        parts = self._parts(x) if self._together and index == 0 else None
        if parts is None:
            return self._forwards[index](x)  # type: ignore[no-any-return]
        first, *self._ready = outputs(x, parts)
        self._x = x
        return first

    def _parts(self, x: Tensor) -> list[Parts] | None:
        """What the layers compute with; None where one cannot be joined to the others now."""
        parts = [parts_of(layer, x.dtype) for layer in self._layers]
        known = [part for part in parts if part is not None]
        alike = len(known) == len(parts) and len({part.scaling for part in known}) == 1
        return known if alike else None
