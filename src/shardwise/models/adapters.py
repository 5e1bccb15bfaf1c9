"""LoRA: low-rank adapters (PEFT) on a frozen base, injected while everything is on the meta device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.errors import JobError
from shardwise.job.schema import Lora
from shardwise.kernels.quantized_linear import QuantizedLinear
from shardwise.models.mamba.modules import Mixer
from shardwise.models.mamba.prepare import MAMBA

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER = "default"
"""PEFT's name of the one adapter."""


def add_lora(model: PreTrainedModel, lora: Lora, *, source: str, revision: str | None) -> PeftModel:
    """Injects adapters into `model` in place and freezes everything else.

    The adapters have the base's dtype. `source` and `revision` are what the saved adapter says its base is.
    Returns PEFT's wrapper; `get_base_model()` of it is `model`. Raises JobError for a target that matches
    no linear module, and for a rank that no layer's weight can have.
    """
    from peft import LoraConfig, TaskType, get_peft_model  # imports a second's worth of compilers

    candidates = linear_modules(model)
    targets: str | list[str] = lora.targets
    if isinstance(lora.targets, list):
        _check_targets(lora.targets, candidates, model)
    elif has_stacked_experts(model):
        targets = sorted(_last_names(candidates) - taken_for_experts(model))
    elif model.config.model_type == MAMBA:
        targets = ["in_proj"]  # PEFT refuses `all-linear`, which it would read as out_proj too
    _check_rank(lora.rank, targets, candidates)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in candidates.values()),
    )
    with warnings.catch_warnings():
        # PEFT asks transformers for a property under its old name, and expects adapters on experts
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match", category=RuntimeWarning)
        peft = get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(model.dtype)  # PEFT leaves what is on the meta device in fp32
    # what is saved is for the base as published
    config.fan_in_fan_out = any(_is_transposed(module) for module in candidates.values())
    config.base_model_name_or_path = source  # PEFT put the model's own, empty one there
    config.revision = revision
    return peft


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """What can have an adapter, by name: every linear layer that is called, but the output head."""
    left_out = {model.get_output_embeddings(), *_never_called(model).values()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module not in left_out
    }


def has_stacked_experts(model: nn.Module) -> bool:
    """Whether it holds weights of all experts of a block in one tensor."""
    own = (
        m for m in model.modules() if not isinstance(m, nn.Conv1d)
    )  # whose weight has three dimensions, too
    return any(p.ndim == 3 for module in own for p in module.parameters(recurse=False))


def taken_for_experts(model: PreTrainedModel) -> set[str]:
    """Last names of linear layers that PEFT takes for the experts', which transformers 4 called so.

    It would add adapters to the experts' stacked weights instead, and from these make whole weights of all
    experts in every pass, which no engine could shard. PEFT before 0.19 takes names as they are.
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


def _is_transposed(module: nn.Module) -> bool:
    return isinstance(module, Conv1D) or (isinstance(module, QuantizedLinear) and module.transposed)


def _never_called(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules whose weights a fused kernel reads: an adapter on them would be left out without a word."""
    return {
        f"{name}.{part}": getattr(module, part)
        for name, module in model.named_modules()
        if isinstance(module, Mixer)
        for part in ("conv1d", "x_proj", "dt_proj", "out_proj")
    }


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return f".{ADAPTER}." in name and ".lora_" in name


def base_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def saved_name(name: str) -> str:
    """An adapter parameter's name in PEFT's file, from its name in the model."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


@torch.no_grad()
def initial_values(name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """What PEFT starts an adapter from, in fp32: A as in nn.Linear, B zero, so that it changes nothing."""
    value = torch.empty(shape, device=device)
    if ".lora_A." in name:
        return nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return nn.init.zeros_(value)


def _check_rank(rank: int, targets: str | list[str], candidates: Mapping[str, nn.Module]) -> None:
    """A product of [O, r] and [r, I] has at most rank min(O, I): more is memory without any use."""
    shapes = {
        (module.nf, module.nx) if isinstance(module, Conv1D) else (module.out_features, module.in_features)
        for name, module in candidates.items()
        if isinstance(targets, str) or any(name == t or name.endswith(f".{t}") for t in targets)
        if isinstance(module, (nn.Linear, Conv1D))
    }
    if not shapes:
        return  # PEFT has its own words for a model without such layers
    rows, columns = max(shapes, key=lambda shape: (min(shape), shape))
    most = min(rows, columns)
    if rank > most:
        raise JobError(
            f"no update has rank {rank}: the largest, of a layer of {rows} x {columns}, has at most {most}",
            where="model.lora.rank",
            fix=f"{most} at most; or train all weights, without lora",
        )


def _check_targets(targets: Iterable[str], candidates: Iterable[str], model: PreTrainedModel) -> None:
    """PEFT itself is content when one of several targets matches."""
    names = list(candidates)
    fused = [t for t in targets if any(n == t or n.endswith(f".{t}") for n in _never_called(model))]
    if fused:
        raise JobError(
            f"the kernel reads the weights of {', '.join(fused)} itself: an adapter would train nothing",
            where="model.lora.targets",
            fix="targets: [in_proj]",
        )
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    taken = taken_for_experts(model)
    known = f"choose from {', '.join(sorted(_last_names(names) - taken))}, or all-linear"
    if unknown:
        raise JobError(
            f"no linear module is called {', '.join(map(repr, unknown))}",
            where="model.lora.targets",
            fix=known,
        )
    moved = [t for t in targets if t.rpartition(".")[2] in taken]
    if moved:
        raise JobError(
            f"PEFT takes {', '.join(moved)} of {model.config.model_type!r} models for the experts' stacked "
            "weights, which get no adapter",
            where="model.lora.targets",
            fix=known,
        )
