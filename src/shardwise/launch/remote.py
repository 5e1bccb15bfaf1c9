"""On another host: `python -m shardwise.launch.remote`, started over ssh, starts one node and ends with it.

It says who it is, reads one line of JSON from stdin (the command and variables of the environment: a secret
must not stand in a list of processes) and passes on what the node prints. stdin is the line to whoever
started it: when it closes, the node is asked to stop, and killed if it does not.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from shardwise.launch import die_with

HELLO = "shardwise-node"
STOP_SECONDS = 120.0  # from the end of the line to the kill, to finish a step and save
_LOOK_SECONDS = 0.2


def greeting() -> str:
    """The line that a host of the same version begins with."""
    return f"{HELLO} {version('shardwise')}"


def main() -> int:
    """Greet, start what is ordered, and end with it; returns its exit code."""
    print(greeting(), flush=True)
    line = sys.stdin.buffer.readline()
    if not line:  # whoever started this has found a problem elsewhere
        return 0
    order = json.loads(line)
    parent = os.getpid()
    node = subprocess.Popen(
        order["command"],
        env={**os.environ, **order["environment"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 - there is one thread
    )
    code = _attend(node)
    return code if code >= 0 else 128 - code


def _attend(node: subprocess.Popen[bytes]) -> int:
    """Pass on what the node prints until it has ended; returns its exit code."""
    assert node.stdout is not None
    output = node.stdout.fileno()
    listening: list[Any] = [0, output]
    stopped = None
    while output in listening or node.poll() is None:
        ready = select.select(listening, [], [], _LOOK_SECONDS)[0]
        if output in ready and not _passed_on(output):
            listening.remove(output)
        if 0 in ready and not os.read(0, 4096):
            listening.remove(0)
            stopped = time.monotonic()
            node.send_signal(signal.SIGTERM)
        if stopped is not None and time.monotonic() - stopped > STOP_SECONDS:
            node.kill()  # its workers die with it
        if node.poll() is not None and not ready:
            break  # something that it started may keep the output open
    return node.wait()


def _passed_on(output: int) -> bool:
    """False at the end of the output."""
    data = os.read(output, 1 << 16)
    with suppress(OSError):  # nobody reads any more
        while data:
            written = os.write(1, data)
            if written == len(data):
                return True
            data = data[written:]
    return bool(data)


if __name__ == "__main__":
    sys.exit(main())
