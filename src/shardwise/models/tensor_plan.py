"""Transformers' plan of how to split an architecture's layers over GPUs, with the adapters of LoRA."""

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import JobError
from shardwise.kernels.quantized_linear import QuantizedLinear

_ADAPTED = re.compile(r"(.*)\.(base_layer|lora_A\.\w+|lora_B\.\w+)")
_WITH_ADAPTER = {"colwise": ("base_layer", "lora_B"), "rowwise": ("base_layer", "lora_A")}
"""What is split of a layer with an adapter; the adapter's other matrix stays complete. `lora_A` reads the
layer's input, of which a rank has its part in a row-split layer, and `lora_B` gives the output."""


def planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, layer, style) of each layer with a weight in the plan; the first matching pattern counts.

    Raises JobError for a quantised layer, whose packed weight cannot be split.
    """
    plan: dict[str, str] = model.config.get_text_config().base_model_tp_plan or {}
    patterns = {".*" + p.replace(".", r"\.").replace("*", ".*"): way.lower() for p, way in plan.items()}
    for name, module in list(model.named_modules()):
        adapted = _ADAPTED.fullmatch(name)
        of = adapted[1] if adapted else name
        style = next((way for pattern, way in patterns.items() if re.fullmatch(pattern, of)), None)
        if style is None or "weight" not in module._parameters:
            continue
        if adapted and adapted[2].partition(".")[0] not in _WITH_ADAPTER.get(style, ()):
            continue
        if isinstance(module, QuantizedLinear):
            fix = "model.quantization: none, or tensor_parallel: 1"
            raise JobError("quantised layers cannot be split", where="strategy.tensor_parallel", fix=fix)
        yield name, module, style
