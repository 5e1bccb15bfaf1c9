"""A node that dies, is cut off or stands still: the others end soon, with one block that names it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fleet import Cluster, Fleet, Node, alive, send, start, trained, wait_for, write_job

from shardwise.data import cache

pytestmark = pytest.mark.machines

SOON = 60.0  # seconds from the loss to the end of the last process
LOST = "error: node {node} ({name}) was lost: "
SILENT = "nothing was heard of it for 20 s"


@pytest.fixture
def running(fleet: Fleet, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Two nodes of one process that have trained three steps of a long run; nothing is left afterwards."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_job(folder, "fsdp2", steps=100_000)
    cluster = start(fleet, folders, "job.yaml", processes=1)
    wait_for(lambda: trained(folders[0] / "runs/job", 3), "the third step")
    pids = [pid for node in cluster.nodes for pid in (node.launcher, *node.workers())]
    assert len(pids) == 4
    yield cluster
    fleet.up()
    for pid in pids:
        if alive(pid):
            send(pid, signal.SIGKILL)
    cluster.wait()


def pids_of(node: Node) -> list[int]:
    return [node.launcher, *node.workers()]


def none_left(pids: list[int], since: float) -> None:
    wait_for(lambda: not any(map(alive, pids)), "the end of all processes", SOON - (time.monotonic() - since))


def test_it_listens_on_the_network_of_the_rendezvous_alone(running: Cluster) -> None:
    for node, addresses in zip(running.nodes, ({"10.77.0.1"}, {"10.77.0.2"}), strict=True):
        assert node.machine is not None
        words = ["ip", "netns", "exec", node.machine.namespace, "ss", "-tlnH"]
        lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
        assert {line.split()[3].rpartition(":")[0] for line in lines} == addresses


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_killed(running: Cluster, victim: int) -> None:
    other = running.nodes[1 - victim]
    pids = [pid for node in running.nodes for pid in pids_of(node)]
    since = time.monotonic()
    send(running.nodes[victim].launcher, signal.SIGKILL)
    none_left(pids, since)
    running.wait()
    assert running.nodes[victim].code == -signal.SIGKILL
    assert other.code == 4
    expected = LOST.format(node=victim, name="desk-a" if victim == 0 else "desk-b")
    assert other.errors.count("error: ") == 1
    assert f"{expected}its launcher was killed or ended" in other.errors


def test_a_worker_killed_is_named_with_its_node(running: Cluster) -> None:
    first, second = running.nodes
    pids = [pid for node in running.nodes for pid in pids_of(node)]
    since = time.monotonic()
    send(second.workers()[0], signal.SIGKILL)
    none_left(pids, since)
    running.wait()
    assert (first.code, second.code) == (4, 4)
    assert "error: rank 1 was killed" in first.errors
    assert "at:  node 1 (desk-b), rank 1, process" in first.errors
    assert first.errors.count("error: ") == 1
    assert "ended: rank 1 was killed" in second.errors
    assert "node 0 (desk-a) shows the full error" in second.errors


def test_a_link_taken_down(running: Cluster) -> None:
    first, second = running.nodes
    assert second.machine is not None
    pids = [pid for node in running.nodes for pid in pids_of(node)]
    since = time.monotonic()
    second.machine.link("down")
    none_left(pids, since)
    running.wait()
    assert (first.code, second.code) == (4, 4)
    assert f"error: node 1 (desk-b) was lost: {SILENT}" in first.errors
    assert f"error: node 0 (desk-a) was lost: {SILENT}" in second.errors


def test_a_launcher_that_stands_still(running: Cluster) -> None:
    first, second = running.nodes
    workers, theirs = second.workers(), pids_of(first)
    since = time.monotonic()
    send(second.launcher, signal.SIGSTOP)
    none_left([*theirs, *workers], since)
    assert f"error: node 1 (desk-b) was lost: {SILENT}" in first.errors
    send(second.launcher, signal.SIGCONT)
    running.wait(20.0)
    assert (first.code, second.code) == (4, 4)
    assert "error: this is node 1 (desk-b), which did not run for" in second.errors


def test_a_worker_that_stands_still(running: Cluster) -> None:
    first, second = running.nodes
    pids = [pid for node in running.nodes for pid in pids_of(node)]
    since = time.monotonic()
    send(second.workers()[0], signal.SIGSTOP)
    none_left(pids, since)
    running.wait()
    assert (first.code, second.code) == (4, 4)
    assert "rank 1 is stopped (SIGSTOP)" in first.errors
    assert "at:  node 1 (desk-b), process" in first.errors


def test_an_error_on_another_node_is_shown_once_on_node_0(fleet: Fleet, tmp_path: Path) -> None:
    """Node 1's tokenised data is another than node 0's, which only its workers can see."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_job(folder, "fsdp2")
    for node in start(fleet, folders, "job.yaml", "--max-steps", "1", processes=1).wait():
        assert node.code == 0, node.errors
    (tokens,) = (folders[1] / "cache").rglob("tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[::-1])  # the same tokens in another order, with hashes that fit
    note = json.loads(tokens.with_name("meta.json").read_text())["note"]
    cache._seal(tokens.parent, note)
    for folder in folders:
        write_job(folder, "fsdp2", name="again")
    first, second = start(fleet, folders, "job.yaml", processes=1).wait()
    assert (first.code, second.code) == (2, 2), first.errors + second.errors
    assert "error: rank 1 has another tokens than rank 0" in first.errors
    assert second.errors.splitlines()[-1].startswith("ended: rank 1 has another tokens than rank 0")
