"""Facts about a model that need no network: from a folder's config.json, or from the catalog."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.engines.facts import Architecture
from shardwise.errors import JobError
from shardwise.lint.read import is_file
from shardwise.lint.setup import ModelFacts
from shardwise.models.catalog import lookup
from shardwise.models.families import FAMILIES


def facts_of(name: str) -> ModelFacts:
    """Facts about a folder, a hub id or a known name. JobError if its config.json is broken."""
    return ModelFacts.of_config(name, _config(name))


def architecture_of(name: str) -> Architecture | None:
    """Of a model without attention; None for any other: only transformers knows how its layers are split."""
    config = _config(name)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.attends:
        return None
    blocks = config.get("num_hidden_layers", config.get("n_layer"))
    return Architecture(
        blocks=blocks if isinstance(blocks, int) and blocks > 0 else 1,
        key_value_heads=0,
        flash_attention=False,
        attends=False,
        fp32_parameters=family.fp32_parameters,
    )


def _config(name: str) -> Mapping[str, Any]:
    file = Path(name) / "config.json"
    if not is_file(file):
        shape = lookup(name)
        return shape.hf_config() if shape else {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise JobError("it is not a JSON object", where=str(file), fix="save the model again")
    return config
