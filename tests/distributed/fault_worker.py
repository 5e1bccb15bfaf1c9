"""The real worker, with faults: `FAULTS` is a JSON list of {rank, step, do, times}.

What has come is noted in the folder `FAULTS_IN`. A fault comes as its step begins, so many times (once by
default) over all restarts of the run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.training import loop
from shardwise.training.loop import Loop
from shardwise.training.worker import main

RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["FAULTS_IN"])


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(1000)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_and_ask() -> None:
    """The launcher is asked to end while this rank is stopped."""
    if os.fork() == 0:
        time.sleep(1.0)
        os.kill(LAUNCHER, signal.SIGTERM)
        os._exit(0)
    stop()


def deadlock() -> None:
    """A collective that no other rank takes part in."""
    dist.barrier(group=GROUPS[0])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("a bug that comes back")


FAULTS = {one.__name__: one for one in (spin, sleep, stop, stop_and_ask, deadlock, kill, fail)}
LAUNCHER = os.getppid()
GROUPS: list[Any] = []


def watch() -> None:
    rate, run, evaluate, save = loop.learning_rate, Loop.run, Loop.evaluate, Loop.save
    faults = json.loads(os.environ["FAULTS"])
    slow = float(os.environ.get("FAULTS_SLOW", "0"))

    def ran(self: Loop, last_step: int) -> bool:
        GROUPS.append(dist.new_group(backend="gloo"))
        return run(self, last_step)

    def in_step(optimizer: Any, *, step: int, steps: int) -> float:
        for number, fault in enumerate(faults):
            done = FOLDER / f"fault-{number}"
            before = len(done.read_text()) if done.exists() else 0
            if (fault["rank"], fault["step"]) == (RANK, step) and before < fault.get("times", 1):
                with done.open("a") as file:
                    file.write("x")
                FAULTS[fault["do"]]()
        return rate(optimizer, step=step, steps=steps)

    def evaluated(self: Loop) -> float | None:
        loss = evaluate(self)
        time.sleep(slow)
        return loss

    def saved(self: Loop) -> None:
        save(self)
        time.sleep(slow)

    loop.learning_rate = in_step
    Loop.run, Loop.evaluate, Loop.save = ran, evaluated, saved  # type: ignore[method-assign]


if __name__ == "__main__":
    watch()
    os._exit(main())
