"""A base model's linear layers in 8 or 4 bits: installed on the meta device, and removed for merging."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.errors import JobError, MachineError
from shardwise.job.schema import Model
from shardwise.kernels.quantized_linear import LAYERS, QuantizedLinear
from shardwise.models.adapters import linear_modules

_INSTALL = "pip install bitsandbytes"


def quantize_linears(model: PreTrainedModel, kind: str) -> None:
    """Replace, in place, every linear layer that can have an adapter, as transformers does.

    The output head, embeddings, norms and stacked experts stay as they are. Raises JobError where the codes
    of a weight do not fill entire numbers of its format.
    """
    for name, module in linear_modules(model).items():
        weight, bias = module.requires_grad_(False).get_parameter("weight"), module._parameters["bias"]
        transposed = isinstance(module, Conv1D)
        inputs, outputs = weight.shape if transposed else reversed(weight.shape)
        if LAYERS[kind].packed_shape(inputs, outputs, weight.dtype) is None:
            raise JobError(
                f"the {kind} codes of {name}, {outputs} x {inputs}, do not fill {weight.dtype} numbers",
                where="model.quantization",
                fix="quantization: none, or a model of even sizes",
            )
        layer = LAYERS[kind](inputs, outputs, bias, dtype=weight.dtype, transposed=transposed)
        model.set_submodule(name, layer)


@torch.no_grad()
def dequantize_linears(model: nn.Module) -> None:
    """Replace the quantised layers, in place, by plain ones with the weights that they compute with."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    for layer in model.modules():
        if isinstance(layer, PeftLinear) and isinstance(layer.base_layer, QuantizedLinear):
            layer.fan_in_fan_out = layer.base_layer.transposed
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            model.set_submodule(name, _plain(module))


def _plain(layer: QuantizedLinear) -> nn.Module:
    weight = layer.dequantized()
    plain: nn.Module
    with torch.device("meta"):
        if layer.transposed:
            plain, weight = Conv1D(layer.out_features, layer.in_features), weight.t().contiguous()
        else:
            plain = nn.Linear(layer.in_features, layer.out_features)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = layer.bias
    return plain


def check_bitsandbytes(model: Model) -> None:
    """Raise MachineError where the model is to be quantised and bitsandbytes cannot do it here."""
    if model.quantization == "none":
        return
    where = f"model.quantization: {model.quantization}"
    try:
        import bitsandbytes
    except ImportError as error:
        what = f"bitsandbytes, which quantises the weights, cannot be imported: {error}"
        raise MachineError(what, where=where, fix=f"{_INSTALL}, or quantization: none") from None
    device = "GPUs" if torch.cuda.is_available() else "CPU"
    library = bitsandbytes.cextension.lib
    native = not isinstance(library, bitsandbytes.cextension.ErrorHandlerMockBNBNativeLibrary)
    if not native or (device == "GPUs" and not library.compiled_with_cuda):
        raise MachineError(
            f"bitsandbytes {bitsandbytes.__version__} has no kernels for this machine's {device}",
            where=where,
            fix=f"{_INSTALL} -U (`python -m bitsandbytes` says what is missing), or quantization: none",
        )
