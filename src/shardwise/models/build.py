"""A job's model, built on the meta device: names and shapes of all tensors, without values.

Its config has the job's changes, and is checked for what transformers leaves out.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.kernels.fused import fuse_gelu
from shardwise.models import adapters
from shardwise.models.causality import check_causal
from shardwise.models.expert_biases import sum_in_parallel
from shardwise.models.families import REFUSED, attention_for, family_code, family_of
from shardwise.models.file_weights import open_weights
from shardwise.models.rotary import check_rotary, fix_frequencies, in_parameters
from shardwise.models.router_loss import router_note
from shardwise.models.source import Source, find_source
from shardwise.models.structure import build_buffers, count_parameters, find_blocks
from shardwise.models.weights import RandomWeights, Weights, WeightSource

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model without values, and the source of its values."""

    model: PreTrainedModel
    """Parameters (adapters too) and persistent buffers on the meta device, computed buffers on the CPU."""
    blocks: list[nn.Module]
    """Its transformer blocks in order."""
    weights: Weights
    config: PretrainedConfig
    total: int
    """Parameters, tied ones once, adapters included; a quantised weight counts its unquantised values."""
    trainable: int
    """Parameters that get a gradient."""
    trainable_shapes: Mapping[str, torch.Size]
    """Their shapes by name, tied ones once; sharding changes those of the model."""
    trainable_dtypes: Mapping[str, torch.dtype]
    source: str
    """For people: where shape and weights come from."""
    notes: list[str]
    """For people: remarks on the model; mostly empty."""
    make_skeleton: Callable[[], PreTrainedModel]
    """Builds `skeleton` once, when it is first needed: planning does without it."""
    peft: PeftModel | None
    """PEFT's wrapper around `model`."""
    spec: Model
    found: Source

    @property
    def skeleton(self) -> PreTrainedModel:
        """The same model as published: no adapters, never filled or sharded. Its config is saved."""
        return self.make_skeleton()


def build_model(
    model: Model,
    *,
    dtype: torch.dtype,
    seed: int,
    vocab_size: int | None = None,
    sequence_length: int | None = None,
    masks: bool = True,
) -> BuiltModel:
    """Build the model of a job, without loading anything.

    `dtype` is that of the weights and of the computation. `seed` is for random weights and adapters,
    `vocab_size` for random weights with a new tokenizer. Rotary frequencies are fixed (`rotary`) for rows of
    at most `sequence_length` tokens; None lets transformers choose them at each call, as for generating.
    Without `masks`, causal masks have no values: planning reads none, and GPT-Neo-2.7B's take 1.2 s.

    Raises JobError where there is no such model, its config is refused, an adapter's target does not exist,
    or its rotary frequencies cannot be fixed; MachineError where it must be downloaded, and the hub cannot be
    reached; CheckpointError where the files do not hold the weights of this shape.
    """
    found = find_source(model)
    config = read_config(model, found, vocab_size)
    skeleton = cache(partial(_construct, copy.deepcopy(config), model, dtype))
    built = _construct(config, model, dtype)
    total = count_parameters(built)
    check_shape(built, model, found)
    check_causal(built)
    build_buffers(built, masks=masks)
    notes = [] if sequence_length is None else fix_frequencies(built, sequence_length)
    notes += router_note(built)
    built.config.use_cache = False  # a cache would disable checkpointing's recomputation
    blocks = find_blocks(built)
    source: WeightSource
    if model.weights == "random":
        source = RandomWeights(skeleton, seed=seed)
    else:
        assert found.folder is not None
        source = open_weights(found.folder, skeleton(), dtype=dtype)
        if quantised(found.config):
            notes.append(f"the experts' weights are published in {quantised(found.config)}, and unpacked")
        if source.unused:
            unused = f"{len(source.unused)} of the files' tensors, e.g. {source.unused[0]}"
            notes.append(f"the model has no place for {unused}")
    notes += _adapter_notes(built, model)
    if model.quantization != "none":
        adapters.quantize_linears(built, model.quantization)
    peft = None
    if model.lora is not None:
        peft = adapters.add_lora(built, model.lora, source=model.source, revision=model.revision)
    trainable = {name: p for name, p in built.named_parameters() if p.requires_grad}
    return BuiltModel(
        model=built,
        blocks=blocks,
        weights=Weights(built, source, seed=seed),
        config=built.config,
        total=total + sum(p.numel() for name, p in trainable.items() if adapters.is_adapter(name)),
        trainable=sum(p.numel() for p in trainable.values()),
        trainable_shapes={name: p.shape for name, p in trainable.items()},
        trainable_dtypes={name: p.dtype for name, p in trainable.items()},
        source=f"{found.description}, {'random' if model.weights == 'random' else 'pretrained'} weights",
        notes=notes,
        make_skeleton=skeleton,
        peft=peft,
        spec=model,
        found=found,
    )


