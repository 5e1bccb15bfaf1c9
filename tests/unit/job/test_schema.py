"""The job's schema: small, documented, and the same in the code, in the editor and in the presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.job import json_schema, presets
from shardwise.job.load import load_job
from shardwise.job.schema import LORA_RATE, Job, Lora

ROOT = Path(__file__).parents[3]


def test_the_job_stays_small() -> None:
    assert len(json_schema.every_key()) < 90


def test_every_key_is_described() -> None:
    schema = json_schema.job_schema()
    sections = [schema, *schema["$defs"].values()]
    keys = [(name, key) for section in sections for name, key in section["properties"].items()]
    assert len(keys) > 50
    assert [name for name, key in keys if "description" not in key and "$ref" not in key] == []


def test_the_committed_schema_is_current() -> None:
    committed = (ROOT / "docs" / "job.schema.json").read_text(encoding="utf-8")
    assert committed == json_schema.schema_text(), "run `make schema`"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.steps", "an integer of at least 1"),
        ("data.packing", "true or false"),
        ("optimizer.beta1", "a number of at least 0 and below 1"),
        ("train.checkpointing", "one of auto, none, full or an integer of at least 1"),
        ("model.lora.targets", "all-linear or a non-empty list of text"),
    ],
)
def test_what_a_key_accepts_in_words(key: str, words: str) -> None:
    assert json_schema.expected(tuple(key.split("."))) == words


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_explains_the_checkpoint_after_step_1(name: str) -> None:
    line = next(line for line in presets.text(name).splitlines() if "save_every" in line)
    assert "step 1" in line
    assert "worst_case_first" in line


@pytest.mark.parametrize("name", presets.names())
def test_presets_load_where_init_wrote_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = [str(path) for path in presets.write(name, Path("job.yaml"))]
    assert load_job("job.yaml").job.name == name
    assert Path("job.yaml").read_text().startswith(f"# yaml-language-server: $schema={presets.SCHEMA_FILE}\n")
    assert json.loads(Path(presets.SCHEMA_FILE).read_text())["title"] == "shardwise job"
    assert len(written) == (2 if name in ("alpaca", "wikitext-2") else 3), "job, sample, schema"


def test_a_job_is_a_frozen_value() -> None:
    job = Job.model_validate({"name": "x", "model": {"source": "m"}, "data": {"train": "d"}})
    with pytest.raises(ValueError, match="frozen"):
        job.name = "y"


def test_a_quantised_base_means_adapters_and_their_rate() -> None:
    """What `--qlora` gives; with adapters of the user's own they stay."""
    values: dict[str, Any] = {
        "name": "a",
        "data": {"train": "x"},
        "model": {"source": "m", "quantization": "nf4"},
    }
    job = Job.model_validate(values)
    assert job.model.lora == Lora()
    assert job.optimizer.learning_rate == LORA_RATE
    own = Job.model_validate({**values, "model": {**values["model"], "lora": {"rank": 4}}})
    assert own.model.lora is not None
    assert own.model.lora.rank == 4
