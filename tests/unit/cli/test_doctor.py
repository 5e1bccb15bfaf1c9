"""The verb: exit codes, JSON, and that what it finds is what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.diagnosis import Check
from shardwise.diagnosis.doctor import Report
from shardwise.diagnosis.gpus import Gpus

FINE = Check(name="Python", status="ok", finding="3.12.1 in /venv", facts={"executable": "/venv/bin/python"})
WORSE = Check(name="hub", status="warning", finding="no answer", fix="set HTTPS_PROXY")
WORST = Check(name="all-reduce", status="problem", finding="rank 2 hung", fix="try NCCL_P2P_DISABLE=1")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """The checks of this machine, to be filled in."""
    checks: list[Check] = []

    def examine(*, runs: Path, cache: Path, calibrate: bool, say: object) -> Report:
        return Report(checks=tuple(checks), gpus=Gpus(), calibration=None, seconds=1.0)

    monkeypatch.setattr("shardwise.diagnosis.doctor.examine", examine)
    return checks


@pytest.mark.parametrize(
    ("checks", "code", "last"),
    [
        ([FINE], 0, "▶ ready: training can run on the CPU · 1 s"),
        ([FINE, WORSE], 0, "▶ ready: training can run on the CPU · 1 warning · 1 s"),
        (
            [FINE, WORSE, WORST],
            4,
            "✗ not ready: training cannot run here as it is · 1 problem, 1 warning · 1 s",
        ),
    ],
)
def test_the_exit_code_tells(
    found: list[Check], checks: list[Check], code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found += checks
    assert main(["doctor"]) == code
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == last
    assert printed.err == "doctor: this takes about half a minute\n"
    assert all(check.fix in printed.out for check in checks)


def test_json_is_one_object_with_all_checks(found: list[Check], capsys: pytest.CaptureFixture[str]) -> None:
    found += [FINE, WORST]
    assert main(["doctor", "--json"]) == 4
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["ready"], shown["hardware"], shown["calibration"]) == (
        1,
        False,
        None,
        None,
    )
    assert shown["counts"] == {"problem": 1, "unclear": 0, "warning": 0, "ok": 1, "skipped": 0}
    assert shown["checks"][1] == {
        "name": "all-reduce", "status": "problem", "finding": "rank 2 hung", "fix": "try NCCL_P2P_DISABLE=1",
        "facts": {},
    }  # fmt: skip


def test_a_calibration_that_was_not_made_is_no_success(found: list[Check]) -> None:
    found += [FINE]
    assert main(["doctor", "--calibrate"]) == 4


def test_the_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"0 where training can run, else with 4", text)
    assert "no setting is changed" in text
