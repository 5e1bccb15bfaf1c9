"""A job on two machines is the job on one: losses, stopping, resuming, on a shared disk and on local ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, losses, send, start, trained, wait_for, write_job

from shardwise.job.load import load_job
from shardwise.launch.spec import LaunchSpec
from shardwise.record.manifest import verify

pytestmark = pytest.mark.machines

HSDP = {"engine": "fsdp2", "shard_group": 2}
HPZ = {"engine": "deepspeed", "stage": 3, "shard_group": 2}
PIPELINE = {"engine": "pipeline", "pipeline": 2}
STRATEGIES = ["zero2", "zero3", "fsdp2", HSDP, HPZ, {"engine": "ddp"}, PIPELINE]
STRATEGIES += [{**PIPELINE, "tensor_parallel": 2}]
"""Add a line: every strategy of four processes may stand here."""


def named(strategy: Any) -> str:
    return strategy if isinstance(strategy, str) else "-".join(map(str, strategy.values()))


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of ZeRO-2 on four processes of one machine."""
    folder = tmp_path_factory.mktemp("one")
    write_job(folder, "zero2")
    (node,) = start(None, [folder], "job.yaml", processes=4).wait()
    assert node.code == 0, node.errors
    return losses(folder / "runs/job")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=named)
def test_two_nodes_of_two_are_one_node_of_four(
    fleet: Fleet, on_one_machine: list[float], tmp_path: Path, strategy: object
) -> None:
    write_job(tmp_path, strategy, output=str(tmp_path / "runs"))
    folders = [tmp_path / "a", tmp_path / "b"]
    first, second = start(fleet, folders, "../job.yaml").wait()
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert losses(tmp_path / "runs/job") == pytest.approx(on_one_machine, rel=1e-6)
    assert "step 6/6" in first.output + first.errors
    assert second.output == ""
    assert second.errors.strip() == "this is node 1 (desk-b); the run is shown on node 0 (desk-a)"


@pytest.mark.parametrize("disks", ["shared", "local"])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp2", HSDP], ids=named)
def test_a_signal_on_one_node_saves_on_all_and_resuming_is_exact(
    fleet: Fleet, tmp_path: Path, strategy: object, disks: str
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_job(folder, strategy, output=str(tmp_path / "runs") if disks == "shared" else "runs", steps=300)
    run_dir = (tmp_path if disks == "shared" else folders[0]) / "runs/job"
    cluster = start(fleet, folders, "job.yaml")
    wait_for(lambda: trained(run_dir, 3), "the third step")
    send(cluster.nodes[1].launcher, signal.SIGTERM)
    first, second = cluster.wait()
    assert (first.code, second.code) == (75, 75), first.errors + second.errors
    assert "the state is saved" in first.errors
    assert "node 0 (desk-a) shows the full error" in second.errors
    before = losses(run_dir)
    stopped = len(before)
    if disks == "local":
        own = sorted({path.name for path in (folders[1] / "runs/job/checkpoints").rglob("rng-*")})
        assert own == ["rng-rank2.json", "rng-rank3.json"]
        assert not (folders[1] / "runs/job/events.jsonl").exists()
    last = str(stopped + 4)
    first, second = start(
        fleet, folders, "runs/job" if disks == "local" else str(run_dir), "--resume", "--max-steps", last
    ).wait()
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    whole = tmp_path / "whole"
    write_job(whole, strategy, output="runs", steps=300)
    (node,) = start(None, [whole], "job.yaml", "--max-steps", last, processes=4).wait()
    assert node.code == 0, node.errors
    assert losses(run_dir) == pytest.approx(losses(whole / "runs/job"), rel=1e-6)
    assert losses(run_dir)[:stopped] == before
    if disks == "local":  # brought together, the parts are a checkpoint of a shared disk
        parts = [folder / "runs/job/checkpoints" / f"step-{int(last):06d}" for folder in folders]
        shutil.copytree(parts[1], parts[0], dirs_exist_ok=True)
        assert verify(parts[0]) == []


def test_a_node_that_lost_its_disk_is_named(fleet: Fleet, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_job(folder, "zero2", steps=3, save_every=1, keep=2)
    for node in start(fleet, folders, "job.yaml").wait():
        assert node.code == 0, node.errors
    damaged = next((folders[1] / "runs/job/checkpoints/step-000003").rglob("rng-rank2.json"))
    damaged.write_text("x")
    first, second = start(fleet, folders, "runs/job", "--resume").wait()
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert "step-000003: on node 1: rng-rank2.json has 1 bytes instead of" in first.errors
    shutil.rmtree(folders[1] / "runs/job/checkpoints")
    first, second = start(fleet, folders, "runs/job", "--resume").wait()
    assert (first.code, second.code) == (5, 5)
    assert "node 1 (desk-b) lacks its part of the checkpoint of step 3; it has none" in first.errors


def test_the_worker_starts_under_torchrun_as_it_is(
    fleet: Fleet, on_one_machine: list[float], tmp_path: Path
) -> None:
    job = load_job(write_job(tmp_path, "fsdp2", output=str(tmp_path / "runs"))).job.model_dump(mode="json")
    spec = LaunchSpec(job=job, run_dir=str(tmp_path / "runs/job"), processes=1)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_json()))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu"}
    commands = []
    for rank, machine in enumerate(fleet.machines[:2]):
        meeting = ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", "10.77.0.1"]
        words = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc_per_node", "1"]
        words += ["-m", "shardwise.training.worker", str(tmp_path / "spec.json")]
        with (tmp_path / f"log-{rank}").open("w") as log:
            commands.append(
                subprocess.Popen(
                    machine.command(*words), env=environment, stdout=log, stderr=log, cwd=tmp_path
                )
            )
    try:
        assert [command.wait(150) for command in commands] == [0, 0], (tmp_path / "log-0").read_text()
    finally:
        for command in commands:
            command.kill()
    assert losses(tmp_path / "runs/job") == pytest.approx(on_one_machine, rel=1e-6)
