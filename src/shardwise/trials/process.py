"""The processes of one bench row: started in a session of their own, watched, and ended together.

`python -m shardwise.trials.process SPEC.json PARENT` is a row's own launcher. It does not outlive the process
PARENT, which has started it; its workers do not outlive it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from shardwise.errors import ShardwiseError, render
from shardwise.launch import die_with, local
from shardwise.launch.spec import LaunchSpec

LAUNCHER = ("-P", "-m", "shardwise.trials.process")
END_SECONDS = 20.0
_LOOK_EVERY_SECONDS = 0.05


def run_to_the_end(
    spec: LaunchSpec, *, spec_file: Path, log: Path, timeout_seconds: float, look: Callable[[], None]
) -> int | None:
    """Run a job with its output in `log`; return its exit code, or None where it ran out of time.

    `look` is called all the time, and may raise. All processes have ended when this returns or raises.
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
            look()
            time.sleep(_LOOK_EVERY_SECONDS)
        return leader.returncode
    finally:
        end_session(leader)


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill a session leader and all it has started, and wait until they are gone and their GPUs free.

    Workers have process groups of their own but share the session.
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
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has just ended
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def main() -> int:
    """Runs the spec; returns its exit code."""
    die_with(int(sys.argv[2]))
    spec = LaunchSpec.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    try:
        return local.launch(spec)
    except ShardwiseError as error:  # no worker could be started
        print(render(error), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
