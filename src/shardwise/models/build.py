"""A job's model, built on the meta device: shape and names of everything, values of nothing."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models.adapters import add_lora, has_stacked_experts, is_adapter, taken_for_experts
from shardwise.models.file_weights import open_weights
from shardwise.models.mamba.prepare import MAMBA, check_config, prepare, refuse_related
from shardwise.models.quantize import quantize_linears
from shardwise.models.random_weights import RandomWeights
from shardwise.models.rotary import fix_frequencies
from shardwise.models.source import Source, find_source
from shardwise.models.structure import build_buffers, count_parameters, find_blocks
from shardwise.models.weights import Weights, WeightSource

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model without values, and where its values come from."""

    model: PreTrainedModel
    """Parameters (adapters too) and persistent buffers on the meta device, computed buffers on the CPU."""
    blocks: list[nn.Module]
    """Its transformer blocks in order."""
    weights: Weights
    config: PretrainedConfig
    total: int
    """Parameters, tied ones once, adapters included; a quantised weight as many as it stands for."""
    trainable: int
    """Parameters that get a gradient."""
    trainable_shapes: Mapping[str, torch.Size]
    """Their shapes by name, tied ones once; sharding changes those of the model."""
    source: str
    """For people: where shape and weights come from."""
    notes: list[str]
    """For people: what they should know about the model; mostly empty."""
    skeleton: PreTrainedModel
    """The same model as published: no adapters, never filled or sharded. Its config is what is saved."""
    peft: PeftModel | None
    """PEFT's wrapper around `model`."""
    spec: Model
    found: Source


def build_model(
    model: Model,
    *,
    dtype: torch.dtype,
    seed: int,
    vocab_size: int | None = None,
    sequence_length: int | None = None,
) -> BuiltModel:
    """The model that the job asks for; nothing of it is trained or loaded yet.

    Args:
        model: the job's `model` section.
        dtype: format of the weights and of the computation.
        seed: of random weights, and of adapters.
        vocab_size: rows of the embedding instead of the shape's; for random weights with a new tokenizer.
        sequence_length: tokens that a row may have, for which rotary frequencies are fixed (`rotary`); None
            lets transformers choose them at each call, as for generating.

    Raises:
        JobError: there is no such model, its config is refused, an adapter's target does not exist, or its
            rotary frequencies cannot be fixed.
        MachineError: it has to be downloaded, and the hub cannot be reached.
        CheckpointError: the files do not hold the weights of this shape.
    """
    found = find_source(model)
    config = _config(model, found, vocab_size)
    skeleton = _construct(config, model, dtype)
    built = _construct(copy.deepcopy(config), model, dtype)
    _check_layers(built, model, found)
    _check_heads(built, model, found)
    build_buffers(built)
    notes = [] if sequence_length is None else fix_frequencies(built, sequence_length)
    built.config.use_cache = (
        False  # of no use in training, and it would disable checkpointing's recomputation
    )
    blocks = find_blocks(built)
    source: WeightSource
    if model.weights == "random":
        source = RandomWeights(skeleton, seed=seed)
    else:
        assert found.folder is not None
        source = open_weights(found.folder, skeleton, dtype=dtype)
        if source.unused:
            unused = f"{len(source.unused)} of the files' tensors, e.g. {source.unused[0]}"
            notes.append(f"the model has no place for {unused}")
    if model.quantization != "none":
        quantize_linears(built, model.quantization)
    peft = None
    if model.lora is not None:
        peft = add_lora(built, model.lora, source=model.source, revision=model.revision)
        if has_stacked_experts(skeleton):
            notes.append("the experts get no adapter: they are not linear modules")
            taken = taken_for_experts(skeleton)
            if taken:
                notes.append(f"nor do {', '.join(sorted(taken))}: PEFT takes these names for the experts'")
            if model.quantization != "none":
                notes.append("the experts are not quantised: they are not linear modules")
    adapters = sum(p.numel() for name, p in built.named_parameters() if is_adapter(name))
    return BuiltModel(
        model=built,
        blocks=blocks,
        weights=Weights(built, source, seed=seed),
        config=built.config,
        total=count_parameters(skeleton) + adapters,
        trainable=count_parameters(built, trainable=True),
        trainable_shapes={name: p.shape for name, p in built.named_parameters() if p.requires_grad},
        source=f"{found.description}, {'random' if model.weights == 'random' else 'pretrained'} weights",
        notes=notes,
        skeleton=skeleton,
        peft=peft,
        spec=model,
        found=found,
    )


