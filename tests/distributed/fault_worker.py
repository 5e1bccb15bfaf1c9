"""The real worker, with faults: `FAULTS` is a JSON list of {rank, step, do, with, times}.

What has come is noted in the folder `FAULTS_IN`, which has the folder `runs`. A fault comes as its step
begins (null: each step), so many times (once by default) over all restarts of the run; `with` has its
arguments. Some are no faults, only what slows a healthy rank down.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.device.fake import FakeNvml
from shardwise.device.find import fake_file
from shardwise.launch import die_with
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


def kill_once_saved(step: int) -> None:
    """A thread writes checkpoints: when it ends is not ours to say."""
    while not list(FOLDER.glob(f"runs/*/checkpoints/step-{step:06d}")):
        time.sleep(0.01)
    kill()


def kill_all() -> None:
    """As the kernel's or a batch system's memory guard does: all ranks, at once."""
    ranks = Path(f"/proc/{LAUNCHER}/task/{LAUNCHER}/children").read_text().split()
    for pid in sorted(map(int, ranks), key=os.getpid().__eq__):
        os.kill(pid, signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("a bug that comes back")


def wait_for_gpu() -> None:
    """A collective that begins when a kernel before it ends, which takes minutes."""
    torch.cuda._sleep(10**12)  # type: ignore[no-untyped-call]
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def time_out() -> None:
    """As NCCL's watchdog does: torch's record is written, and the connection is gone."""
    place = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
    Path(f"{place}{RANK}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    raise dist.DistBackendError("Watchdog caught collective operation timeout")


def leave() -> None:
    """A library that ends the process, without a word."""
    os._exit(7)


def preempt() -> None:
    """A batch system takes the machine back."""
    os.kill(LAUNCHER, signal.SIGTERM)


def tear() -> None:
    """The newest checkpoint loses half of its largest file, and the rank dies."""
    newest = max(FOLDER.glob("runs/*/checkpoints/step-*"))
    largest = max((file for file in newest.rglob("*") if file.is_file()), key=lambda one: one.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    kill()


def fill() -> None:
    """No file can grow any more, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def lose_gpu() -> None:
    """This rank's card, of the fake driver, answers no more."""
    fake = FakeNvml(str(fake_file()))
    with fake.changing() as state:
        state["slow_seconds"][state["gpus"][RANK]["uuid"]] = 1000.0


def pause(seconds: float) -> None:
    time.sleep(seconds)


def duty(running: float, stopped: float) -> None:
    """From now on this process runs a share of the time, as under cpulimit or while memory is swapped."""
    rank = os.getpid()
    if os.fork() == 0:
        die_with(rank)
        while True:
            for number, seconds in ((signal.SIGSTOP, stopped), (signal.SIGCONT, running)):
                os.kill(rank, number)
                time.sleep(seconds)


def load(processes: int) -> None:
    """Others want the processor, too."""
    rank = os.getpid()
    for _ in range(processes):
        if os.fork() == 0:
            die_with(rank)
            spin()


def poison(module: str) -> None:
    """From now on the second token of what a module returns is NaN."""

    def spoil(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(-2, torch.tensor(1), float("nan"))

    engine: Any = LOOPS[0].engine
    root = getattr(engine, "module", None) or engine._engine.module
    root.get_submodule(module).register_forward_hook(spoil)


def flip(module: str, of: str) -> None:
    """The second time from now, one bit of what a module returns, or of the gradient of that, is another."""
    calls = count()

    def spoil(value: torch.Tensor) -> torch.Tensor:
        spoiled = value.clone()
        if next(calls) == 1:
            spoiled.view(torch.int16 if value.element_size() == 2 else torch.int32).view(-1)[5] ^= 1
        return spoiled

    def returns(_: object, __: object, output: torch.Tensor) -> torch.Tensor | None:
        if of == "output":
            return spoil(output)
        output.register_hook(spoil)
        return None

    engine: Any = LOOPS[0].engine
    root = getattr(engine, "module", None) or engine._engine.module
    root.get_submodule(module).register_forward_hook(returns)


_DOING = (spin, sleep, stop, stop_and_ask, deadlock, wait_for_gpu, time_out, pause, duty, load)
_ENDING = (kill, kill_all, kill_once_saved, fail, leave, preempt)
_BREAKING = (tear, fill, lose_gpu, poison, flip)
FAULTS: dict[str, Callable[..., None]] = {one.__name__: one for one in _DOING + _ENDING + _BREAKING}
LAUNCHER = os.getppid()
GROUPS: list[Any] = []
LOOPS: list[Loop] = []


def watch() -> None:
    rate, run, evaluate, save = loop.learning_rate, Loop.run, Loop.evaluate, Loop.save
    faults = json.loads(os.environ["FAULTS"])
    slow = float(os.environ.get("FAULTS_SLOW", "0"))

    def ran(self: Loop, last_step: int) -> bool:
        LOOPS.append(self)
        GROUPS.append(dist.new_group(backend="gloo"))
        return run(self, last_step)

    def in_step(optimizer: Any, *, step: int, steps: int) -> float:
        for number, fault in enumerate(faults):
            done = FOLDER / f"fault-{number}"
            before = len(done.read_text()) if done.exists() else 0
            due = fault["rank"] == RANK and fault["step"] in (step, None)
            if due and before < fault.get("times", 1):
                with done.open("a") as file:
                    file.write("x")
                FAULTS[fault["do"]](**fault.get("with", {}))
        return rate(optimizer, step=step, steps=steps)

    def evaluated(self: Loop) -> float | None:
        loss = evaluate(self)
        time.sleep(slow)
        return loss

    def saved(self: Loop, *, wait: bool = False) -> None:
        save(self, wait=wait)
        time.sleep(slow)

    loop.learning_rate = in_step
    Loop.run, Loop.evaluate, Loop.save = ran, evaluated, saved  # type: ignore[method-assign]


if __name__ == "__main__":
    watch()
    os._exit(main())
