"""Which rows a bench has, what they are called, and what is said of those that cannot be run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from shardwise.device import Unavailable
from shardwise.errors import DoesNotFitError, JobError
from shardwise.hardware.parse import parse_hardware
from shardwise.job.load import load_job
from shardwise.models.catalog import lookup
from shardwise.planner.plan import Option
from shardwise.planner.planning import make_plan
from shardwise.space.candidates import candidates
from shardwise.trials.rows import make_rows
from shardwise.trials.sweep import ALL, Load, chosen_names, points, shapes

JOB = """
name: small
model: {source: llama-3.2-1b, weights: random, config: {num_hidden_layers: 2}}
data: {train: text.txt, format: text, sequence_length: 512, eval_fraction: 0}
train: {steps: 100, global_batch: 16, micro_batch: 2, checkpointing: none}
strategy: zero2
"""


PRETRAINED = ("model.weights=pretrained", "model.config={}", "model.source=folder")


def loading(job: Path, changes: Sequence[str] = ()) -> Load:
    return lambda more: load_job(job, [*changes, *more]).job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    Path("job.yaml").write_text(JOB)
    shape = lookup("smollm2-135m")
    assert shape is not None
    Path("folder").mkdir()
    Path("folder/config.json").write_text(json.dumps({**shape.hf_config(), "num_hidden_layers": 2}))
    return Path("job.yaml")


def test_a_sweep_is_every_combination_at_the_same_global_batch(job: Path) -> None:
    found = points(loading(job), ["train.micro_batch=1,4", "train.checkpointing=none,full"])
    rows, left_out = make_rows(found, None, processes=2, plan_for=None)
    assert [row.label for row in rows] == [
        "zero2 micro_batch=1 checkpointing=none",
        "zero2 micro_batch=1 checkpointing=full",
        "zero2 micro_batch=4 checkpointing=none",
        "zero2 micro_batch=4 checkpointing=full",
    ]
    batches = [(row.strategy.micro_batch, row.strategy.accumulation) for row in rows]
    assert batches == [(1, 8), (1, 8), (4, 2), (4, 2)]
    assert {row.strategy.global_batch for row in rows} == {16}
    assert rows[1].slug == "zero2-micro-batch-1-checkpointing-full"
    assert len({row.key for row in rows}) == 4
    assert left_out == []


def test_parts_of_the_strategy_can_be_swept(job: Path) -> None:
    found = points(loading(job), ["strategy.offload_optimizer=none,cpu"])
    rows, _ = make_rows(found, None, processes=2, plan_for=None)
    assert [row.strategy.name for row in rows] == ["zero2", "zero2-offload"]
    rows, _ = make_rows(found, ["zero3", "fsdp2"], processes=2, plan_for=None)
    assert [row.strategy.name for row in rows if row.refused is None][:2] == ["zero3", "fsdp2"]
    reshard, _ = make_rows(
        points(loading(job), ["strategy.reshard=true,false"]), ["fsdp2"], processes=2, plan_for=None
    )
    assert [row.strategy.name for row in reshard] == ["fsdp2", "fsdp2-noreshard"]


def test_a_row_run_again_from_its_job_is_the_same_strategy(job: Path) -> None:
    """What the row's processes resolve from its job is what the row says."""
    from shardwise.space.auto import resolve

    found = points(loading(job, ["train.micro_batch=null", "train.checkpointing=auto"]), [])
    rows, _ = make_rows(found, [ALL], processes=2, plan_for=None)
    assert len(rows) >= 10
    for row in rows:
        assert row.job.train.micro_batch == row.strategy.micro_batch == 4, "the rule of thumb's, now named"
        assert row.job.train.checkpointing == "none"
        strategy, _ = resolve(row.job, world_size=2, devices="cpu")
        assert strategy == row.strategy


def test_without_a_gpu_all_is_what_the_rules_allow_and_nothing_is_predicted(job: Path) -> None:
    rows, left_out = make_rows(points(loading(job), []), [ALL], processes=2, plan_for=None)
    names = [row.strategy.name for row in rows]
    assert {"zero0", "zero1", "zero2", "zero3", "fsdp2"} <= set(names)
    assert {one["strategy"] for one in left_out} >= {"single"}
    assert all("one process" in one["reason"] for one in left_out if one["strategy"] == "single")
    assert {row.predicted()["predicted_unavailable"] for row in rows} == {
        "the simulator predicts GPUs, and there is none here"
    }


