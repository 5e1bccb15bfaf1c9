"""A job on several numbers of GPUs: the same rows of a step, efficiency, cost, energy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.app.plan import plan
from shardwise.app.tables import scale
from shardwise.errors import JobError
from shardwise.planner.tables import Table

CHANGES = ("strategy=zero2", "train.micro_batch=1", "train.checkpointing=none")
TOKENS = 10**9  # what a plan compares where the job does not say how many


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> Table:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        changes = (*CHANGES, "energy.price_per_gpu_hour=2.5")
        return scale("2, 8,4x8", gpus="8xH100+ib400", model="smollm2-135m", changes=changes)


def test_each_size_is_its_own_plan_of_the_same_step(scaling: Table) -> None:
    """Without a job the rows are those that 32 GPUs take."""
    assert [row.gpus for row in scaling.rows] == ["2xH100", "8xH100", "4x8xH100+ib400"]
    assert [row["world_size"] for row in scaling.to_json()["rows"]] == [2, 8, 32]
    assert {row.plan.job.global_batch for row in scaling.rows if row.plan} == {512}
    same = plan(gpus="8xH100", model="smollm2-135m", changes=(*CHANGES, "train.global_batch=512"))
    assert scaling.rows[1].option is not None
    assert same.chosen is not None
    assert scaling.rows[1].option.prediction == same.chosen.prediction


def test_the_numbers_follow_from_the_prediction(scaling: Table) -> None:
    rows = scaling.to_json()["rows"]
    assert rows[0]["efficiency_fraction"] == 1.0
    for row in rows:
        assert row["seconds"] == pytest.approx(TOKENS / row["tokens_per_second"])
        assert row["cost"] == pytest.approx(2.5 * row["world_size"] * row["seconds"] / 3600)
        per_gpu = row["tokens_per_second"] / row["world_size"]
        first = rows[0]["tokens_per_second"] / 2
        assert row["efficiency_fraction"] == pytest.approx(per_gpu / first)
        assert row["joules"] > 100 * row["world_size"] * row["seconds"], "at least 100 W a GPU"
    json.dumps(rows)


def test_the_table_has_a_row_for_each_size(scaling: Table) -> None:
    text = str(scaling)
    assert "an assumed 1B tokens" in text
    assert "100.0%" in text
    assert "smollm2-135m · strategy zero2 · checkpointing none" in text, "what all rows share"
    assert text.startswith("A step of 512 rows on more GPUs")
    assert "where the mode names none" not in text
    lines = [line.split()[0] for line in text.splitlines() if "xH100" in line and "between" not in line]
    assert lines == ["2xH100", "8xH100", "4x8xH100+ib400"]


def test_a_size_that_the_rows_do_not_divide_by_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    changes = (*CHANGES, "train.global_batch=8")
    found = scale("2,3", gpus="8xH100", model="smollm2-135m", changes=changes)
    assert found.rows[0].problem == ""
    assert found.rows[1].plan is None
    assert "8" in found.rows[1].problem
    row = found.to_json()["rows"][1]
    assert row["tokens_per_second"] is None
    assert row["cost"] is None
    with pytest.raises(JobError, match="no row is possible"):
        scale("3,5", gpus="8xH100", model="smollm2-135m", changes=changes)


def test_stragglers_lengthen_each_step_by_the_expected_maximum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 8 normal values 1.43 standard deviations (Blom): 14.3 % at 10 %."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    found = [
        scale("8", gpus="8xH100", model="smollm2-135m", changes=CHANGES, straggler=spread)
        for spread in (None, "10%")
    ]
    seconds = [one.to_json()["rows"][0]["step_seconds"] for one in found]
    assert seconds[1] / seconds[0] == pytest.approx(1.143, abs=0.001)


def test_gpus_of_several_nodes_are_not_equally_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of 16 normal values 1.77 standard deviations (Harter 1961): 2.65 % at 1.5 %."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    assumed, equal = (
        scale("2x8", gpus="2x8xH100", model="smollm2-135m", changes=CHANGES, straggler=spread)
        for spread in (None, 0)
    )
    seconds = [one.to_json()["rows"][0]["step_seconds"] for one in (assumed, equal)]
    assert seconds[0] / seconds[1] == pytest.approx(1.0265, abs=0.0005)


@pytest.mark.parametrize(
    ("sizes", "gpus", "message"),
    [
        ("1,two", "8xH100", "'two' is no number of GPUs"),
        ("1,,2", "8xH100", "'' is no number of GPUs"),
        ("0", "8xH100", "'0' is no number of GPUs"),
        ("12", "8xH100", "12 GPUs do not fill nodes of 8"),
        ("1,2", None, "--scale needs to know which GPUs"),
    ],
)
def test_sizes_that_cannot_be_read(sizes: str, gpus: str | None, message: str) -> None:
    with pytest.raises(JobError, match=message):
        scale(sizes, gpus=gpus, model="smollm2-135m")
