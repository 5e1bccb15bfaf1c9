"""`shardwise emit` for Slurm, Kubernetes and SkyPilot: their own parsers take the files, and these run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.app.check import check
from shardwise.cli import main
from shardwise.emit.batch import STOP_SECONDS
from shardwise.emit.cluster import FILES, FINAL, WORK
from shardwise.emit.files import Emitted, Target, emit
from shardwise.emit.request import Predicted, Request, Script
from shardwise.errors import (
    CheckpointError,
    DoesNotFitError,
    JobError,
    MachineError,
    ShardwiseError,
    StoppedError,
)
from shardwise.job.source import job_values
from shardwise.lint.read import UNKNOWN
from shardwise.strategy import Strategy

JOB = "name: My_run\nmodel: {source: org/model}\ndata: {train: qa.jsonl}\n"
VENV_BIN = Path(sys.executable).parent


def made(target: Target, *, nodes: int = 2, own: bool = True, folder: str = "/engine") -> Emitted:
    request = Request(
        name="My_run",
        strategy=Strategy(engine="deepspeed", stage=2, data_parallel=nodes * 4),
        nodes=nodes,
        gpus_per_node=4,
        trainable_parameters=10**6,
        predicted=Predicted(needed_bytes=1 << 30, capacity_bytes=2 << 30, tokens_per_second_per_gpu=9.0),
        script=Script(sequence_length=64, lora_rank=None),
        folder=folder,
        job_text=JOB if own else None,
    )
    return emit(target, request)


def documents(emitted: Emitted, name: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(emitted.files[name])}


def test_check_does_not_judge_manifests(tmp_path: Path) -> None:
    """`---` between documents is no mistake in them."""
    files = {**made("skypilot").files, **made("kubernetes").files}
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "qa.jsonl").write_text('{"text": "a"}')
    found = check([str(tmp_path / file) for file in files]).findings
    assert {one.severity for one in found} == {"note"}
    assert f"{UNKNOWN}; in 3 places" in [one.what for one in found]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("nodes", [1, 3])
def test_kubeflow_s_models_know_every_key(nodes: int, own: bool) -> None:
    """They ignore unknown keys: so what they write again is compared with what they read."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    emitted = made("kubernetes", nodes=nodes, own=own)
    for file, kind, model in (
        ("trainjob.yaml", "TrainJob", models.TrainerV1alpha1TrainJob),
        ("jobset.yaml", "JobSet", models.JobsetV1alpha2JobSet),
    ):
        found = documents(emitted, file)
        assert model.from_dict(found[kind]).to_dict() == found[kind], file
        config = found["ConfigMap"]
        assert models.IoK8sApiCoreV1ConfigMap.from_dict(config).to_dict() == config


