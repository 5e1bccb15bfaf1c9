"""A row's processes: started in a session of their own, watched, and ended all together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from shardwise.launch.spec import LaunchSpec

LAUNCHER = ("-P", "-m", "shardwise.bench.launcher")
END_SECONDS = 20.0
_LOOK_EVERY_SECONDS = 0.05


def run_to_the_end(spec: LaunchSpec, *, spec_file: Path, log: Path, timeout_seconds: float) -> int | None:
    """The exit code of the run; None where it had to be ended because its time was over.

    What it prints goes to `log`. However this returns, or is left by a signal's exception, none of the
    processes that were started is left.
    """
    spec_file.write_text(json.dumps(spec.to_json()), encoding="utf-8")
    with log.open("wb") as output:
        leader = subprocess.Popen(
            [sys.executable, *LAUNCHER, str(spec_file), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_seconds
    try:
        while leader.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_SECONDS)
        return leader.returncode
    finally:
        end_session(leader)


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kills a session leader and all it has started, and waits until they are gone and their GPUs free.

    Workers have process groups of their own; the session is what they share.
    """
    deadline = time.monotonic() + END_SECONDS
    while (alive := _session(leader.pid)) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(_LOOK_EVERY_SECONDS)
    leader.poll()


def _session(leader: int) -> list[int]:
    """Processes of the session that still run."""
    pids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has just ended
        # pid (name) state parent group session ...; a name may hold spaces and brackets
        fields = stat.rpartition(")")[2].split()
        if int(fields[3]) == leader and fields[0] != "Z":
            pids.append(int(folder.name))
    return pids
