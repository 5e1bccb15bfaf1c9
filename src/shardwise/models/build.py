"""A job's model, built on the meta device: names and shapes of all tensors, without values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shardwise.job.schema import Model
from shardwise.models.adapters import add_lora, has_stacked_experts, is_adapter, taken_for_experts
from shardwise.models.config import check_shape, read_config, refused
from shardwise.models.families import attention_for, family_code, family_of
from shardwise.models.file_weights import open_weights
from shardwise.models.quantize import quantize_linears
from shardwise.models.rotary import fix_frequencies
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
    source: str
    """For people: where shape and weights come from."""
    notes: list[str]
    """For people: remarks on the model; mostly empty."""
    skeleton: PreTrainedModel
    """The same model as published: no adapters, never filled or sharded. Its config is saved."""
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
    """Build the model of a job, without loading anything.

    Args:
        model: the job's `model` section.
        dtype: format of the weights and of the computation.
        seed: of random weights, and of adapters.
        vocab_size: embedding rows, for random weights with a new tokenizer; default the shape's.
        sequence_length: tokens of the longest row, for which rotary frequencies are fixed (`rotary`); None
            lets transformers choose them at each call, as for generating.

    Raises:
        JobError: there is no such model, its config is refused, an adapter's target does not exist, or its
            rotary frequencies cannot be fixed.
        MachineError: it must be downloaded, and the hub cannot be reached.
        CheckpointError: the files do not hold the weights of this shape.
    """
    found = find_source(model)
    config = read_config(model, found, vocab_size)
    skeleton = _construct(config, model, dtype)
    built = _construct(copy.deepcopy(config), model, dtype)
    check_shape(built, model, found)
    build_buffers(built)
    notes = [] if sequence_length is None else fix_frequencies(built, sequence_length)
    built.config.use_cache = False  # a cache would disable checkpointing's recomputation
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
        notes += _expert_notes(skeleton, model)
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


def _expert_notes(skeleton: PreTrainedModel, model: Model) -> list[str]:
    """What LoRA and quantisation leave out of a mixture of experts."""
    if not has_stacked_experts(skeleton):
        return []
    notes = ["the experts get no adapter: they are not linear modules"]
    taken = taken_for_experts(skeleton)
    if taken:
        notes.append(f"nor do {', '.join(sorted(taken))}: PEFT takes these names for the experts'")
    if model.quantization != "none":
        notes.append("the experts are not quantised: they are not linear modules")
    return notes


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
        what = "transformers cannot build a causal language model from the config"
        fix = "use a decoder-only language model, and values that fit each other"
        raise refused(what, error, model, fix=fix) from None
    code = family_code(family_of(config))
    if code is not None:
        code.prepare(built)
    return built
