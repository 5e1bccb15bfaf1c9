"""The whole look at a machine of four GPUs, with probes that answer at once or fail."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.diagnosis.doctor import Report, examine, show
from shardwise.hardware.calibration import load
from shardwise.hardware.detect import detect_hardware

Look = Callable[..., Report]


@pytest.fixture
def look(
    driver: Callable[..., None], probes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Report]:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    driver(energy_joules=None, power_watts=None)

    def examined(fake: str = "", *, calibrate: bool = False, limit_seconds: float = 30.0) -> Report:
        monkeypatch.setenv("FAKE", fake)
        return examine(
            runs=tmp_path, cache=tmp_path, calibrate=calibrate, module=probes, limit_seconds=limit_seconds
        )

    return examined


def printed(report: Report, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width)
    show(report, console=console)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_a_machine_that_is_ready(look: Look) -> None:
    report = look()
    found = {check.name: check for check in report.checks}
    assert report.ready
    assert found["all-reduce"].facts["ranks"] == 4
    assert found["torch and driver"].status == "ok"
    assert found["calibration"].status == "skipped"
    lines = printed(report).splitlines()
    assert lines[0] == "4 × H200 SXM, 140.4 GiB each · nvlink4 · driver 580.95.05"
    assert lines[-1].startswith("▶ ready: training can run on 4 GPUs")


def test_what_is_wrong_comes_first_with_its_fix(look: Look) -> None:
    report = look("mamba:crash,liger:complain")
    assert not report.ready
    names = {check.name: check.status for check in report.checks}
    assert names["kernel: Mamba"] == names["kernels: Liger"] == "problem"
    assert names["kernel: attention"] == "ok"  # another process's, and the same one's before it fell
    assert names["energy"] == "warning"
    for width in (80, 120):
        lines = printed(report, width).splitlines()
        signs = [line[2] for line in lines if line[:2] == "  " and line[2:3] in "✗!✓·"]
        assert signs == sorted(signs, key="✗!✓·".index)
        assert signs.count("✗") == 2
        assert max(map(len, lines)) <= width
        assert lines[-1].startswith("✗ not ready")
    text = printed(report)
    assert "crashed with SIGSEGV: a library's last words" in " ".join(text.split())
    assert text.count("fix: ") >= 3


def test_a_rank_that_hangs_is_named_and_the_others_do_not_wait_for_ever(look: Look) -> None:
    report = look("collective@2:hang", limit_seconds=6.0)
    check = next(check for check in report.checks if check.name == "all-reduce")
    assert check.status == "problem"
    assert check.finding.startswith("rank 2 hung for 6 s while waiting for the others")
    assert report.seconds < 30


def test_ranks_do_not_wait_for_one_that_crashed(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.diagnosis.child.GRACE_SECONDS", 2.0)
    report = look("collective@0:hang,collective@1:crash", limit_seconds=60.0)
    check = next(check for check in report.checks if check.name == "all-reduce")
    assert check.finding.startswith("rank 1 crashed with SIGSEGV")
    assert "rank 0 hung for 2 s" in check.finding
    assert report.seconds < 30


def test_a_calibration_reaches_the_planner(look: Look) -> None:
    report = look(calibrate=True)
    kept = load("H200 SXM", 4, "580.95.05")
    assert report.calibration == kept is not None
    assert kept.between is not None
    assert kept.host is not None
    # the slowest rank's times are 1.1 of 300 GB/s and of 50 GB/s
    assert kept.between.bytes_per_second == pytest.approx(300e9 / 1.1)
    assert kept.host.bytes_per_second == pytest.approx(50e9 / 1.1)
    assert kept.products[0].flops_per_second == pytest.approx(7e14 / 1.1)
    adam = next(check for check in report.checks if check.name == "op: cpu_adam, run")
    assert adam.finding == "compiled or found in 1 min 30 s, its step is right"
    hardware = detect_hardware()
    assert hardware is not None
    assert hardware.intra.bytes_per_second == kept.between.bytes_per_second
    again = look()
    assert again.calibration == kept
    links = next(check for check in again.checks if check.name == "links")
    assert links.finding == "nvlink4: 272.7 GB/s from each GPU, measured"
    calibration = next(check for check in again.checks if check.name == "calibration")
    assert "pinned copies 45.5 GB/s" in calibration.finding


def test_a_calibration_that_fails_leaves_nothing_and_training_can_run(look: Look, tmp_path: Path) -> None:
    report = look("measure@3:complain", calibrate=True)
    check = next(check for check in report.checks if check.name == "calibration")
    assert (check.status, report.calibration, report.ready) == ("warning", None, True)
    assert check.finding.startswith("not measured: rank 3 RuntimeError: CUDA error")
    assert not (tmp_path / "cache").exists()


def test_a_machine_with_problems_is_not_measured(look: Look) -> None:
    report = look("collective@1:multiply", calibrate=True)
    assert (report.ready, report.calibration) == (False, None)


def test_a_busy_machine_is_no_broken_one(look: Look) -> None:
    report = look("torch:starve,collective@1:starve", limit_seconds=6.0)
    assert not report.ready
    unclear = {check.name for check in report.checks if check.status == "unclear"}
    assert {"torch and driver", "all-reduce"} <= unclear
    assert not any("install" in check.fix for check in report.checks if check.status == "unclear")
    assert "? could not tell: this machine is too busy" in printed(report)
