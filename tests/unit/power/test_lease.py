"""Leases: what they hold, when they count as alive, and what settling them does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from power_machine import PREVIOUS, SET, UUIDS, Machine
from shardwise.device import Unavailable
from shardwise.errors import MachineError, PowerBusyError, render
from shardwise.power.lease import (
    CardLease,
    Lease,
    lease_folder,
    leases,
    locked,
    process,
    read_lease,
    settle,
    take,
)


def stale(machine: Machine, *levels_watts: float, **changes: object) -> Lease:
    """A lease of this process that ended long ago, whose cards have its last level."""
    machine.leases.mkdir(exist_ok=True)
    owner = process(os.getpid())
    assert owner is not None
    cards = {
        uuid: CardLease(previous_watts=watts, levels_watts=levels_watts) for uuid, watts in PREVIOUS.items()
    }
    lease = Lease(
        file=machine.leases / "old.json", run="runs/old", since=1.0, owner=replace(owner, start_ticks=1),
        cards=cards,
    )  # fmt: skip
    lease = replace(lease, **changes)  # type: ignore[arg-type]
    lease.save()
    for uuid in UUIDS:
        machine.nvml.change(uuid, power_limit_watts=levels_watts[-1])
    return lease


def test_a_lease_is_read_as_it_was_written(machine: Machine) -> None:
    lease, notes = take(machine.device, UUIDS, run="runs/x")
    assert notes == []
    lease = lease.with_levels({UUIDS[0]: 300.0}).with_levels({UUIDS[0]: 250.0, UUIDS[1]: 250.0})
    lease = lease.with_levels({UUIDS[0]: 300.4})  # the driver's rounding is no new level
    assert read_lease(lease.file) == lease
    assert lease.cards == {
        UUIDS[0]: CardLease(previous_watts=650.0, levels_watts=(300.0, 250.0)),
        UUIDS[1]: CardLease(previous_watts=350.0, levels_watts=(250.0,)),
    }
    assert lease.state == "alive"
    assert lease.owner.pid == os.getpid()


def test_a_process_is_not_mistaken_for_another() -> None:
    me = process(os.getpid())
    assert me is not None
    assert me.alive() is True
    assert replace(me, start_ticks=me.start_ticks - 1).alive() is False
    assert replace(me, boot="another").alive() is False
    assert replace(me, namespace="pid:[1]").alive() is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    ended = process(child.pid)
    time.sleep(0.5)
    assert ended is None or ended.alive() is False, "it waits to be reaped"
    child.wait()
    assert process(child.pid) is None


@pytest.mark.parametrize("boot", ["", "11111111-of-another-boot"])
def test_the_next_start_settles_a_stale_lease(machine: Machine, boot: str) -> None:
    """Also after a power failure, which another boot id shows."""
    lease = stale(machine, 300.0, 250.0)
    if boot:
        replace(lease, owner=replace(lease.owner, start_ticks=lease.owner.start_ticks, boot=boot)).save()
    taken, notes = take(machine.device, UUIDS, run="runs/x")
    assert machine.limits() == PREVIOUS
    assert machine.files() == [taken.file]
    assert notes == [f"{uuid}: put back from 250 to {watts:.0f} W" for uuid, watts in PREVIOUS.items()]
    assert {uuid: card.previous_watts for uuid, card in taken.cards.items()} == PREVIOUS


def test_a_limit_that_somebody_else_has_set_stays(machine: Machine) -> None:
    lease = stale(machine, 300.0)
    machine.nvml.change(UUIDS[0], power_limit_watts=410.0)
    settled = settle(lease, machine.device)
    assert machine.limits() == {UUIDS[0]: 410.0, UUIDS[1]: 350.0}
    assert settled.left is None
    assert f"{UUIDS[0]}: 410 W was set by somebody else since: left as it is" in settled.lines
    assert machine.files() == []


def test_a_card_that_fails_keeps_its_part_of_the_lease(machine: Machine) -> None:
    lease = stale(machine, 300.0)
    machine.nvml.change(UUIDS[1], lost=True)
    settled = settle(lease, machine.device)
    assert settled.left is not None
    assert set(settled.left.cards) == {UUIDS[1]}
    assert "not put back: NVML: GPU is lost" in settled.lines[-1]
    assert read_lease(lease.file) == settled.left
    with pytest.raises(MachineError, match="cannot be put back"):
        take(machine.device, UUIDS, run="runs/x")
    taken, _ = take(machine.device, UUIDS[:1], run="runs/x")  # another card may be used
    taken.file.unlink()
    with machine.nvml.changing() as state:
        state["gpus"][1]["lost"] = False
    assert settle(settled.left, machine.device).left is None
    assert machine.limits() == PREVIOUS
    assert machine.files() == []


def test_a_second_owner_is_refused_and_names_the_first(machine: Machine) -> None:
    first, _ = take(machine.device, UUIDS[:1], run="runs/first")
    with pytest.raises(PowerBusyError) as caught:
        take(machine.device, UUIDS, run="runs/second")
    assert "runs/first" in render(caught.value)
    assert str(os.getpid()) in render(caught.value)
    other, _ = take(machine.device, UUIDS[1:], run="runs/second")
    assert machine.files() == sorted([first.file, other.file])


def test_an_owner_in_another_container_counts_as_alive(machine: Machine) -> None:
    lease = stale(machine, 300.0)
    replace(lease, owner=replace(lease.owner, namespace="pid:[1]")).save()
    with pytest.raises(PowerBusyError):
        take(machine.device, UUIDS, run="runs/x")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"run": 1, "since": "x", "owner": {}, "guardian": null}']
)
def test_a_damaged_file_is_named_and_kept(machine: Machine, text: str) -> None:
    machine.leases.mkdir()
    bad = machine.leases / "bad.json"
    bad.write_text(text)
    assert isinstance(read_lease(bad), Unavailable)
    _, notes = take(machine.device, UUIDS, run="runs/x")
    assert len(notes) == 1
    assert str(bad) in notes[0]
    assert bad.read_text() == text


def test_a_folder_that_others_could_have_made_is_not_used(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    machine.leases.symlink_to(tmp_path / "real")
    for use in (leases, lambda: take(machine.device, UUIDS, run="runs/x")):
        with pytest.raises(MachineError, match="power leases cannot be kept"):
            use()


def test_the_folder_is_the_machines_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_LEASES", raising=False)
    assert str(lease_folder()) in ("/run/lock/shardwise", "/var/tmp/shardwise-leases")
    monkeypatch.setenv("SHARDWISE_LEASES", "here")
    assert lease_folder() == Path.cwd() / "here"


def test_only_one_process_holds_the_lock(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.power.lease.LOCK_SECONDS", 0.05)
    with locked(), pytest.raises(MachineError, match="another process has locked it"), locked():
        pass
    with locked():
        pass


def test_a_lease_that_cannot_be_written_changes_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="No space left"):
        take(machine.device, UUIDS, run="runs/x")
    assert machine.calls() == []


def test_a_lease_is_on_the_disk_before_the_change(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, _ = take(machine.device, UUIDS, run="runs/x")
    synced, real = list[Path](), os.fsync

    def sync(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    lease.with_levels({UUIDS[0]: 300.0})
    assert [path.name for path in synced] == [lease.file.with_suffix(".tmp").name, machine.leases.name]
    assert json.loads(lease.file.read_text())["cards"][UUIDS[0]]["levels_watts"] == [300.0]


def test_no_permission_to_put_back_keeps_the_lease(machine: Machine) -> None:
    lease = stale(machine, 300.0)
    machine.fail(SET, **{"from": 1, "error": 4})
    settled = settle(lease, machine.device)
    assert settled.left == lease
    assert machine.files() == [lease.file]
