"""A job's plan, on one core and on several."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardwise.errors import JobError
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job
from shardwise.planner import planning as plan_job

JOB = Job.model_validate(
    {
        "name": "run",
        "model": {
            "source": "llama-3.2-1b",
            "weights": "random",
            "config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "vocab_size": 512,
            },
        },
        "data": {"train": "text.txt", "sequence_length": 64},
        "train": {"steps": 2, "global_batch": 8},
        "strategy": "auto",
    }
)


def test_a_plan_is_the_same_on_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    pool = plan_job.ProcessPoolExecutor

    def counted(*arguments, **options):
        pools.append(arguments[0])
        return pool(*arguments, **options)

    monkeypatch.setattr(plan_job, "ProcessPoolExecutor", counted)
    plans = []
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        plans.append(plan_job._make(JOB, parse_hardware("2xRTX4080"), "throughput", None))
    assert pools == [2]
    assert plans[0] == plans[1]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("gpus", "rows", "said"),
    [
        ("1xT4", 64, "no bf16"),
        ("2x8xH100", 8, "cannot be shared equally"),
        ("1xH100", 2**20, "micro-batches"),
    ],
)
def test_what_needs_no_model_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, gpus: str, rows: int, said: str
) -> None:
    monkeypatch.setattr(plan_job, "_kept_tracer", lambda *_: pytest.fail("the model is built"))
    changes = {
        "name": "refused",
        "model": {"source": "HuggingFaceTB/SmolLM2-135M"},
        "data": {"train": "a.jsonl"},
        "train": {"global_batch": rows},
        "strategy": "zero2",
    }
    with pytest.raises(JobError) as raised:
        plan_job.make_plan(Job.model_validate(changes), parse_hardware(gpus))
    assert said in f"{raised.value} {[problem.what for problem in raised.value.problems]}"
    if gpus == "1xT4":  # in fp16 this model needs flash attention, which a T4 has not
        fixes = [problem.fix for problem in raised.value.problems]
        assert all(fix.startswith("train.precision: fp32, or fp16 for a model that") for fix in fixes)


def test_a_tokenizer_to_be_learned_decides_the_rows_of_random_weights() -> None:
    """As in training: planned with a catalog's 256k rows, a model of 8000 would need far more memory."""
    learned = {"tokenizer": "train", "tokenizer_vocab": 8001}
    job = JOB.model_copy(update={"model": JOB.model.model_copy(update=learned), "strategy": "zero2"})
    asked = job, parse_hardware("2xRTX4080"), "throughput", None
    plans = [plan_job._make(*asked), plan_job._make(*asked, vocab_size=300)]
    rows = (plans[0].job.parameters - plans[1].job.parameters) / 64  # of an embedding that is the head, too
    assert rows == 8064 - 300
    assert plans[0].job.assumed == ("a vocabulary of 8064, fewer if the text has fewer",)
    assert plans[1].job.assumed == ()


def test_few_strategies_start_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(plan_job, "ProcessPoolExecutor", None)  # would fail if it were called
    job = JOB.model_copy(update={"strategy": "zero2"})
    assert plan_job._make(job, parse_hardware("2xRTX4080"), "throughput", None).chosen is not None


def test_other_processes_need_no_torch() -> None:
    """They start in half a second; torch alone takes two."""
    code = "import sys, shardwise.planner.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_kept_plan_has_the_name_of_the_job_that_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    first = JOB.model_copy(update={"strategy": "zero2"})
    second = first.model_copy(update={"name": "another"})
    plans = [plan_job.make_plan(job, parse_hardware("2xRTX4080")) for job in (first, second)]
    assert [plan.job.name for plan in plans] == [JOB.name, "another"]
    assert len(list((tmp_path / "plans").glob("*.json"))) == 1, "the second was kept"


@pytest.mark.parametrize("rows", [2, 4])
def test_long_rows_are_no_faster_one_at_a_time(rows: int) -> None:
    """Of several rows one is taken to be packed, for its memory, not for its slower kernel."""
    speeds = []
    for micro_batch in (1, rows):
        changes = {"micro_batch": micro_batch, "checkpointing": "none"}
        job = JOB.model_copy(
            update={
                "model": JOB.model.model_copy(update={"config": {"num_hidden_layers": 2, "vocab_size": 512}}),
                "data": JOB.data.model_copy(update={"sequence_length": 32768}),
                "train": JOB.train.model_copy(update=changes),
                "strategy": "single",
            }
        )
        plan = plan_job._make(job, parse_hardware("1xH200"), "throughput", None)
        assert plan.chosen is not None
        speeds.append(plan.chosen.prediction.time.tokens_per_second_per_gpu)
    assert speeds[1] == pytest.approx(speeds[0], rel=0.01)


@pytest.mark.parametrize("on_stdin", [False, True])
def test_a_script_without_a_main_guard_can_plan(tmp_path: Path, on_stdin: bool) -> None:
    """The workers of a plan do not run the script again."""
    script = tmp_path / "script.py"
    text = (
        "import os, shardwise\n"
        "os.sched_getaffinity = lambda _: {0, 1}\n"
        f"job = shardwise.Job.model_validate({JOB.model_dump()!r})\n"
        "print('planned', shardwise.plan(job, gpus='2xRTX4080').chosen is not None)\n"
    )
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-" if on_stdin else str(script)],
        input=text if on_stdin else None,
        env={**os.environ, "SHARDWISE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "planned True\n", done.stderr


def test_plans_in_threads_do_not_disturb_each_other() -> None:
    jobs = [
        JOB.model_copy(update={"train": JOB.train.model_copy(update={"global_batch": n})}) for n in (8, 16)
    ]
    asked = [(job.model_copy(update={"strategy": "zero2"}), parse_hardware("2xRTX4080")) for job in jobs]
    with ThreadPoolExecutor(2) as pool:
        plans = list(pool.map(lambda one: plan_job.make_plan(*one), asked))
    assert [plan.job.global_batch for plan in plans] == [8, 16]
