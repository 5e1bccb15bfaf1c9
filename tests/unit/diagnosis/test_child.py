"""Children that hang, crash or complain are findings, and the other probes are answered all the same."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.diagnosis.child import Answer, children


def ask(module: str, *names: str, limit_seconds: float = 20.0) -> dict[str, Answer]:
    with children(module=module, limit_seconds=limit_seconds) as family:
        child = family.ask(*names)
        family.wait()
    return child.answers


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def ended(pids: list[int]) -> bool:
    """What was killed, and is a child's child, may take a moment to be gone."""
    deadline = time.monotonic() + 5.0
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


@pytest.mark.parametrize(
    ("act", "failure", "printed"),
    [
        ("crash", "crashed with SIGSEGV", "a library's last words"),
        ("leave", "ended with exit code 7", ""),
        ("complain", "RuntimeError: CUDA error: no kernel image is available", ""),
    ],
)
def test_a_probe_that_fails_is_told_and_the_next_one_is_answered(
    probes: str, act: str, failure: str, printed: str
) -> None:
    answers = ask(probes, "quiet", act, "loud")
    assert answers[act] == Answer(failure=failure, printed=printed)
    assert answers["quiet"].facts is not None
    assert answers["loud"].facts == {"said": "this"}


def test_a_probe_that_hangs_is_ended_with_all_it_started(probes: str) -> None:
    began = time.monotonic()
    answers = ask(probes, "hang", "loud", limit_seconds=4.0)
    assert time.monotonic() - began < 20
    assert answers["hang"].failure == "hung for 4 s while waiting for the others"
    pids = [int(text) for text in answers["hang"].printed.split()[1:]]
    assert len(pids) == 2
    assert ended(pids)
    assert answers["loud"].facts is not None


def test_children_do_not_outlive_the_look(probes: str) -> None:
    """Ctrl-C while a child is busy."""
    pids: list[int] = []

    def interrupted() -> None:
        with children(module=probes, limit_seconds=60.0) as family:
            child = family.ask("hang")
            while len(pids) < 2:
                assert not child.look()
                pids[:] = [int(text) for text in child.printed().split()[1:]]
                time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ended(pids)


def test_one_that_cannot_even_start_says_so() -> None:
    answers = ask("shardwise.diagnosis.no_such_module", "torch")
    assert answers["torch"].failure == "ended with exit code 1"
    assert "No module named shardwise.diagnosis.no_such_module" in answers["torch"].printed


def test_on_a_busy_machine_nothing_is_known_and_nothing_more_is_asked(probes: str) -> None:
    began = time.monotonic()
    answers = ask(probes, "starve", "loud", limit_seconds=4.0)
    assert answers["starve"] == answers["loud"]
    assert answers["loud"].busy
    assert answers["loud"].failure.startswith("no answer in 4 s, ")
    assert time.monotonic() - began < 20


def test_progress_is_said(probes: str) -> None:
    said: list[tuple[int, int, list[str]]] = []
    with children(module=probes, say=lambda *now: said.append(now)) as family:
        family.ask("quiet", "loud")
        family.wait()
    assert said[0][1] == said[-1][0] == 2
    assert said[-1] == (2, 2, [])


def test_a_child_starts_without_the_launcher_and_the_jobs_schema() -> None:
    """Half a second of a core each, and a machine has as many children as GPUs at a time."""
    code = "import sys, shardwise.diagnosis.probes.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"pydantic", "numpy", "shardwise.launch.local"} & set(done.stdout.split()) == set()