def test_on_gpus_each_row_has_its_prediction_and_what_does_not_fit_is_left_out(job: Path) -> None:
    hardware = parse_hardware("2x24GB")
    found = points(loading(job), [])
    plan_for = partial(make_plan, hardware=hardware)
    rows, _ = make_rows(found, [ALL], processes=2, plan_for=plan_for)
    assert {"zero2", "zero3", "fsdp2"} <= {row.strategy.name for row in rows}
    for row in rows:
        assert isinstance(row.option, Option)
        assert row.option.strategy == row.strategy
        predicted = row.predicted()["predicted"]
        assert predicted["memory"]["peak_reserved_bytes"] > 2**30
        assert {"where", "allocated_bytes"} == set(predicted["memory"]["timeline"][0])

    tight = partial(make_plan, hardware=hardware, memory_cap_bytes=10 * 2**30)
    fitting, left_out = make_rows(found, [ALL], processes=2, plan_for=tight)
    names = {row.strategy.name for row in fitting}
    assert "fsdp2" in names
    assert "zero0" not in names
    reasons = {one["strategy"]: one["reason"] for one in left_out}
    assert "more than it has" in reasons["zero0"]
    (asked,), _ = make_rows(found, ["zero0"], processes=2, plan_for=tight)
    assert asked.predicted()["fit"] == "no", "what is asked for by name is run all the same"
    assert asked.refused is None
    with pytest.raises(DoesNotFitError, match="nothing fits"):
        make_rows(found, [ALL], processes=2, plan_for=partial(tight, memory_cap_bytes=3 * 2**30))


def test_a_forbidden_strategy_is_a_row_that_says_why(job: Path) -> None:
    (row,), _ = make_rows(points(loading(job), []), ["single"], processes=2, plan_for=None)
    assert row.refused is not None
    assert "one process" in row.refused
    assert isinstance(row.option, Unavailable)


@pytest.mark.parametrize(
    ("sweep", "what"),
    [
        ("train.micro_batch", "not key=value,value"),
        ("train.micro_batch=1,,2", "not key=value,value"),
        ("strategy=zero2,zero3", "a flag of their own"),
        ("strategy.contiguous=true,false", "no key contiguous"),
        ("train.micro_bach=1", "micro_bach"),
        ("train.precision=bf16,int3", "int3"),
    ],
)
def test_what_cannot_be_swept_is_an_error_that_names_it(job: Path, sweep: str, what: str) -> None:
    with pytest.raises(JobError) as caught:
        points(loading(job), [sweep])
    assert any(what in problem.what for problem in caught.value.problems)


def test_a_strategy_that_is_none_is_answered_with_the_closest() -> None:
    assert chosen_names("zero2, fsdp2-noreshard,autotp2-zero1", 2) == [
        "zero2", "fsdp2-noreshard", "autotp2-zero1",
    ]  # fmt: skip
    with pytest.raises(JobError) as caught:
        chosen_names("zero2,zro3", 2)
    assert caught.value.problems[0].fix == "did you mean zero3?"


@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("lora", ["null", "{}"])
def test_every_strategy_that_a_plan_may_choose_has_a_name_here(job: Path, processes: int, lora: str) -> None:
    chosen = loading(job, ["strategy=auto", *PRETRAINED, f"model.lora={lora}"])([])
    allowed, refused = candidates(chosen, world_size=processes, gpus_per_node=processes)
    names = {one.name for one in allowed} | {one.strategy.name for one in refused}
    assert ("ddp" in names, "ddp-zero1" in names) == (lora == "{}", lora == "null")
    assert names <= shapes(processes).keys()
    assert "ddp" in chosen_names("ddp", processes)


def test_replicas_are_proposed_for_adapters_and_not_run_with_all_weights_unless_named(job: Path) -> None:
    plan_for = partial(make_plan, hardware=parse_hardware("2x24GB"))
    for here in (plan_for, None):
        adapters = points(loading(job, [*PRETRAINED, "model.lora={}"]), [])
        rows, left_out = make_rows(adapters, [ALL], processes=2, plan_for=here)
        assert "ddp" in {row.strategy.name for row in rows}
        assert "ddp" not in {one["strategy"] for one in left_out}
        rows, left_out = make_rows(points(loading(job), []), [ALL], processes=2, plan_for=here)
        assert "ddp" not in {row.strategy.name for row in rows}
        reasons = {one["strategy"]: one["reason"] for one in left_out}
        assert "all weights are trained" in reasons["ddp"]
    (named,), _ = make_rows(points(loading(job), []), ["ddp"], processes=2, plan_for=plan_for)
    assert isinstance(named.option, Option), "planned on its own"
    assert (named.strategy.name, named.refused) == ("ddp", None)
    (alone,), _ = make_rows(points(loading(job), []), ["ddp"], processes=1, plan_for=None)
    assert "no replicas" in (alone.refused or "")


def test_an_open_strategy_has_no_parts_to_sweep(job: Path) -> None:
    found = points(loading(job, ["strategy=auto"]), ["strategy.reshard=true,false"])
    with pytest.raises(JobError, match="leaves the strategy to the plan"):
        make_rows(found, None, processes=2, plan_for=None)
