"""`shardwise power`: limits and leases in a terminal of 80 columns, as JSON, and put back."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from power_machine import PREVIOUS, UUIDS, Machine
from shardwise.cli import main
from shardwise.device.find import REPLAY
from shardwise.diagnosis.gpus import power_leases
from shardwise.power.lease import FOLDER, Lease, take


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path)
    monkeypatch.setenv(REPLAY, f"fake:{found.file}")
    monkeypatch.setenv(FOLDER, str(found.leases))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def leased(machine: Machine, *, stale: bool) -> Lease:
    """300 W on the first card."""
    lease, _ = take(machine.device, UUIDS[:1], run="runs/x")
    lease = lease.with_levels({UUIDS[0]: 300.0})
    machine.nvml.change(UUIDS[0], power_limit_watts=300.0)
    if stale:
        lease = replace(lease, owner=replace(lease.owner, start_ticks=1))
        lease.save()
    return lease


def test_a_table_of_80_columns(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    leased(machine, stale=True)
    assert main(["power"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].split() == ["GPU", "limit", "range", "default", "draw", "control"]
    assert lines[1].split() == ["0", "H200", "300", "200-700", "700", "75", "stale", str(os.getpid())]
    assert lines[2].split() == ["1", "H200", "350", "100-450", "400", "75", "-"]
    assert "  GPU-fake-0: 650 W before; set: 300" in lines
    assert "  fix: shardwise power restore" in lines
    assert max(len(line) for line in lines if "file:" not in line) <= 80


def test_json_has_the_units_in_its_keys(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    lease = leased(machine, stale=False)
    machine.nvml.change(UUIDS[1], power_min_watts=None)
    assert main(["power", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"][0] == {
        "index": 0, "uuid": UUIDS[0], "name": "NVIDIA H200", "divided": False, "power_limit_watts": 300.0,
        "power_default_watts": 700.0, "power_min_watts": 200.0, "power_max_watts": 700.0, "power_watts": 75.0,
    }  # fmt: skip
    assert found["gpus"][1]["power_min_watts"] is None
    (row,) = found["leases"]
    assert (row["state"], row["file"], row["owner"]["pid"]) == ("alive", str(lease.file), os.getpid())
    assert row["cards"] == {UUIDS[0]: {"previous_watts": 650.0, "levels_watts": [300.0]}}


def test_restore_puts_stale_leases_back(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    leased(machine, stale=True)
    assert main(["power", "restore", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["leases"]
    assert (row["state"], row["lines"]) == ("settled", ["GPU-fake-0: put back from 300 to 650 W"])
    assert machine.limits() == PREVIOUS
    assert main(["power", "restore"]) == 0
    assert capsys.readouterr().out == "no lease: nothing to put back\n"


def test_restore_leaves_live_runs_alone_without_force(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    leased(machine, stale=False)
    assert main(["power", "restore"]) == 0
    assert f"its process {os.getpid()} is alive, so it is left alone" in capsys.readouterr().out
    assert machine.limits()[UUIDS[0]] == 300.0
    assert main(["power", "restore", "--force"]) == 0
    assert machine.limits() == PREVIOUS
    assert machine.files() == []
    assert main(["power", "--force"]) == 2


def test_what_cannot_be_put_back_ends_with_4(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    lease = leased(machine, stale=True)
    machine.nvml.change(UUIDS[0], lost=True)
    assert main(["power", "restore"]) == 4
    assert "no GPU: " in capsys.readouterr().err, "the driver fails where a GPU is lost"
    with machine.nvml.changing() as state:
        state["gpus"][0]["lost"], state["root"] = False, False
    assert main(["power", "restore"]) == 4
    assert "not put back from 300 to 650 W: NVML: Insufficient Permissions" in capsys.readouterr().out
    assert machine.files() == [lease.file]


def test_try_says_whether_a_run_may(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "try"]) == 0
    assert capsys.readouterr().out == "this process may set the power limits\n"
    with machine.nvml.changing() as state:
        state["root"] = False
    assert main(["power", "try"]) == 4
    assert "--cap-add SYS_ADMIN" in capsys.readouterr().out
    assert main(["power", "try", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["status"] == "no permission"
    assert machine.limits() == PREVIOUS


def test_without_gpus_the_reason_is_shown(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leased(machine, stale=True)
    (machine.leases / "bad.json").write_text("{")
    monkeypatch.setenv(REPLAY, "none")
    assert main(["power"]) == 4
    out = capsys.readouterr().out
    assert "no GPU: SHARDWISE_DEVICE=none hides all GPUs" in out
    assert "bad.json is no lease" in out
    assert main(["power", "restore"]) == 4
    assert "no GPU: " in capsys.readouterr().err
    assert len(machine.files()) == 2


def test_the_doctor_finds_stale_leases(machine: Machine) -> None:
    assert (power_leases().status, power_leases().finding) == ("ok", "none is left over")
    lease = leased(machine, stale=False)
    assert power_leases().status == "ok"
    assert "1 in use" in power_leases().finding
    replace(lease, owner=replace(lease.owner, start_ticks=1)).save()
    check = power_leases()
    assert (check.status, check.fix) == ("warning", "shardwise power restore")
    assert "1 GPU may have a power limit of a run that has ended" in check.finding
    lease.file.write_text("{")
    assert "is no lease" in power_leases().finding
    machine.leases.rename(machine.leases.with_name("old"))
    machine.leases.symlink_to(machine.leases.with_name("old"))
    assert "power leases cannot be kept" in power_leases().finding
