"""The config of a job's model, with the job's changes, and checks that transformers leaves out."""

from __future__ import annotations

import copy
import difflib
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models.families import REFUSED, family_code, family_of
from shardwise.models.source import Source

if TYPE_CHECKING:
    from shardwise.models.build import BuiltModel

_LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
"""transformers' names of embeddings with a learned vector for each position."""


def read_config(model: Model, found: Source, vocab_size: int | None) -> PretrainedConfig:
    """Return the shape's config with the job's changes and `vocab_size` embedding rows; raises JobError."""
    if "quantization_config" in found.config:
        raise JobError(
            "the published weights are quantised and cannot be trained",
            where="model.source",
            fix="name the model they were made from",
        )
    kind = str(found.config["model_type"])
    if kind in REFUSED:
        raise JobError(
            f"{kind!r} models cannot be trained: the kernels here compute Mamba-1's mixers only",
            where=f"model.source: {model.source}",
            fix=REFUSED[kind],
        )
    try:
        config = _parse(model, found, {})
        if model.config or vocab_size is not None:
            _check_keys(model.config, config)
            config = _parse(model, found, {**model.config, **_vocabulary(config, vocab_size)})
    except (StrictDataclassError, ArithmeticError, ValueError, TypeError, KeyError) as error:
        raise refused("transformers refuses the config", error, model, fix="correct the values") from None
    code = family_code(family_of(config))
    if code is not None:
        code.check_config(config, model.config)
    return config


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
    """Refuse keys that the architecture does not have: transformers accepts and ignores them."""
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
    """Config values for `size` embedding rows of a new tokenizer: ids of special tokens no longer apply."""
    if size is None:
        return {}
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": size, **{name: None for name in ids if getattr(config, name, None) is not None}}


def check_shape(built: nn.Module, model: Model, found: Source) -> None:
    """Raise JobError for shapes that transformers builds and that cannot train.

    Those are models without blocks, and query heads that cannot share the key-value heads evenly.
    """
    named = model.source if found.folder is None else f"{found.folder}/config.json"
    where = "model.config" if model.config else named
    layers = getattr(built.config, "num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:
        what = f"a model of {layers} layers has nothing to train"
        raise JobError(what, where=f"{where}: num_hidden_layers", fix="1 or more")
    for module in built.modules():
        config = getattr(module, "config", None)
        heads, shared = (
            getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
        )
        groups = hasattr(module, "num_key_value_groups")  # only attention that shares keys and values
        if groups and isinstance(heads, int) and isinstance(shared, int) and heads % shared:
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise JobError(
                f"{heads} attention heads cannot share {shared} key-value heads evenly",
                where=f"{where}: num_key_value_heads",
                fix=f"one of {fitting}, or another num_attention_heads",
            )


def check_length(built: BuiltModel, sequence_length: int) -> None:
    """Raise JobError where a row has more tokens than the model has positions; rotary ones never end."""
    config = built.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    learned = any(
        isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _LEARNED_POSITIONS
        for name, module in built.skeleton.named_modules()
    )
    if limit is not None and sequence_length > limit and (learned or family_of(config).position_table):
        raise JobError(
            f"rows of {sequence_length} tokens exceed the model's {limit} positions",
            where="data.sequence_length",
            fix=f"{limit} or less, or a model with rotary embeddings",
        )
