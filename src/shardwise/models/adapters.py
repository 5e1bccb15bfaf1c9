"""LoRA: low-rank adapters (PEFT) on a frozen base, injected while everything is on the meta device.

The base's linear layers may be in 8 or 4 bits: installed here too, and removed for merging.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.errors import JobError, MachineError
from shardwise.job.schema import Lora, Model, OptimizerName
from shardwise.kernels.quantized_linear import LAYERS, QuantizedLinear
from shardwise.models.families import family_of
from shardwise.models.structure import tensor_names

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "default"
"""PEFT's name of the one adapter."""

_WHERE = "model.lora.targets"


def add_lora(model: PreTrainedModel, lora: Lora, *, source: str, revision: str | None) -> PeftModel:
    """Inject adapters, of the base's dtype, into a model on the meta device, and freeze everything else.

    The saved adapter names `source` and its `revision` as its base. `model` is changed in place, and is the
    `get_base_model()` of PEFT's wrapper. Raises JobError where a target matches no linear module, or no
    layer's weight can have an update of that rank.
    """
    from peft import LoraConfig, TaskType, get_peft_model  # imports a second's worth of compilers

    candidates, dtype = linear_modules(model), model.dtype
    targets: str | list[str] = lora.targets
    if isinstance(lora.targets, list):
        _check_targets(lora.targets, candidates, model)
    elif has_stacked_experts(model) or left_out(model):  # PEFT would read `all-linear` as these, too
        targets = sorted(_last_names(candidates) - taken_for_experts(model))
    chosen = [m for name, m in candidates.items() if targets == "all-linear" or _named(name, targets)]
    _check_rank(lora.rank, chosen)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        # of the same last name as others
        exclude_modules=[name for name in left_out(model) if _named(name, targets)] or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in candidates.values()),
        use_dora="dora" in lora.variants,
        use_rslora="rslora" in lora.variants,
    )
    with quiet_peft():
        peft = get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)  # PEFT leaves adapters on the meta device in fp32
    # the saved adapter is for the base as published
    config.fan_in_fan_out = any(
        isinstance(m, Conv1D) or (isinstance(m, QuantizedLinear) and m.transposed)
        for m in candidates.values()
    )
    if lora.modules_to_save:
        config.modules_to_save = _train_in_full(model, lora.modules_to_save)
    config.base_model_name_or_path = source  # PEFT put the model's own, empty name there
    config.revision = revision
    return peft