def _adapter_notes(built: PreTrainedModel, model: Model) -> list[str]:
    """What LoRA and quantisation leave out, of a mixture of experts and of linear layers."""
    if model.lora is None:
        return []
    notes = list[str]()
    if adapters.has_stacked_experts(built):
        notes.append("the experts get no adapter: they are not linear modules")
        if taken := adapters.taken_for_experts(built):
            notes.append(f"nor do {', '.join(sorted(taken))}: PEFT takes these names for the experts'")
        if model.quantization != "none":
            notes.append("the experts are not quantised: they are not linear modules")
    return notes + adapters.left_out_notes(built)


def _construct(config: PretrainedConfig, model: Model, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            options = {"attn_implementation": attention_for(config), "dtype": dtype}
            trusted = model.trust_remote_code
            built = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted, **options)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = "transformers cannot build a causal language model from the config"
        fix = "use a decoder-only language model, and values that fit each other"
        raise refused(what, error, model, fix=fix) from None
    code = family_code(family_of(config))
    if code is not None:
        code.prepare(built)
    fuse_gelu(built)
    sum_in_parallel(built)
    return built


_LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
"""transformers' names of embeddings with a learned vector for each position."""


def read_config(model: Model, found: Source, vocab_size: int | None) -> PretrainedConfig:
    """Return the shape's config with the job's changes and `vocab_size` embedding rows; raises JobError."""
    if quantised(found.config) not in ("", "mxfp4"):
        what = "the published weights are quantised and cannot be trained"
        raise JobError(what, where="model.source", fix="name the model they were made from")
    kind = str(found.config["model_type"])
    if kind in REFUSED:
        what = f"{kind!r} models cannot be trained: the kernels here compute Mamba-1's mixers only"
        raise JobError(what, where=f"model.source: {model.source}", fix=REFUSED[kind])
    try:
        config = _parse(model, found, {})
        if model.config or vocab_size is not None:
            _check_keys(model.config, config)
            changes = in_parameters(dict(model.config), found.config)
            if vocab_size is not None:  # of a new tokenizer: ids of special tokens no longer apply
                ids = ("bos_token_id", "eos_token_id", "pad_token_id")
                dropped = {name: None for name in ids if getattr(config, name, None) is not None}
                changes |= {"vocab_size": vocab_size, **dropped}
            published, config = config, _parse(model, found, changes)
            check_rotary(model.config, published, config)
    except (StrictDataclassError, ArithmeticError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise refused("transformers refuses the config", error, model, fix="correct the values") from None
    family = family_of(config)
    if family.mixes_tokens and getattr(config, family.mixes_tokens, False):
        what = f"with {family.mixes_tokens}, tokens of {kind!r} models depend on other rows of a micro-batch"
        fix = f"use a model with {family.mixes_tokens}: false; transformers routes tokens so"
        raise JobError(what, where=f"model.source: {model.source}", fix=fix)
    code = family_code(family)
    if code is not None:
        code.check_config(config, model.config)
    return config


def quantised(config: Mapping[str, Any]) -> str:
    """The format of published weights that are quantised; empty for others."""
    how = config.get("quantization_config")
    return str(how.get("quant_method", "unknown")) if isinstance(how, dict) else "unknown" if how else ""


def refused(what: str, error: Exception, model: Model, *, fix: str) -> JobError:
    """Make the JobError for what transformers says of a config."""
    where = "model.config" if model.config else f"model.source: {model.source}"
    return JobError(f"{what}: {' '.join(str(error).split())[:300]}", where=where, fix=fix)


def _parse(model: Model, found: Source, changes: dict[str, Any]) -> PretrainedConfig:
    """Parse the config with `changes`; code from a repository is used only where the job trusts it."""
    values = found.config
    kind = values["model_type"]
    if model.trust_remote_code and "auto_map" in values:
        return AutoConfig.from_pretrained(found.folder, trust_remote_code=True, **changes)
    if kind not in CONFIG_MAPPING:
        what = f"transformers does not know the architecture {kind!r}"
        fix = "use another model, or a newer transformers"
        if "auto_map" in values:
            fix = "set model.trust_remote_code and a revision if the repository brings code you trust"
        raise JobError(what, where=f"model.source: {model.source}", fix=fix)
    left = ["auto_map", "quantization_config"]  # weights in mxfp4 are unpacked
    left += ["rope_scaling"] if "rope_parameters" in changes else []  # the file's would replace the job's
    plain = {key: value for key, value in {**values, **changes}.items() if key not in left}
    return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(plain))