def test_the_pods_get_the_files_as_they_are() -> None:
    for file in ("trainjob.yaml", "jobset.yaml"):
        data = documents(made("kubernetes"), file)["ConfigMap"]["data"]
        same = made("skypilot").files
        assert data == {"job.yaml": JOB, "launch.sh": same["launch.sh"]}
        data = documents(made("kubernetes", own=False), file)["ConfigMap"]["data"]
        same = dict(made("skypilot", own=False).files)
        del same["task.yaml"]
        assert data == same


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("nodes", [1, 3])
def test_skypilot_takes_its_file(nodes: int, own: bool) -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    import jsonschema

    task = yaml.safe_load(made("skypilot", nodes=nodes, own=own).files["task.yaml"])
    jsonschema.Draft202012Validator(schemas.get_task_schema()).validate(task)
    resources = schemas.get_resources_schema()
    jsonschema.Draft202012Validator(resources).validate(task["resources"])


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_nodes_are_as_many_as_planned_and_meet_at_the_first(nodes: int) -> None:
    emitted = made("kubernetes", nodes=nodes)
    train = documents(emitted, "trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    assert (train["numNodes"], train["numProcPerNode"]) == (nodes, 4)
    assert train["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
    job = documents(emitted, "jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (nodes, nodes, "Indexed")
    values = {one["name"]: one.get("value") for one in job["template"]["spec"]["containers"][0]["env"]}
    assert values["PET_MASTER_ADDR"] == "my-run-node-0-0.my-run", "<jobset>-<job>-<index>-<pod>.<jobset>"
    assert ("SHARDWISE_SECRET" in values) == (nodes > 1)
    [place] = [
        one for one in job["template"]["spec"]["containers"][0]["env"] if one["name"] == "PET_NODE_RANK"
    ]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert place["valueFrom"]["fieldRef"]["fieldPath"] == index
    assert yaml.safe_load(made("skypilot", nodes=nodes).files["task.yaml"])["num_nodes"] == nodes


def test_a_restart_is_asked_for_only_where_it_helps() -> None:
    """After 75 (saved) and 4 (a node is lost) all start again; after an error of the job they do not."""
    spec = documents(made("kubernetes"), "jobset.yaml")["JobSet"]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    [rule] = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", FINAL)
    errors = (ShardwiseError, JobError, DoesNotFitError, CheckpointError)
    assert sorted({error.exit_code for error in errors}) == FINAL
    assert not {MachineError.exit_code, StoppedError.exit_code} & set(FINAL)
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert job["backoffLimit"] == 0, "any other end of a pod ends the job, and the set starts again"
    task = yaml.safe_load(made("skypilot").files["task.yaml"])
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    for other in (made("kubernetes", own=False), made("skypilot", own=False)):
        assert not any("ailurePolicy" in text or "job_recovery" in text for text in other.files.values())


def test_a_saved_job_has_time_to_stop() -> None:
    pods = [
        documents(made("kubernetes"), "jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0],
        documents(made("kubernetes"), "trainjob.yaml")["TrainJob"]["spec"]["runtimePatches"][0][
            "trainingRuntimeSpec"
        ]["template"]["spec"]["replicatedJobs"][0],
    ]
    for pod in pods:
        spec = pod["template"]["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] == STOP_SECONDS
        assert {one["mountPath"] for one in spec["containers"][0]["volumeMounts"]} == {
            FILES,
            WORK,
            "/dev/shm",
        }


STUB = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n[ "$(basename "$0")" != srun ] || exit "$CODE"\n'


def run_script(script: Path, folder: Path, **environment: str) -> tuple[int, list[str]]:
    """The exit code of a script and what it calls, with stubs in the place of the programs."""
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("srun", "scontrol", "shardwise", "torchrun"):
        (tools / tool).write_text(STUB)
    (tools / "sleep").write_text("#!/bin/sh\n")
    asked = 'echo >> "$CALLS.names"; [ "$(wc -l < "$CALLS.names")" -gt 2 ]'  # known the third time
    (tools / "getent").write_text(f"#!/bin/sh\n{asked}\n")
    (tools / "squeue").write_text('#!/bin/bash\necho "$STATE"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    known = {"PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "SLURM_JOB_ID": "77"}
    done = subprocess.run(["bash", str(script)], env=known | environment, check=False, capture_output=True)
    return done.returncode, (folder / "calls").read_text().splitlines()


def written(emitted: Emitted, folder: Path) -> Path:
    folder.mkdir()
    for name, text in emitted.files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("code", "state", "again"),
    [("75", "RUNNING", True), ("75", "COMPLETING", False), ("0", "RUNNING", False), ("2", "RUNNING", False)],
)
def test_slurm_s_job_is_queued_again_only_after_it_saved(
    code: str, state: str, again: bool, tmp_path: Path
) -> None:
    """A job that was cancelled has saved, too, and must not come back."""
    engine = tmp_path / "of engine"
    written(made("slurm", folder=str(engine)), engine)
    ended, calls = run_script(engine / "launch.sbatch", tmp_path, CODE=code, STATE=state)
    together = "--kill-on-bad-exit=0 --wait=120 --cpu-bind=none"
    train = f"srun {together} shardwise train {engine}/job.yaml --resume-or-start"
    assert (ended, calls) == (int(code), [train, "scontrol requeue 77"] if again else [train])


def test_slurm_s_job_may_be_queued_again_and_keeps_its_log() -> None:
    lines = made("slurm").files["launch.sbatch"].splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert options >= {"--requeue", "--open-mode=append", f"--signal=USR1@{STOP_SECONDS}"}
    assert options >= {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4"}


@pytest.mark.parametrize(
    ("nodes", "more"), [(1, ""), (2, " --nodes 2 --node-rank 1 --rendezvous 10.0.0.5:29500")]
)
def test_skypilot_s_task_starts_this(nodes: int, more: str, tmp_path: Path) -> None:
    engine, work = tmp_path / "engine", tmp_path / "work"
    work.mkdir()
    folder = written(made("skypilot", nodes=nodes, folder=str(engine)), engine)
    run = yaml.safe_load((folder / "task.yaml").read_text())["run"]
    script = tmp_path / "run.sh"
    script.write_text(run.replace(FILES, str(engine)).replace(WORK, str(work)))
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NODE_RANK": "1"}
    variables |= {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
    ended, calls = run_script(script, tmp_path, **variables)
    assert (ended, calls) == (0, [f"shardwise train {engine}/job.yaml --resume-or-start{more}"])
    asked = tmp_path / "calls.names"
    assert (len(asked.read_text()) if asked.exists() else 0) == (3 if nodes > 1 else 0)


def test_torchrun_reads_what_the_files_set(tmp_path: Path) -> None:
    """Two nodes of a script of the user's, by torchrun's own variables, without an option in the script."""
    emitted = made("kubernetes", own=False)
    found = documents(emitted, "jobset.yaml")
    container = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    values = {one["name"]: one.get("value", "") for one in container[0]["env"]}
    (tmp_path / "launch.sh").write_text(found["ConfigMap"]["data"]["launch.sh"])
    (tmp_path / "train.py").write_text(
        "import os; open(f\"rank-{os.environ['RANK']}\", 'w').write(os.environ['WORLD_SIZE'])\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PET_NPROC_PER_NODE": "1"}
    nodes = [
        subprocess.Popen(
            ["bash", "launch.sh", "train.py"],
            cwd=tmp_path,
            env=os.environ
            | values
            | {"PET_NODE_RANK": str(rank), "PATH": f"{VENV_BIN}:{os.environ['PATH']}"},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for node in nodes:
        _, error = node.communicate(timeout=120)
        assert node.returncode == 0, error
    assert {file.name: file.read_text() for file in tmp_path.glob("rank-*")} == {"rank-0": "2", "rank-1": "2"}


def test_names_are_those_of_kubernetes() -> None:
    from shardwise.emit.cluster import _name

    found = [_name(name) for name in ("My_run.v2", "7b", "a" * 60, "x-", "On")]
    assert found == ["my-run-v2", "run-7b", "a" * 40, "x", "run-on"], "YAML reads `on` as true"


def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("deepspeed", "accelerate", "torchrun"):
        with pytest.raises(JobError, match=f"{target} starts scripts, not shardwise"):
            made(target)
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text('{"chosen": null}')
    assert main(["emit", "plan.json", "--to", "slurm", "--run", "shardwise"]) == 2
    assert "a plan does not hold the job to train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "data"), [("slurm", "{here}/jobs/qa.jsonl"), ("skypilot", "/workspace/jobs/qa.jsonl")]
)
def test_the_job_is_written_as_it_was_changed(
    target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its paths mean the same as before: on this disk, or on the one that the nodes share."""
    import types

    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/qa.jsonl").write_text("{}\n")
    Path("jobs/job.yaml").write_text(JOB)
    strategy = Strategy(engine="deepspeed", stage=2, data_parallel=4).to_json()
    memory = {"peak_reserved_bytes": 1, "outside_allocator_bytes": 1, "capacity_bytes": 9}
    prediction = {"memory": memory, "time": {"tokens_per_second_per_gpu": 5.0}}
    plan = {
        "chosen": {"strategy": strategy, "prediction": prediction},
        "hardware": {"nodes": 1, "gpus_per_node": 4},
        "job": {"name": "My_run", "trainable_parameters": 9, "lora_rank": None, "sequence_length": 64},
    }
    monkeypatch.setattr(
        "shardwise.app.emit.make_plan", lambda *_, **__: types.SimpleNamespace(to_json=lambda: plan)
    )
    arguments = ["emit", "jobs/job.yaml", "--gpus", "4xH100", "--to", target, "--run", "shardwise"]
    assert main([*arguments, "--set", "train.steps=7"]) == 0
    assert job_values(Path("engine/job.yaml").read_text()) == {
        "name": "My_run",
        "model": {"source": "org/model"},
        "data": {"train": data.format(here=tmp_path)},
        "train": {"steps": 7},
    }


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("target", ["slurm", "kubernetes", "skypilot"])
def test_the_scripts_are_bash(target: Target, own: bool, tmp_path: Path) -> None:
    emitted = made(target, own=own)
    scripts = {name: text for name, text in emitted.files.items() if text.startswith("#!")}
    if target == "kubernetes":
        data = documents(emitted, "jobset.yaml")["ConfigMap"]["data"]
        scripts = {name: text for name, text in data.items() if text.startswith("#!")}
    assert scripts
    for text in scripts.values():
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
