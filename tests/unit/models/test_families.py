"""The table of model families: its rows name what exists, and reading it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING, AttentionInterface

from shardwise.kernels.attention import varlen_attention
from shardwise.models.families import (
    FAMILIES,
    REFUSED,
    VARLEN,
    Family,
    attention_of,
    family_of,
    liger_kernels,
    logits_after,
)


def test_every_family_is_an_architecture_of_transformers() -> None:
    assert {*FAMILIES, *REFUSED} <= set(CONFIG_MAPPING)
    assert not FAMILIES.keys() & REFUSED.keys()


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.package])
def test_a_familys_own_package_provides_its_functions(kind: str) -> None:
    package = import_module(FAMILIES[kind].package)
    assert all(callable(getattr(package, n)) for n in ("check_config", "prepare", "mixer_flops_per_token"))


@pytest.mark.parametrize("kind", [k for k, f in FAMILIES.items() if f.logits_multiplier or f.logits_divisor])
def test_the_values_that_scale_logits_are_in_the_config(kind: str) -> None:
    family, config = FAMILIES[kind], CONFIG_MAPPING[kind]()
    assert hasattr(config, family.logits_multiplier or family.logits_divisor)
    assert logits_after(config)[0] > 0


def test_an_unknown_family_is_unpacked_and_has_no_fused_parts() -> None:
    config = SimpleNamespace(model_type="new", hidden_act="silu")
    assert family_of(config) == Family()
    assert attention_of(config).packing == "rows"
    assert liger_kernels(config) == frozenset()


@pytest.mark.parametrize(
    ("changes", "packing"),
    [
        ({}, "varlen"),
        ({"attention_dropout": 0.1}, "mask"),
        ({"head_dim": 12}, "mask"),
        ({"head_dim": 264}, "mask"),
        ({"attn_logit_softcapping": 50.0}, "mask"),
    ],
)
def test_flash_attention_needs_a_head_that_it_takes_and_plain_softmax(
    changes: dict[str, float], packing: str
) -> None:
    config = SimpleNamespace(model_type="llama", **{"head_dim": 64, **changes})
    attention = attention_of(config)
    assert attention.packing == packing
    assert attention.implementation == (
        VARLEN if packing == "varlen" else "eager" if "attn_logit_softcapping" in changes else None
    )


def test_ligers_mlp_computes_one_activation() -> None:
    silu, gelu = (SimpleNamespace(model_type="llama", hidden_act=name) for name in ("silu", "gelu"))
    assert liger_kernels(silu) == {"rope", "rms_norm", "swiglu"}
    assert liger_kernels(gelu) == {"rope", "rms_norm"}


def test_the_packed_attention_is_registered_under_the_name_in_the_table() -> None:
    import_module("shardwise.objective.causal_lm")
    assert AttentionInterface()[VARLEN] is varlen_attention


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, shardwise.models.families; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
