"""Runs as Python starts where this folder is on PYTHONPATH: the program runs in a fork of a template instead.

This process stands for it: it passes signals on and ends as the program ends. See `handed_over` in forks.py.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

MOST_BYTES = 1 << 20


def hand_over(templates: list[str]) -> None:
    me = os.getpid()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect("\0" + templates[int(os.environ.get("RANK", me)) % len(templates)])
    asked = {
        "target": "forks:run_python",
        "arguments": [str(me), str(os.getppid()), str(Path.cwd()), *sys.orig_argv[1:]],
        "environment": dict(os.environ),
    }
    asked |= {name: f"/proc/{me}/fd/{number}" for number, name in enumerate(("input", "output", "errors"))}
    line.send(json.dumps(asked).encode())
    pid = json.loads(line.recv(MOST_BYTES))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = json.loads(line.recv(MOST_BYTES))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# Those of `multiprocessing` inherit open files.
if "FORKS" in os.environ and not any("multiprocessing" in one for one in sys.orig_argv):
    hand_over(os.environ["FORKS"].split())