def _train_in_full(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Train modules of the base themselves; PEFT would train copies, and keep the originals as well.

    Returns their full names: PEFT takes every module that ends like a name. Raises JobError where one is no
    module, has an adapter or a quantised weight, or shares a weight with a module that is not named.
    """
    where, owners = "model.lora.modules_to_save", dict[str, nn.Module]()
    adapted = [name for name, _ in model.named_parameters() if is_adapter(name)]
    for name in names:
        found = {full: m for full, m in model.named_modules() if _named(full, [name]) and [*m.parameters()]}
        quantized = any(isinstance(part, QuantizedLinear) for m in found.values() for part in m.modules())
        if not found or quantized or any(one.startswith(f"{full}.") for one in adapted for full in found):
            why = "has adapters or quantised weights, and" if found else "is no module of this model; it"
            fix = "embed_tokens, norm or lm_head, as the model calls them; or model.lora.targets"
            raise JobError(f"{name!r} {why} cannot be trained in full", where=where, fix=fix)
        owners |= found
    for module in owners.values():
        module.requires_grad_(True)
    for names in tensor_names(model).values():
        unnamed = [name for name in names if not any(name.startswith(f"{owner}.") for owner in owners)]
        if unnamed and len(unnamed) < len(names):
            what = f"{' and '.join(names)} are one weight, which is trained if all its modules are named"
            raise JobError(what, where=where, fix=f"name {unnamed[0].split('.')[-2]} as well")
    return sorted(owners)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """PEFT asks transformers for a property under its old name, and expects adapters on experts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match", category=RuntimeWarning)
        yield


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Layers that can have an adapter, by name: every linear layer but the head and those left out."""
    without = left_out(model)
    return {name: module for name, module in _linear(model).items() if name not in without}


def _linear(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head}


_LEFT_OUT = {
    **dict.fromkeys(("router", "gate"), "sends tokens to experts"),  # some return more than a product
    "indexer": "only chooses tokens, and gets no gradient",
    **dict.fromkeys(("encoder_attn", "crossattention"), "attends to an encoder, which is not here"),
    "correction_coefs": "is read by the model without being called",  # Gemma-3n's
}
"""Parts of names of layers that can have no adapter, and why."""


def left_out(model: PreTrainedModel) -> dict[str, str]:
    """Layers that might have an adapter and cannot, by name, and why."""
    read, reads = "is read by a kernel without being called", family_of(model.config).kernel_reads
    found = {name: read for name, _ in model.named_modules() if _named(name, reads)}
    for name, layer in _linear(model).items():
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        # a state space's mixer, whose kernel takes this weight; delta rules have no D
        mixer = name.endswith(".out_proj") and hasattr(parent, "A_log") and hasattr(parent, "D")
        if part := next((part for part in name.split(".") if part in _LEFT_OUT), None):
            found[name] = _LEFT_OUT[part]
        elif mixer:
            found[name] = read
        elif not _multiplies(layer):
            found[name] = "is no plain product"
    return found


def left_out_notes(model: PreTrainedModel) -> list[str]:
    """For people: layers without an adapter that might be expected to have one."""
    noted = dict[str, set[str]]()
    for name, why in left_out(model).items():
        if why != _LEFT_OUT["router"] and not _named(name, family_of(model.config).kernel_reads):
            parts = name.split(".")
            noted.setdefault(why, set()).add(next((part for part in parts if part in _LEFT_OUT), parts[-1]))
    return [f"no adapter for {', '.join(sorted(names))}: it {why}" for why, names in noted.items()]


def _multiplies(layer: nn.Linear | Conv1D) -> bool:
    """Whether a layer gives what PEFT adds the adapter's product to; DeepSeek-V4 has one in groups."""
    if isinstance(layer, QuantizedLinear) or type(layer).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    given = torch.empty(1, 2, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    try:
        return layer(given).shape == (1, 2, layer.out_features)
    except (RuntimeError, AttributeError):
        return False


def has_stacked_experts(model: nn.Module) -> bool:
    """Whether it holds the weights of all experts of a block in one tensor (a convolution's are 3-D, too)."""
    own = (m for m in model.modules() if not isinstance(m, nn.Conv1d))
    return any(p.ndim == 3 for module in own for p in module.parameters(recurse=False))


def taken_for_experts(model: PreTrainedModel) -> set[str]:
    """Last names of linear layers that PEFT mistakes for experts, which had these names in transformers 4.

    It would add adapters to the experts' stacked weights instead, and build full weights of all experts from
    them in every pass, which no engine could shard. PEFT before 0.19 takes names as they are.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return set()
    from peft import LoraConfig

    names = _last_names(linear_modules(model))
    asked = LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(asked, model, None)
    return names - set(asked.target_modules)


def _last_names(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _named(name: str, targets: Iterable[str]) -> bool:
    """Whether a module's full name is, or ends in, one of `targets`."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return f".{ADAPTER}." in name and ".lora_" in name


def base_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


_LENGTHS = ".lora_magnitude_vector."


def saved_name(name: str) -> str:
    """A trained parameter's name in PEFT's file, from its name in the model."""
    if _LENGTHS in name:
        name = name.removesuffix(f".{ADAPTER}.weight")
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def saved_names(skeleton: nn.Module, trained: Iterable[str]) -> dict[str, str]:
    """Names in PEFT's file to those in the model: all names of a tied weight, which `skeleton` knows."""
    ties = tensor_names(skeleton)
    return {saved_name(twin): name for name in trained for twin in ties.get(name, [name])}


@torch.no_grad()
def initial_values(model: nn.Module, name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """PEFT's initial adapter, which changes nothing: A in fp32 as in nn.Linear, B zero.

    DoRA's lengths are those of the rows of the base's weight, which `model` holds already.
    """
    if _LENGTHS in name:
        base: Any = model.get_submodule(name.partition(_LENGTHS)[0]).base_layer
        weight = base.dequantized() if isinstance(base, QuantizedLinear) else base.weight
        lengths: torch.Tensor = torch.linalg.norm(weight, dim=0 if isinstance(base, Conv1D) else 1)
        return lengths
    value = torch.empty(shape, device=device)
    if ".lora_A." in name:
        return nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return nn.init.zeros_(value)


def _check_rank(rank: int, layers: Iterable[nn.Linear | Conv1D]) -> None:
    """A product of [O, r] and [r, I] has at most rank min(O, I): a higher r only takes memory."""
    shapes = {(m.nf, m.nx) if isinstance(m, Conv1D) else (m.out_features, m.in_features) for m in layers}
    if not shapes:
        return  # PEFT has its own error for a model without such layers
    rows, columns = max(shapes, key=lambda shape: (min(shape), shape))
    most = min(rows, columns)
    if rank > most:
        what = f"no update has rank {rank}: the largest, of a layer of {rows} x {columns}, has at most {most}"
        fix = f"{most} at most; or train all weights, without lora"
        raise JobError(what, where="model.lora.rank", fix=fix)


def _check_targets(targets: list[str], candidates: Iterable[str], model: PreTrainedModel) -> None:
    """Refuse targets that would get no adapter; PEFT accepts a list if one of its names matches."""
    names, taken, without = list(candidates), taken_for_experts(model), left_out(model)
    known = f"choose from {', '.join(sorted(_last_names(names) - taken))}, or all-linear"
    for target in targets:
        why = {reason for name, reason in without.items() if _named(name, [target])}
        if why and not any(_named(name, [target]) for name in names):
            what = f"{target} can have no adapter: it {' or '.join(sorted(why))}"
            raise JobError(what, where=_WHERE, fix=known)
    unknown = [t for t in targets if not any(_named(name, [t]) for name in names)]
    if unknown:
        what = f"no linear module is called {', '.join(map(repr, unknown))}"
        raise JobError(what, where=_WHERE, fix=known)
    moved = [t for t in targets if t.rpartition(".")[2] in taken]
    if moved:
        mistaken = f"PEFT takes {', '.join(moved)} of {model.config.model_type!r} models for the experts'"
        raise JobError(f"{mistaken} stacked weights, which get no adapter", where=_WHERE, fix=known)


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
            what = f"the {kind} codes of {name}, {outputs} x {inputs}, do not fill {weight.dtype} numbers"
            fix = "quantization: none, or a model of even sizes"
            raise JobError(what, where="model.quantization", fix=fix)
        layer = LAYERS[kind](inputs, outputs, bias, dtype=weight.dtype, transposed=transposed)
        model.set_submodule(name, layer)


@torch.no_grad()
def dequantize_linears(model: nn.Module) -> None:
    """Replace the quantised layers, in place, by plain ones with the weights that they compute with."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    for layer in model.modules():
        if isinstance(layer, PeftLinear) and isinstance(layer.base_layer, QuantizedLinear):
            layer.fan_in_fan_out = layer.base_layer.transposed
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLinear):
            weight = layer.dequantized()
            plain: nn.Module
            with torch.device("meta"):
                if layer.transposed:
                    plain, weight = Conv1D(layer.out_features, layer.in_features), weight.t().contiguous()
                else:
                    plain = nn.Linear(layer.in_features, layer.out_features)
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = layer.bias
            model.set_submodule(name, plain)


def check_bitsandbytes(model: Model, optimizer: OptimizerName = "adamw") -> None:
    """Raise MachineError where bitsandbytes is asked for and does not work here."""
    where, without = f"model.quantization: {model.quantization}", "quantization: none"
    if model.quantization == "none":
        where, without = f"optimizer.name: {optimizer}", "optimizer.name: adamw"
        if optimizer == "adamw":
            return
    try:
        import bitsandbytes
    except ImportError as error:
        what = f"bitsandbytes, whose kernels this needs, cannot be imported: {error}"
        raise MachineError(what, where=where, fix=f"{_INSTALL}, or {without}") from None
    device = "GPUs" if torch.cuda.is_available() else "CPU"
    library = bitsandbytes.cextension.lib
    native = not isinstance(library, bitsandbytes.cextension.ErrorHandlerMockBNBNativeLibrary)
    if not native or (device == "GPUs" and not library.compiled_with_cuda):
        what = f"bitsandbytes {bitsandbytes.__version__} has no kernels for this machine's {device}"
        fix = f"{_INSTALL} -U (`python -m bitsandbytes` says what is missing), or {without}"
        raise MachineError(what, where=where, fix=fix)