def _check_keys(changes: dict[str, Any], config: PretrainedConfig) -> None:
    """Refuse keys that the architecture does not have: transformers accepts and ignores them."""
    known = {*config.to_dict(), *config.attribute_map}
    if hasattr(config, "rope_parameters"):  # the names before transformers 5
        known |= {"rope_theta", "rope_scaling"}
    if "dtype" in changes:
        what = "`train.precision` decides the dtype, whatever the config names"
        raise JobError(what, where="model.config.dtype", fix="remove it, and set train.precision")
    for key in changes:
        if key.startswith("_") or key in ("model_type", "auto_map") or key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            what = f"{config.model_type} models have no config value {key!r}"
            fix = f"did you mean {near[0]}?" if near else "see the architecture's config in transformers"
            raise JobError(what, where=f"model.config.{key}", fix=fix)


def check_shape(built: nn.Module, model: Model, found: Source) -> None:
    """Raise JobError for shapes that transformers builds and that cannot train.

    Those are models without blocks, query heads that cannot share the key-value heads evenly, and experts of
    sizes that torch's grouped product refuses. transformers' loop over experts takes them, but no trace does.
    """
    named = model.source if found.folder is None else f"{found.folder}/config.json"
    where = "model.config" if model.config else named
    layers = getattr(built.config, "num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:
        what = f"a model of {layers} layers has nothing to train"
        raise JobError(what, where=f"{where}: num_hidden_layers", fix="1 or more")
    for module in built.modules():
        config = getattr(module, "config", None)
        heads = getattr(config, "num_attention_heads", None)
        shared = getattr(config, "num_key_value_heads", None)
        groups = hasattr(module, "num_key_value_groups")  # only attention that shares keys and values
        if groups and isinstance(heads, int) and isinstance(shared, int) and heads % shared:
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            what = f"{heads} attention heads cannot share {shared} key-value heads evenly"
            fix = f"one of {fitting}, or another num_attention_heads"
            raise JobError(what, where=f"{where}: num_key_value_heads", fix=fix)
        grouped = getattr(config, "_experts_implementation", None) == "grouped_mm"
        down = getattr(module, "down_proj", None)
        if grouped and hasattr(module, "is_transposed") and isinstance(down, nn.Parameter):
            inner, outer = down.shape[1:] if module.is_transposed else reversed(down.shape[1:])
            step = 16 // down.element_size()
            if inner % step or outer % step:
                sizes = f"hidden_size {outer} and intermediate_size {inner}"
                what = f"torch's grouped product takes rows of multiples of 16 bytes, no experts of {sizes}"
                fix = f"multiples of {step} for both"
                raise JobError(what, where=where, fix=fix)


def check_length(built: BuiltModel, sequence_length: int) -> None:
    """Raise JobError where a row has more tokens than the model has positions; a note on rotary ones."""
    config = built.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or sequence_length <= limit:
        return
    learned = any(
        isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _LEARNED_POSITIONS
        for name, module in built.skeleton.named_modules()
    )
    what = f"rows of {sequence_length} tokens exceed the model's {limit} positions"
    if learned or family_of(config).position_table:
        fix = f"{limit} or less, or a model with rotary embeddings"
        raise JobError(what, where="data.sequence_length", fix=fix)
    built.notes.append(f"{what}: published weights were not trained beyond them")
