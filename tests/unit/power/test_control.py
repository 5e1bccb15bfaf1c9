"""Control by a run: permission, each limit set once, and what happens where something fails in the middle."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from power_machine import PREVIOUS, SET, UUIDS, Machine
from shardwise.device import NoPermission, Unavailable
from shardwise.errors import MachineError, PowerBusyError
from shardwise.power import guardian
from shardwise.power.control import Permission, PowerControl, PowerRange, permission
from shardwise.power.guardian import Guardian
from shardwise.power.lease import Lease, process, read_lease

NO_PERMISSION, UNKNOWN = 4, 999


def control(machine: Machine, folder: Path) -> PowerControl:
    return PowerControl(machine.device, UUIDS, run=folder)


def test_permission_is_asked_without_a_change(machine: Machine) -> None:
    found = permission(machine.device, UUIDS)
    assert found.allowed
    assert found.ranges[UUIDS[1]] == PowerRange(least_watts=100.0, most_watts=450.0, present_watts=350.0)
    calls = machine.nvml.state()["calls"]
    assert [(call["before"], call["value"]) for call in calls] == [(650.0, 650.0), (350.0, 350.0)]
    assert not machine.leases.exists()


def test_without_permission_the_ways_to_it_are_named(machine: Machine) -> None:
    with machine.nvml.changing() as state:
        state["root"] = False
    found = permission(machine.device, UUIDS)
    assert found.status == "no permission"
    block = found.block()
    assert block.startswith("power limits are measured, not set: this process may not set power limits")
    for way in ("root", "--cap-add SYS_ADMIN", "--gpu-power", "nvidia-smi -pm 1"):
        assert way in block
    assert max(map(len, block.splitlines())) <= 110


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"power_min_watts": None}, "no range"), ({"lost": True}, "no range"), ({"mig": 1}, "divided")],
)
def test_other_reasons_are_not_called_permission(
    machine: Machine, fields: dict[str, object], status: str
) -> None:
    for uuid in UUIDS:
        machine.nvml.change(uuid, **fields)
    device = Machine.open(machine.file) if status == "divided" else machine.device
    found = permission(device, UUIDS)
    assert (found.status, found.allowed) == (status, False)
    assert UUIDS[0] in found.reason
    assert machine.nvml.state()["calls"] == []


def test_a_driver_that_fails_is_unavailable(machine: Machine) -> None:
    machine.fail(SET, **{"from": 2, "error": UNKNOWN})
    found = permission(machine.device, UUIDS)
    assert (found.status, found.reason) == ("unavailable", f"{UUIDS[1]}: NVML: Unknown Error")


def test_cards_of_another_run_are_busy_and_not_touched(machine: Machine, tmp_path: Path) -> None:
    with control(machine, tmp_path):
        before = machine.nvml.state()["calls"]
        assert permission(machine.device, UUIDS).status == "busy"
        with pytest.raises(PowerBusyError), control(machine, tmp_path):
            pass
        assert machine.nvml.state()["calls"] == before


def test_each_card_is_set_once_a_level_and_never_above_its_present_limit(
    machine: Machine, tmp_path: Path
) -> None:
    """The cards could have 700 and 450 W, and have 650 and 350 W."""
    with control(machine, tmp_path) as power:
        assert power.set(700.0) == {UUIDS[0]: 650.0, UUIDS[1]: 350.0}
        assert power.set(500.0) == {UUIDS[0]: 500.0, UUIDS[1]: 350.0}
        assert power.set(500.0) == {UUIDS[0]: 500.0, UUIDS[1]: 350.0}
        assert power.set(150.0) == {UUIDS[0]: 200.0, UUIDS[1]: 150.0}
    expected = [(0, 500.0), (0, 200.0), (1, 150.0), (0, 650.0), (1, 350.0)]
    calls = [(call["uuid"], call["value"]) for call in machine.nvml.state()["calls"]]
    assert calls == [(UUIDS[card], watts) for card, watts in expected]
    assert machine.limits() == PREVIOUS
    assert machine.files() == []


def test_an_error_in_the_run_puts_everything_back(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), control(machine, tmp_path) as power:
        1 / (len(power.set(300.0)) - 2)  # type: ignore[arg-type]
    assert machine.limits() == PREVIOUS
    assert machine.files() == []


@pytest.mark.parametrize("error", [NO_PERMISSION, UNKNOWN])
def test_a_refusal_at_any_call_leaves_nothing_changed(machine: Machine, tmp_path: Path, error: int) -> None:
    """Levels 325, 300, 250 on two cards are six calls; the seventh and eighth put back."""
    for number in range(1, 7):
        machine.fail(SET, **{"from": number, "until": number, "error": error})
        with control(machine, tmp_path) as power:
            answers = [power.set(watts) for watts in (325.0, 300.0, 250.0)]
            refused = (number - 1) // 2
            assert [isinstance(answer, Unavailable) for answer in answers] == [
                index >= refused for index in range(3)
            ], number
            assert power.refused is not None
            assert f"{UUIDS[(number - 1) % 2]} cannot be set" in power.refused.reason
            assert machine.limits() == PREVIOUS, "before the run ends"
        assert machine.limits() == PREVIOUS
        assert machine.files() == []


def test_a_limit_that_somebody_else_changes_ends_control(machine: Machine, tmp_path: Path) -> None:
    with control(machine, tmp_path) as power:
        power.set(300.0)
        machine.nvml.change(UUIDS[0], power_limit_watts=333.0)
        answer = power.set(250.0)
        assert isinstance(answer, Unavailable)
        assert "somebody else has set GPU-fake-0 to 333 W" in answer.reason
        assert power.set(250.0) is answer
    assert machine.limits() == {UUIDS[0]: 333.0, UUIDS[1]: 350.0}
    assert machine.files() == []


def test_control_taken_by_force_is_not_taken_back(machine: Machine, tmp_path: Path) -> None:
    with control(machine, tmp_path) as power:
        power.set(300.0)
        machine.files()[0].unlink()
        machine.nvml.change(UUIDS[0], power_limit_watts=300.0)
        assert isinstance(power.set(250.0), Unavailable)
    assert machine.limits() == {UUIDS[0]: 300.0, UUIDS[1]: 300.0}
    assert machine.files() == []


def test_a_driver_that_sets_another_limit_ends_control(machine: Machine, tmp_path: Path) -> None:
    real = machine.device.limit_power
    machine.device.limit_power = lambda uuid, watts: real(  # type: ignore[method-assign]
        uuid, 280.0 if watts == 300.0 else watts
    )
    with control(machine, tmp_path) as power:
        answer = power.set(300.0)
        assert isinstance(answer, Unavailable)
        assert "was set to 300 W, but has 280 W" in answer.reason
    assert machine.limits() == PREVIOUS


def test_a_guardian_that_died_is_replaced_before_the_next_change(machine: Machine, tmp_path: Path) -> None:
    with control(machine, tmp_path) as power:
        power.set(300.0)
        first = lease_of(machine).guardian
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: first.alive() is False)
        power.set(300.0)
        assert lease_of(machine).guardian == first, "no change, no guardian"
        power.set(250.0)
        second = lease_of(machine).guardian
        assert second is not None
        assert second != first
        assert second.alive()
    assert second.alive() is False


def test_the_guardian_outlives_signals_and_says_what_it_did(machine: Machine, tmp_path: Path) -> None:
    owner = os.fork()
    if not owner:
        with control(machine, tmp_path) as power:
            power.set(300.0)
            guard = lease_of(machine).guardian
            assert guard is not None
            assert os.getsid(guard.pid) == guard.pid != os.getsid(0)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(guard.pid, number)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(owner, 0)
    wait_for((tmp_path / guardian.LOG).exists)
    assert machine.limits() == PREVIOUS
    assert machine.files() == []
    lines = (tmp_path / guardian.LOG).read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        f"{uuid}: put back from 300 to {watts:.0f} W" for uuid, watts in PREVIOUS.items()
    ]


def test_a_guardian_tries_again_where_a_card_fails(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = ended(machine, tmp_path)
    monkeypatch.setattr(guardian, "RETRY_SECONDS", 0.01)
    machine.fail(SET, **{"from": 1, "until": 3, "error": UNKNOWN})
    assert in_child(lambda: guardian.main(lease.file)) == 0
    assert machine.limits() == PREVIOUS
    lease = ended(machine, tmp_path)
    machine.fail(SET, **{"from": 1, "error": UNKNOWN})
    assert in_child(lambda: guardian.main(lease.file)) == 1
    assert read_lease(lease.file) == lease


def test_a_guardian_that_does_not_start_refuses_control(machine: Machine, tmp_path: Path) -> None:
    machine.fail("nvmlInit", **{"from": 1, "error": UNKNOWN})
    with pytest.raises(MachineError, match="does not start: NVML: Unknown Error"), control(machine, tmp_path):
        pass
    assert machine.calls() == []
    assert machine.files() == []


def test_a_guardian_is_ready_soon(machine: Machine, tmp_path: Path) -> None:
    """It imports neither torch nor rich nor pydantic: 0.14 s on two idle cores."""
    with control(machine, tmp_path):
        found = lease_of(machine).guardian
        assert found is not None
        maps = Path(f"/proc/{found.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "pydantic" not in maps
        seconds = sum(map(int, Path(f"/proc/{found.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        assert seconds / os.sysconf("SC_CLK_TCK") < 0.5, "of CPU time"


def test_recorded_gpus_refuse_control() -> None:
    from shardwise.device import NoDevice, Replay

    recorded = Replay({"gpus": [{"uuid": "GPU-1", "name": "x"}]})
    assert recorded.limit_power("GPU-1", 300.0) == Unavailable(reason="it is recorded, so nothing can be set")
    assert NoDevice("no driver").limit_power("GPU-1", 300.0) == Unavailable(reason="no driver")
    assert isinstance(NoPermission(reason=""), Unavailable)
    assert permission(recorded, ["GPU-1"]).status == "no range"
    assert Permission(status="allowed").allowed


def ended(machine: Machine, folder: Path) -> Lease:
    """The lease of an owner that is gone, without its guardian."""
    machine.fail(SET)
    with control(machine, folder) as power:
        power.set(300.0)
        lease = lease_of(machine)
    owner = process(1)
    assert owner is not None
    from dataclasses import replace

    lease = replace(lease, owner=replace(owner, pid=2**22 + 1), guardian=None)
    lease.save()
    for uuid in UUIDS:
        machine.nvml.change(uuid, power_limit_watts=300.0)
    return lease


def in_child(main: object) -> int:
    """What `main` returns in a fork: it ignores signals and changes its folder."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main())  # type: ignore[operator]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lease_of(machine: Machine) -> Lease:
    (file,) = machine.files()
    found = read_lease(file)
    assert isinstance(found, Lease)
    return found


def wait_for(done: object, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def test_a_started_guardian_is_a_child_that_can_be_ended(machine: Machine, tmp_path: Path) -> None:
    with control(machine, tmp_path):
        other = Guardian(lease_of(machine))
        assert other.alive
        other.end()
        assert not other.alive
