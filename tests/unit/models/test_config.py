"""Changes of a config apply or are refused; rows longer than a model's learned positions are refused."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models.build import build_model, check_length


@pytest.mark.parametrize(
    ("source", "limit"),
    [("tiny-gpt2", 512), ("gpt-neo-125m", 2048), ("tiny-llama", None), ("pythia-160m", None)],
)
def test_only_learned_positions_have_an_end(source: str, limit: int | None) -> None:
    built = build_model(Model(source=source, weights="random"), dtype=torch.float32, seed=0)
    if limit is None:
        check_length(built, positions := built.config.max_position_embeddings)
        assert not built.notes
        check_length(built, 1_000_000)
        assert f"rows of 1000000 tokens exceed the model's {positions} positions" in built.notes[0]
        return
    check_length(built, limit)
    with pytest.raises(JobError) as caught:
        check_length(built, limit + 1)
    assert caught.value.problems[0].where == "data.sequence_length"
    assert f"exceed the model's {limit} positions" in caught.value.problems[0].what


def bases(source: Path | str, **config: Any) -> tuple[float, float]:
    """The first two rotary frequencies, inverted, of a model with random weights."""
    model = Model(source=str(source), weights="random", config=config)
    built = build_model(model, dtype=torch.float32, seed=0)
    frequencies = next(b for name, b in built.model.named_buffers() if name.endswith("inv_freq"))
    return (1 / frequencies[0]).item(), (1 / frequencies[1]).item()


@pytest.fixture(params=["before transformers 5", "since"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A Llama with four frequencies to a base of 10,000, as either generation writes it."""
    CONFIG_MAPPING["llama"](hidden_size=32, num_attention_heads=4, num_hidden_layers=1).save_pretrained(
        tmp_path
    )
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    rope |= {"rope_theta": 6561.0}
    old = {"rope_theta": 6561.0, "rope_scaling": None}
    path.write_text(
        json.dumps({**values, **({"rope_parameters": rope} if request.param == "since" else old)})
    )
    return tmp_path


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1, 9)),
        ({"rope_theta": 256.0}, (1, 4)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, (2, 18)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 256.0}, (2, 8)),
        ({"rope_scaling": None}, (1, 9)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 16.0}}, (2, 4)),
    ],
)
def test_rotary_positions_change_as_the_job_says(
    folder: Path, config: dict[str, Any], expected: tuple[float, float]
) -> None:
    assert bases(folder, **config) == pytest.approx(expected)


def test_the_jobs_parameters_replace_the_scaling_of_a_shape() -> None:
    plain = {"rope_type": "default", "rope_theta": 2.0**32}
    assert bases("llama-3.2-1b", rope_parameters=plain) == pytest.approx((1, 2))


@pytest.mark.parametrize(
    ("source", "config", "what"),
    [
        ("gpt2", {"rope_theta": 500000.0}, "gpt2 models have no config value 'rope_theta'"),
        (
            "gpt2",
            {"rope_scaling": {"rope_type": "linear"}},
            "gpt2 models have no config value 'rope_scaling'",
        ),
        ("tiny-llama", {"rope_theta": dt.date(2024, 1, 1)}, "cannot be datetime.date(2024, 1, 1)"),
        ("tiny-llama", {"rope_theta": "500000"}, "cannot be '500000'"),
        ("tiny-llama", {"rope_theta": True}, "cannot be True"),
        ("tiny-llama", {"rope_theta": 0}, "cannot be 0"),
        ("tiny-llama", {"rope_theta": float("nan")}, "cannot be nan"),
        ("gemma-3-4b", {"rope_theta": 5e5}, "rope_theta changes nothing: each kind of layer of gemma3_text"),
        ("gemma-3-4b", {"rope_theta": 1e4}, "rope_theta changes nothing: each kind of layer of gemma3_text"),
    ],
)
def test_a_base_that_would_change_nothing_is_refused(source: str, config: dict[str, Any], what: str) -> None:
    with pytest.raises(JobError) as caught:
        bases(source, **config)
    assert what in caught.value.problems[0].what
    assert caught.value.problems[0].where.startswith("model.config.rope_")


@pytest.mark.parametrize("name", ["float8", "float16"])
def test_a_dtype_that_would_change_nothing_is_refused(name: str) -> None:
    with pytest.raises(JobError) as caught:
        bases("tiny-llama", dtype=name)
    assert caught.value.problems[0].fix == "remove it, and set train.precision"


def test_a_dtype_of_the_file_that_torch_does_not_know_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float8"}))
    with pytest.raises(
        JobError, match="refuses the config: module 'torch' has no attribute 'float8'"
    ) as caught:
        bases(folder)
    assert caught.value.problems[0].where == f"model.source: {folder}"
