"""Tables over models, GPUs and modes: every row is what `plan` says of the same question."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.app.plan import plan
from shardwise.app.tables import tables
from shardwise.cli import main
from shardwise.errors import JobError
from shardwise.planner import planning
from shardwise.planner.tables import MOST_ROWS, Row, Table

SMALL = "smollm2-135m"
P = 134_515_008


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def memory() -> Table:
    return tables("memory", SMALL, gpus="1x4GiB,2x16GB", modes="full+nockpt,lora16,int8+lora16,nf4+lora16")


def test_the_weights_are_two_bytes_a_parameter_one_and_a_half(memory: Table) -> None:
    rows = memory.to_json()["rows"]
    assert {row["parameters"] for row in rows} == {P}, "without adapters"
    found = {row["mode"]: row["weights_bytes"] for row in rows}
    assert found == {
        "full+nockpt": 2 * P,
        "lora16": 2 * P,
        "int8+lora16": P,
        "nf4+lora16": round(0.516 * P),
    }


def test_a_row_is_what_plan_says_for_its_command(memory: Table, capsys: pytest.CaptureFixture[str]) -> None:
    for row in (memory.rows[0], memory.rows[-1]):
        verb, *arguments = shlex.split(row.command)
        assert verb == "shardwise"
        main([*arguments, "--json"])
        made = json.loads(capsys.readouterr().out)
        asked = made["chosen"] or made["alternatives"][0]
        assert row.option is not None
        assert asked["strategy"] == row.option.strategy.to_json()
        assert asked["prediction"] == row.option.prediction.to_json()


def test_memory_is_asked_of_one_strategy_and_a_micro_batch_of_one(memory: Table) -> None:
    rows = memory.to_json()["rows"]
    assert [row["strategy"] for row in rows[:2]] == ["single", "zero2"]
    assert {row["micro_batch"] for row in rows} == {1}
    assert [row["checkpoint_every"] for row in rows[::2]] == [0, 1, 1, 1]
    needed = [row["needed_bytes"] for row in rows[1::2]]
    assert needed[0] > needed[1] > needed[3], "all weights, adapters, adapters on NF4"
    assert [row["fits"] for row in rows[:2]] == ["no", "fits"]


def test_a_table_that_was_made_is_read(memory: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_make", None)
    again = tables("memory", SMALL, gpus="1x4GiB,2x16GB", modes="full+nockpt,lora16,int8+lora16,nf4+lora16")
    assert again == memory


def test_the_largest_batch_fits_and_one_row_more_does_not() -> None:
    shape = ("data.sequence_length=512",)
    table = tables("batch", SMALL, gpus="1x6GiB,2x8GB", modes="full", changes=shape)
    for row, world, strategy in zip(table.rows, (1, 2), ("single", "zero2"), strict=True):
        assert row.option is not None
        rows = row.option.strategy.micro_batch
        assert 1 < rows < MOST_ROWS
        assert row.option.fit == "fits"
        changes = (*shape, f"strategy={strategy}", "train.checkpointing=full")
        more = (f"train.micro_batch={rows + 1}", f"train.global_batch={2 * world * (rows + 1)}")
        beyond = plan(model=SMALL, gpus=row.gpus, changes=(*changes, *more), nearest=False)
        assert beyond.options[0].fit != "fits"


def test_scaling_keeps_the_step_and_compares_with_the_first_that_fits() -> None:
    modes = "zero2+ckpt,fsdp2+ckpt"
    table = tables("scaling", SMALL, gpus="2xH100,6xH100", modes=modes, changes=["train.micro_batch=1"])
    rows = table.to_json()["rows"]
    assert {row["global_batch"] for row in rows} == {96}, "a multiple of 2 and 6"
    assert [row["speedup"] for row in rows[::2]] == [1, 1]
    assert rows[1]["speedup"] == pytest.approx(rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"])
    assert rows[1]["efficiency_fraction"] == pytest.approx(rows[1]["speedup"] / 3)
    assert "zero2+ckpt" in str(table)


def test_scaling_of_one_size_also_shows_what_divides_it() -> None:
    table = tables("scaling", SMALL, gpus="6xRTX4090", modes="zero2+ckpt", sequence=256)
    assert [row.gpus for row in table.rows] == ["1xRTX4090", "3xRTX4090", "6xRTX4090"]
    assert [row.speedup is not None for row in table.rows] == [True] * 3


def test_scaling_leaves_out_what_does_not_fill_nodes() -> None:
    """Half of 24 GPUs in nodes of 8 is no number of nodes."""
    table = tables("scaling", SMALL, gpus="3x8xH100", modes="zero2+ckpt", sequence=256)
    assert [row.gpus for row in table.rows] == ["1xH100", "3xH100", "6xH100", "3x8xH100"]


def test_by_default_stages_are_compared_on_several_gpus_and_formats_on_one() -> None:
    modes = {
        gpus: [row.mode for row in tables("memory", SMALL, gpus=gpus, sequence=256).rows]
        for gpus in ("1xRTX4090", "2xRTX4090")
    }
    assert modes["1xRTX4090"][-1] == "nf4+lora16"
    assert modes["2xRTX4090"][:3] == ["full+zero1", "full+zero2", "full+zero3"]


def test_speed_is_steps_and_days_of_the_job() -> None:
    table = tables("speed", SMALL, gpus="1xH100", modes="full+ckpt+single", changes=["train.steps=1000"])
    row = table.to_json()["rows"][0]
    assert row["seconds"] == pytest.approx(1000 * row["step_seconds"])
    assert f"{1 / row['step_seconds']:.3g}" in str(table)
    assert f"{row['seconds'] / 60:,.3g}" in str(table), "in minutes, as it is less than two hours"


def test_no_speed_is_shown_where_not_even_one_row_fits() -> None:
    rows = tables("batch", SMALL, gpus="1x2GB", modes="full", sequence=256)
    (row,) = rows.to_json()["rows"]
    assert row["fits"] == "no"
    assert f"| 0 | {row['needed_bytes'] / 2**30:.1f} | no |" in rows.to("md")
    assert f"{row['tokens_per_second']:,.0f}" not in str(rows)


def test_names_are_cut_between_words_and_other_lengths_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    modes = "int8+lora16+zero3-offload+ckpt,nf4+lora16+zero3-offload+nockpt"
    table = tables("speed", f"{SMALL},gpt2", gpus="2xRTX4090", modes=modes, changes=["train.micro_batch=1"])
    text = table.to("text")
    assert max(map(len, text.splitlines())) <= 80
    assert {SMALL, "gpt2", "2xRTX4090", "lora16", "offload", "nockpt"} <= {*re.findall(r"[\w.-]+", text)}
    assert re.search(
        r"rows of \d+ tokens \((gpt2: 1024|smollm2-135m: 2048)\), \d+ rows a step", " ".join(text.split())
    )
    assert len(text.split("micro ×")[0].splitlines()) <= 4, "three lines before the table"


def test_the_margin_decides_what_fits() -> None:
    def row(margin: str | None) -> Row:
        modes = "full+nockpt"
        return tables("memory", SMALL, gpus="1x6GiB", modes=modes, margin=margin).rows[0]

    first = row(None)
    assert first.option is not None
    assert first.option.fit == "fits"
    memory = first.option.prediction.memory
    free = 1 - memory.needed_bytes / memory.capacity_bytes
    assert 0.05 < free < 0.9
    tight = row(f"{free + 0.01:.3f}")
    assert tight.option is not None
    assert tight.option.fit == "tight"
    assert "--margin" in tight.command


def test_every_format_has_every_row(memory: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(memory.to("csv"))))
    assert [row["mode"] for row in rows] == [row.mode for row in memory.rows]
    assert [int(row["needed_bytes"]) for row in rows] == [
        row.option.prediction.memory.needed_bytes for row in memory.rows if row.option
    ]
    assert json.loads(memory.to("json"))["rows"][0]["weights_bytes"] == 2 * P
    for text in (memory.to("text"), memory.to("md"), memory.to("html")):
        for row in memory.rows:
            assert row.option is not None
            assert f"{row.option.prediction.memory.needed_bytes / 2**30:.1f}" in text
        assert "no: it needs more than the GPU has" in text
    assert "| GPUs | full+nockpt | lora16 | int8+lora16 | nf4+lora16 |" in memory.to("md")
    assert "<script" not in memory.to("html")


def test_the_text_is_not_wider_than_the_terminal(memory: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, memory.to("text").splitlines())) <= columns


def test_what_a_rule_refuses_is_said_and_the_rest_is_shown() -> None:
    table = tables("memory", SMALL, gpus="2x16GB,3x16GB", modes="zero2", changes=["train.global_batch=2"])
    fits, refused = table.rows
    assert fits.option is not None
    assert refused.plan is None
    assert "2" in refused.problem
    assert table.to_json()["rows"][1]["needed_bytes"] is None
    assert "refused" in str(table)
    with pytest.raises(JobError, match="no row is possible"):
        tables("memory", SMALL, gpus="3x16GB", modes="zero2", changes=["train.global_batch=2"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"modes": "full+blub"}, "'blub' of 'full[+]blub' is no word of a mode"),
        ({"modes": "full+lora16"}, "says model.lora twice"),
        ({"modes": "int8"}, "freezes the weights"),
        ({"models": "nope"}, "no known shape 'nope'"),
        ({"models": ","}, "the table has no rows"),
        ({"gpus": "2xFOO"}, "no GPU is called 'FOO'"),
        ({"margin": "all"}, "'all' is no share"),
    ],
)
def test_bad_input_is_refused(asked: dict[str, str], message: str) -> None:
    with pytest.raises(JobError) as raised:
        tables("memory", **{"models": SMALL, "gpus": "1x16GB", "modes": "full", **asked})
    assert any(re.search(message, problem.what) for problem in raised.value.problems)


def test_the_verb_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.md"
    arguments = ["--models", SMALL, "--gpus", "2x16GB", "--modes", "lora16", "--format", "md"]
    assert main(["tables", "memory", *arguments, "--out", str(out)]) == 0
    assert out.read_text().startswith("The weights alone, GiB")
    assert capsys.readouterr().out == f"wrote {out}\n"
