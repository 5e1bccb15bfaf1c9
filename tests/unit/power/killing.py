"""Runs a scripted session of power limits again and again, and kills something at each of its events.

    python killing.py FOLDER owner|launcher|guardian|both|settling

An event is one call that leaves something behind: a synchronised or renamed file, a limit that is set, a
process that is started, a file that is deleted, or a step between two changes. Prints {"events": N, "bad":
[...]}: the events after which the limits are not those from before, or a lease is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.device.fake import FakeNvml, create
from shardwise.device.find import REPLAY, find
from shardwise.launch import die_with
from shardwise.power import control, guardian, lease
from shardwise.power.control import PowerControl

PREVIOUS = [650.0, 350.0]
LEVELS = [325.0, 300.0, 250.0]
SECONDS = 15.0
SET = "nvmlDeviceSetPowerManagementLimit"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Events:
    """Counts events in this process, and does something at one of them."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.count, self.at, self.act, self.pid = 0, at, act, os.getpid()
        for holder, name in (
            (os, "fsync"), (Path, "replace"), (Path, "unlink"), (subprocess, "Popen"), (FakeNvml, SET)
        ):  # fmt: skip
            self._wrap(holder, name)

    def start(self, at: int) -> None:
        self.count, self.at = 0, at

    def event(self) -> None:
        if os.getpid() != self.pid:  # a forked guardian has its own
            return
        if self.count == self.at:
            self.act()
        self.count += 1

    def _wrap(self, holder: Any, name: str) -> None:
        real = getattr(holder, name)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            self.event()
            found = real(*arguments, **keywords)
            self.event()
            return found

        setattr(holder, name, wrapped)


def session(events: Events) -> None:
    device = find()
    with PowerControl(device, [card.uuid for card in device.cards], run=".") as power:
        for level in LEVELS:
            events.event()
            power.set(level)
            events.event()


class ForkedGuardian:
    """guardian.main in a fork: without the start of Python, for many repetitions."""

    at = -1  # the event of its own at which it is killed
    last = 0  # the process id of the latest one

    def __init__(self, taken: lease.Lease) -> None:
        reading, writing = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.setsid()
            os.dup2(writing, 1)
            os.closerange(3, 256)  # the owner's lock among them; subprocess closes them, too
            events, wait, done = Events(-1, die), guardian.wait_for_end, Path("guardian-events").absolute()
            guardian.wait_for_end = lambda owner: (wait(owner), events.start(self.at))  # type: ignore[assignment]
            code = guardian.main(taken.file)
            if self.at >= 0:  # it is the one under test, and was not killed
                done.write_text(str(events.count))
            os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as answers:
            assert answers.readline() == "ready\n"
        type(self).last = self._pid
        self.process = lease.process(self._pid)

    @property
    def alive(self) -> bool:
        return os.waitpid(self._pid, os.WNOHANG) == (0, 0)

    def end(self) -> None:
        if self.alive:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def kill_guardian() -> None:
    if ForkedGuardian.last:
        os.kill(ForkedGuardian.last, signal.SIGKILL)


def kill_both() -> None:
    kill_guardian()
    die()


def kill_launcher(launcher: int) -> None:
    os.kill(launcher, signal.SIGKILL)
    signal.pause()


def launcher(at: int) -> None:
    """Its worker dies with it."""
    parent = os.getpid()
    worker = os.fork()
    if not worker:
        die_with(parent)
        session(Events(at, lambda: kill_launcher(parent)))
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))


def settling(at: int) -> None:
    """The owner is killed at once; the guardian while it puts the limits back."""
    ForkedGuardian.at = at
    device = find()
    with PowerControl(device, [card.uuid for card in device.cards], run=".") as power:
        power.set(LEVELS[2])
        die()


MODES: dict[str, Callable[[int], None]] = {
    "owner": lambda at: session(Events(at, die)),
    "launcher": launcher,
    "guardian": lambda at: session(Events(at, kill_guardian)),
    "both": lambda at: session(Events(at, kill_both)),
    "settling": settling,
}


def one(mode: str, at: int, folder: Path) -> tuple[bool, str]:
    """Whether the session reached the event, and what is wrong after it."""
    folder.mkdir()
    os.chdir(folder)
    nvml = FakeNvml(create("gpus.json", 2))
    for number, watts in enumerate(PREVIOUS):
        nvml.change(f"GPU-fake-{number}", power_limit_watts=watts, power_min_watts=100.0 * (2 - number))
    os.environ |= {REPLAY: "fake:gpus.json", lease.FOLDER: "leases"}
    child = os.fork()
    if not child:
        try:
            MODES[mode](at)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - what it ends with is counted
            traceback.print_exc()
            os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        return True, f"event {at} ended with {code}"
    files = Path("leases")
    if mode in ("both", "settling"):
        wait_for(lambda: not alive(files) or Path("guardian-events").exists())
        following_start()
    else:  # killed before there was a guardian, it leaves a lease under which nothing was set
        wait_for(lambda: not changed(files))
    limits = [gpu["power_limit_watts"] for gpu in nvml.state()["gpus"]]
    left = changed(files)
    reached = not Path("guardian-events").exists() if mode == "settling" else code != 0
    if mode == "guardian":
        reached = at < count_of_session()
    return reached, "" if limits == PREVIOUS and not left else f"event {at}: {limits}, {left}"


def changed(files: Path) -> list[lease.Lease]:
    """Leases under which something was set."""
    found = lease.leases(files.absolute())[0]
    return [one for one in found if any(card.levels_watts for card in one.cards.values())]


def alive(files: Path) -> bool:
    """Whether a guardian of some lease runs."""
    return any(found.guardian and found.guardian.alive() for found in lease.leases(files.absolute())[0])


def following_start() -> None:
    """The next run on these cards: it changes nothing, so what it settles is the earlier run's."""
    child = os.fork()
    if not child:
        with PowerControl(find(), ["GPU-fake-0", "GPU-fake-1"], run="."):
            os._exit(0)
    os.waitpid(child, 0)
    taken = lease.leases(Path("leases").absolute())[0]  # its own lease, of which nothing was set
    for found in taken:
        assert not any(card.levels_watts for card in found.cards.values()), found
        wait_for(lambda file=found.file: not file.exists())  # type: ignore[misc]


def count_of_session() -> int:
    return int(Path(os.environ["SESSION_EVENTS"]).read_text())


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not done() and time.monotonic() < end:
        time.sleep(0.005)


def main(folder: Path, mode: str) -> None:
    if mode != "owner":
        control.Guardian = ForkedGuardian  # type: ignore[misc, assignment]
    at, bad = 0, list[str]()
    folder.mkdir(parents=True)
    if mode == "guardian":
        os.environ["SESSION_EVENTS"] = str(folder / "count")
        child = os.fork()
        if not child:
            (folder / "first").mkdir()
            os.chdir(folder / "first")
            os.environ |= {REPLAY: f"fake:{create('gpus.json', 2)}", lease.FOLDER: "leases"}
            events = Events(-1, die)
            session(events)
            (folder / "count").write_text(str(events.count))
            os._exit(0)
        os.waitpid(child, 0)
    while True:
        reached, wrong = one(mode, at, folder / str(at))
        bad += [wrong] if wrong else []
        if not reached or at > 500:
            break
        at += 1
    print(json.dumps({"events": at, "bad": bad}))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2])
