"""`shardwise train` and `emit --to slurm` on a real Slurm with two nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.job.source import job_text
from slurm_cluster import MISSING, available, cluster

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not available(), reason=MISSING),
]

SAMPLES = Path(__file__).parents[2] / "src" / "shardwise" / "job" / "samples"
VENV_BIN = Path(sys.executable).parent
SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
JOB = {
    "name": "run",
    "model": {
        "source": "HuggingFaceTB/SmolLM2-135M",
        "weights": "random",
        "config": SHAPE,
        "tokenizer": "train",
        "tokenizer_vocab": 512,
    },
    "data": {"train": str(SAMPLES / "qa.jsonl"), "sequence_length": 96, "eval_fraction": 0.0},
    "train": {"steps": 20_000, "global_batch": 4, "micro_batch": 2, "precision": "fp32", "save_every": 0},
    "strategy": "fsdp2",
    "tracking": [],
}


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with cluster() as environment:
        yield environment


@pytest.fixture
def run(slurm: dict[str, str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs a command in the test's folder, where a job file lies; its exit code and output."""
    (tmp_path / "job.yaml").write_text(job_text(JOB))
    environment = {**os.environ, **slurm, "HOME": str(tmp_path), "SHARDWISE_CACHE": str(tmp_path / "cache")}
    environment["PATH"] = f"{VENV_BIN}:{environment['PATH']}"

    def command(*words: str, timeout: float = 300) -> tuple[int, str]:
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=environment,
            timeout=timeout,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout

    return command


def losses(run_dir: Path) -> dict[int, float]:
    """By step."""
    path = run_dir / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def wait_for(what: Callable[[], Any], seconds: float, log: Path) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, log.read_text() if log.exists() else "there is no log"
        time.sleep(0.2)


def state(run: Callable[..., tuple[int, str]], job: str) -> dict[str, str]:
    """What Slurm shows of a job."""
    return dict(re.findall(r"(\w+)=(\S+)", run("scontrol", "--oneliner", "show", "job", job)[1]))


def test_before_the_time_limit_the_run_is_saved_and_goes_on_by_itself(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """The emitted batch script as it is: the limit comes near, the state is saved, the job is queued again.

    Its losses are those of a run that nobody interrupted, bit for bit. A cancelled job does not come back.
    """
    emitted = ["emit", "job.yaml", "--gpus", "2x1x24GB+eth25", "--to", "slurm", "--run", "shardwise"]
    code, out = run("shardwise", *emitted)
    assert code == 0, out
    code, out = run("sbatch", "--parsable", "--time=30", "engine/launch.sbatch")
    assert code == 0, out
    job = out.strip()
    run_dir, log = tmp_path / "runs" / "run", tmp_path / f"run-{job}.log"
    wait_for(lambda: len(losses(run_dir)) >= 3, 180, log)
    # nearer than the 300 s of --signal; Slurm looks at limits twice a minute
    assert run("scontrol", "update", f"JobId={job}", "TimeLimit=4")[0] == 0
    wait_for(lambda: state(run, job).get("Restarts") == "1", 120, log)
    saved = max(losses(run_dir))
    assert (run_dir / "checkpoints" / f"step-{saved:06d}" / "manifest.json").is_file()
    assert state(run, job)["JobState"] == "PENDING"
    assert f"stopped: on request after step {saved} of 20000" in log.read_text()
    # Slurm waits for two minutes after a requeue; the next limit is the first one's
    assert run("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=30")[0] == 0
    wait_for(lambda: max(losses(run_dir)) >= saved + 5, 180, log)
    assert run("scancel", job)[0] == 0
    wait_for(lambda: state(run, job)["JobState"] == "CANCELLED", 120, log)
    last = max(losses(run_dir))
    time.sleep(5)
    assert state(run, job)["JobState"] == "CANCELLED", "it was not queued again"
    same = ["--set", "name=same", "--processes", "2", "--max-steps", str(last)]
    code, out = run("shardwise", "train", "job.yaml", *same)
    assert code == 0, out
    assert losses(run_dir) == losses(tmp_path / "runs" / "same")


@pytest.mark.parametrize("kind", ["shardwise", "script"])
def test_slurm_accepts_the_emitted_scripts(
    kind: str, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, out = run(
        "shardwise", "emit", "job.yaml", "--gpus", "2x1x24GB+eth25", "--to", "slurm", "--run", kind
    )
    assert code == 0, out
    for script in sorted((tmp_path / "engine").glob("*.sbatch")):
        code, out = run("sbatch", "--test-only", str(script), "train.py")
        assert code == 0, out
        assert "n[1-2]" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            [
                "srun",
                "--time=30",
                "--nodes=2",
                "--ntasks=4",
                "--overcommit",
                "shardwise",
                "train",
                "job.yaml",
            ],
            2,
            "srun started 4 tasks on 2 nodes",
        ),
        (
            ["srun", "--time=1", "--nodes=2", "--ntasks-per-node=1", "shardwise", "train", "job.yaml"],
            2,
            "Slurm ends this job in ",
        ),
        (
            ["sbatch", "--wait", "--nodes=2", "--output=log", "--wrap", "shardwise train job.yaml"],
            2,
            "Slurm allocated 2 nodes, and this would train on one of them",
        ),
    ],
    ids=["a task a GPU", "no time", "srun left out"],
)
def test_a_wrong_start_is_refused(
    words: list[str], code: int, message: str, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    found, out = run(*words)
    text = out + ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else "")
    assert (found, message in text) == (code, True), text
    assert not (tmp_path / "runs").exists()
    assert "Traceback" not in text