def _config(model: Model, found: Source, vocab_size: int | None) -> PretrainedConfig:
    """The shape's config with the job's changes and the tokenizer's size."""
    if "quantization_config" in found.config:
        raise JobError(
            "the published weights are quantised and cannot be trained",
            where="model.source",
            fix="name the model they were made from",
        )
    refuse_related(str(found.config["model_type"]), f"model.source: {model.source}")
    try:
        config = _read_config(model, found, {})
        if model.config or vocab_size is not None:
            _check_keys(model.config, config)
            config = _read_config(model, found, {**model.config, **_vocabulary(config, vocab_size)})
    except (StrictDataclassError, ArithmeticError, ValueError, TypeError, KeyError) as error:
        raise JobError(
            f"transformers refuses the config: {_one_line(error)}",
            where="model.config" if model.config else f"model.source: {model.source}",
            fix="correct the values",
        ) from None
    if config.model_type == MAMBA:
        check_config(config, model.config)
    return config


def _read_config(model: Model, found: Source, changes: dict[str, Any]) -> PretrainedConfig:
    """The found config with `changes`; the code that a repository brings is used only where it is trusted."""
    values = found.config
    kind = values["model_type"]
    if model.trust_remote_code and "auto_map" in values:
        return AutoConfig.from_pretrained(found.folder, trust_remote_code=True, **changes)
    if kind not in CONFIG_MAPPING:
        raise JobError(
            f"transformers does not know the architecture {kind!r}",
            where=f"model.source: {model.source}",
            fix="set model.trust_remote_code and a revision if the repository brings code you trust"
            if "auto_map" in values
            else "use another model, or a newer transformers",
        )
    plain = {key: value for key, value in {**values, **changes}.items() if key != "auto_map"}
    return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(plain))


def _check_keys(changes: dict[str, Any], config: PretrainedConfig) -> None:
    """Refuses keys that the architecture does not have: transformers takes them, and nothing changes."""
    known = {*config.to_dict(), *config.attribute_map, "rope_theta", "rope_scaling"}
    for key in changes:
        if key.startswith("_") or key in ("model_type", "auto_map") or key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise JobError(
                f"{config.model_type} models have no config value {key!r}",
                where=f"model.config.{key}",
                fix=f"did you mean {near[0]}?" if near else "see the architecture's config in transformers",
            )


def _vocabulary(config: PretrainedConfig, size: int | None) -> dict[str, Any]:
    """Config values for an embedding of `size` rows, where the ids of the shape's own tokens mean nothing."""
    if size is None:
        return {}
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": size, **{name: None for name in ids if getattr(config, name, None) is not None}}


def _construct(config: PretrainedConfig, model: Model, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                trust_remote_code=model.trust_remote_code,
                attn_implementation=attention_for(config),
            )
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise JobError(
            f"transformers cannot build a causal language model from the config: {_one_line(error)}",
            where="model.config" if model.config else f"model.source: {model.source}",
            fix="use a decoder-only language model, and values that fit each other",
        ) from None
    if config.model_type == MAMBA:
        prepare(built)
    return built


def _check_layers(built: nn.Module, model: Model, found: Source) -> None:
    """Refuses a model without blocks: transformers builds it for any number of layers below 1."""
    layers = getattr(built.config, "num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:
        named = model.source if found.folder is None else f"{found.folder}/config.json"
        raise JobError(
            f"a model of {layers} layers has nothing to train",
            where=f"{'model.config' if model.config else named}: num_hidden_layers",
            fix="1 or more",
        )


def _check_heads(built: nn.Module, model: Model, found: Source) -> None:
    """Refuses query heads that cannot share the key-value heads: transformers builds them, no kernel runs."""
    for module in built.modules():
        config = getattr(module, "config", None)
        heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", _SHARED))
        groups = hasattr(module, "num_key_value_groups")  # of attention that shares keys and values
        if not (groups and isinstance(heads, int) and isinstance(shared, int)) or heads % shared == 0:
            continue
        named = model.source if found.folder is None else f"{found.folder}/config.json"
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise JobError(
            f"{heads} attention heads cannot share {shared} key-value heads evenly",
            where=f"{'model.config' if model.config else named}: {_SHARED}",
            fix=f"one of {fitting}, or another num_attention_heads",
        )


_SHARED = "num_key_value_heads"


def attention_for(config: PretrainedConfig) -> str | None:
    """The attention to ask transformers for; None leaves the choice to it: SDPA where supported.

    SDPA would leave the softcap of attention logits out, without a word.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) is not None else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
