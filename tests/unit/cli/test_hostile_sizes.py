"""A file that is far too large takes no memory: 2 GiB of address space are enough."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

GIB = 1 << 30


def sparse(path: Path) -> Path:
    """A file of 8 GiB that takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(8 * GIB)
    return path


def limited(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 * GIB, 2 * GIB)),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the address space cannot be limited")
@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("job.yaml", ("train", "job.yaml"), 2),
        ("job.yaml", ("check", "job.yaml"), 2),
        ("job.yaml", ("config", "job.yaml"), 2),
        ("run/job.yaml", ("report", "run"), 2),
        ("run/plan.json", ("report", "run"), 2),
        ("run/events.jsonl", ("report", "run"), 2),
        ("run/checkpoints/step-000002/manifest.json", ("checkpoint", "verify", "run"), 5),
    ],
)
def test_a_file_of_8_gib_is_one_error(
    tmp_path: Path, name: str, arguments: tuple[str, ...], code: int
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for file in ("job.yaml", "plan.json", "environment.json"):
        (run / file).write_text("{}")
    (run / "events.jsonl").write_text("")
    sparse(tmp_path / name)
    done = limited(*arguments, folder=tmp_path)
    assert done.returncode == code, done.stderr
    said = done.stdout if "check" in arguments else done.stderr  # a finding like others
    assert said.count("error: ") == (0 if "verify" in arguments else 1)  # verify prints a line a step
    assert "Traceback" not in done.stderr
    assert "bug in shardwise" not in done.stderr
