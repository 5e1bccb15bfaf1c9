"""The same kill test for shardwise and for other trainers.

    python benchmarks/reliability/peers.py --python "Lightning=/venvs/lightning/bin/python" ...

A training of 12 tiny steps on a CPU is saved every 2 steps (peer_trainers.py). It is killed (SIGKILL),
and started again with the resume that the trainer's documents name. Three ways: at a random moment
after the first save; while a file of a later save appears or grows; and after step 9, with a
bit of the newest checkpoint flipped, or the end of one of its files cut off. Found is

    exact       it resumes at most 3 steps back; all losses and the weights are those of the undisturbed
                run, to the bit
    older       the same, from further back; with a damage: from before the damaged checkpoint
    harmless    with a damage: it resumes from that checkpoint, exactly
    refused     it ends with an error
    hangs       it does not end within a minute
    started     it starts at step 1 although there was a checkpoint
    different   it resumes, and losses or weights are others: nothing is said

Each trainer runs in the Python given for it, in forks of a process that has imported it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS, LAST, LIMIT = 12, 9, 60.0
BUILD = 300.0  # Of the first launch: DeepSpeed compiles an operator then


class Trials:
    """Of one trainer."""

    def __init__(self, name: str, folder: Path) -> None:
        import peer_trainers

        self.name, self.folder = name, folder
        self.train = peer_trainers.TRAINERS[name]
        self.place = peer_trainers.PLACES[name]
        self.dice = random.Random(name)
        self.sound = self.new("sound")
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
        code = self.wait(self.start(self.sound, resume=False), BUILD)
        assert code == 0, self.log(self.sound)
        self.expected = self.losses(self.sound)
        assert sorted(self.expected) == list(range(1, STEPS + 1)), self.expected
        self.end = (self.sound / "end").read_text()
        changes = len(self.watched(self.start(self.new("counted"), resume=False), None))
        self.changes = range(changes // 4, changes)  # of the first of six saves nothing older is there

    def new(self, name: str) -> Path:
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def start(self, path: Path, *, resume: bool, last: int = STEPS) -> tuple[int, Path]:
        """A fork that trains; it kills itself after step `last`."""
        (path / "losses").write_text("")
        process = os.fork()
        if process:
            return process, path
        code = 1
        try:
            output = os.open(path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(path)
            import torch

            torch.set_num_threads(1)
            lines = (path / "losses").open("a", buffering=1)

            def note(step: int, loss: float) -> None:
                lines.write(f"{step} {float(loss).hex()}\n")
                if step == last and last < STEPS:
                    os.kill(os.getpid(), signal.SIGKILL)

            (path / "end").write_text(self.train(path, note, resume=resume))
            code = 0
        except BaseException:  # noqa: BLE001, the parent sees the exit code
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def wait(self, started: tuple[int, Path], limit: float = LIMIT) -> int | None:
        """The exit code; None where it had to be ended."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            process, status = os.waitpid(started[0], os.WNOHANG)
            if process:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(started[0], signal.SIGKILL)
        os.waitpid(started[0], 0)
        return None

    def losses(self, path: Path) -> dict[int, str]:
        lines = [line.split() for line in (path / "losses").read_text().splitlines()]
        return {int(step): loss for step, loss in lines}

    def log(self, path: Path) -> str:
        return (path / "log").read_text(errors="replace")[-3000:]

    def files(self, path: Path) -> dict[str, int]:
        """Sizes of all files below the checkpoints."""
        found = {}
        for root, _, names in os.walk(path / self.place):
            for name in names:
                try:
                    found[f"{root}/{name}"] = os.lstat(f"{root}/{name}").st_size
                except FileNotFoundError:
                    continue
        return found

    def watched(self, started: tuple[int, Path], at: int | None) -> list[None]:
        """Look for changes of the files until it ends; kill it at change number `at`."""
        process, path = started
        changes, before = list[None](), self.files(path)
        while os.waitpid(process, os.WNOHANG)[0] == 0:
            now = self.files(path)
            if now != before:
                changes.append(None)
                before = now
                if at is not None and len(changes) > at:
                    time.sleep(self.dice.uniform(0, 0.004))
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    break
        return changes

    def random(self) -> dict[str, Any]:
        started = self.start(path := self.new("trial"), resume=False)
        while max(self.losses(path), default=0) < 3 and os.waitpid(started[0], os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        training = self.seconds_of_steps()
        time.sleep(self.dice.uniform(0, training))
        if max(self.losses(path), default=0) == STEPS:
            self.wait(started)
            return self.random()
        os.kill(started[0], signal.SIGKILL)
        os.waitpid(started[0], 0)
        return self.resume(path)

    def seconds_of_steps(self) -> float:
        """From the third step to the last, of the undisturbed run: by the times of its checkpoints."""
        times = [Path(name).stat().st_mtime for name in self.files(self.sound)]
        return max(0.05, max(times) - min(times))

    def saving(self) -> dict[str, Any]:
        path = self.new("trial")
        at = self.dice.choice(self.changes)
        self.watched(self.start(path, resume=False), at)
        if (path / "end").exists():  # It was not killed
            return self.saving()
        return self.resume(path)

    def damage(self, kind: str) -> dict[str, Any]:
        path = self.new("trial")
        self.wait(self.start(path, resume=False, last=LAST))
        step, newest = self.newest(path)
        sizes = [file.stat().st_size if kind == "flip" else 1 for file in newest]
        (file,) = self.dice.choices(newest, sizes)
        data = bytearray(file.read_bytes())
        if kind == "flip":
            data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        else:
            del data[self.dice.randrange(len(data)) :]
        file.write_bytes(data)
        row = {"file": file.name, **self.resume(path)}
        if row["found"] in ("exact", "older"):
            row["found"] = "harmless" if row["from"] == step else "older"
        return row

    def newest(self, path: Path) -> tuple[int, list[Path]]:
        """The step of the newest checkpoint, and its files that are not empty."""
        names = [entry for entry in (path / self.place).iterdir() if not entry.is_symlink()]
        # DeepSpeed puts a script next to its checkpoints
        last = max((entry for entry in names if entry.name[0] != "." and entry.suffix != ".py"), key=number)
        step = number(last)
        if (copy := path / self.place / "last.ckpt").exists():  # What Lightning resumes from
            last = copy
        files = [last] if last.is_file() else [file for file in last.rglob("*") if file.is_file()]
        return step, sorted(file for file in files if file.stat().st_size)

    def resume(self, path: Path) -> dict[str, Any]:
        killed_after = max(self.losses(path), default=0)
        (path / "end").unlink(missing_ok=True)
        (path / "log").write_text("")
        code = self.wait(self.start(path, resume=True))
        losses = self.losses(path)
        first = min(losses, default=STEPS + 1)  # Killed in the last save, it may have nothing left to train
        row: dict[str, Any] = {"killed_after": killed_after, "from": first - 1}
        if code != 0:
            last = [line for line in self.log(path).splitlines() if line and line[0] not in " ["]
            reason = next((line for line in reversed(last) if "rror" in line), "")
            return {**row, "found": "refused" if code is not None else "hangs", "error": reason[:160]}
        if any(self.expected[step] != loss for step, loss in losses.items()):
            different = [step for step, loss in losses.items() if self.expected[step] != loss]
            return {**row, "found": "different", "first_different": min(different)}
        if (path / "end").read_text() != self.end:
            return {**row, "found": "different", "first_different": "weights"}
        if first <= 1 and killed_after > 3:
            return {**row, "found": "started"}
        older = killed_after - (first - 1) > 3  # Every second step is saved, and one save may be under way
        return {**row, "found": "older" if older else "exact"}


def number(path: Path) -> int:
    """The step in a name: of `ep1-ba8-rank0.pt` 8, of `epoch=0-step=8.ckpt` 8."""
    name = path.name.replace("-rank0", "").split(".")[0]
    digits = "".join(char if char.isdigit() else " " for char in name).split()
    return int(digits[-1]) if digits else -1


def rank_zero() -> None:
    shared = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**shared, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
    os.environ["MASTER_PORT"] = "0"


def trials(name: str, counts: dict[str, int], out: Path, seconds: float) -> None:
    """In the Python of one trainer."""
    import peer_trainers

    for module in peer_trainers.IMPORTS[name]:
        import_module(module)
    if name in ("shardwise", "DeepSpeed"):  # Others start without a launcher
        rank_zero()
    gc.collect()
    gc.freeze()
    packages = (*peer_trainers.PACKAGES[name], "torch")
    with tempfile.TemporaryDirectory() as folder:
        tried = Trials(name, Path(folder))
        kinds: dict[str, Callable[[], dict[str, Any]]] = {
            "random": tried.random,
            "saving": tried.saving,
            "flip": lambda: tried.damage("flip"),
            "truncate": lambda: tried.damage("truncate"),
        }
        rows, until = list[dict[str, Any]](), time.monotonic() + seconds
        for _ in range(max(counts.values())):
            for what, count in counts.items():
                if time.monotonic() < until and sum(row["what"] == what for row in rows) < count:
                    rows.append({"what": what, **kinds[what]()})
        seen = {what: Counter(row["found"] for row in rows if row["what"] == what) for what in counts}
        found = {"versions": {package: version(package) for package in packages}, "found": seen}
        out.write_text(json.dumps({**found, "changes_of_files": tried.changes.stop, "trials": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="TRAINER=PATH")
    parser.add_argument("--trainers", help="which, with commas; all by default")
    parser.add_argument("--random", type=int, default=12)
    parser.add_argument("--saving", type=int, default=20)
    parser.add_argument("--flip", type=int, default=10)
    parser.add_argument("--truncate", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=600, help="no trial of a trainer begins later")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "peers.json")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    counts = {what: getattr(asked, what) for what in ("random", "saving", "flip", "truncate")}
    if asked.inside:
        trials(asked.inside, counts, asked.out, asked.seconds)
        return
    pythons = dict(given.split("=", 1) for given in asked.python)
    names = ("shardwise", "Hugging Face Trainer", "Lightning", "Composer", "DeepSpeed")
    results = json.loads(asked.out.read_text()) if asked.out.exists() else {"trainers": {}}
    for name in asked.trainers.split(",") if asked.trainers else names:
        part = asked.out.with_suffix(".part")
        numbers = [word for what, count in counts.items() for word in (f"--{what}", str(count))]
        numbers += ["--seconds", str(asked.seconds)]
        command = [pythons.get(name, sys.executable), __file__, "--inside", name, "--out", str(part)]
        began = time.monotonic()
        subprocess.run([*command, *numbers], check=True)
        found = json.loads(part.read_text())
        part.unlink()
        results["trainers"][name] = {**found, "seconds": round(time.monotonic() - began)}
        results |= {"date": datetime.now(UTC).date().isoformat(), "python": platform.python_version()}
        asked.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(found["found"]), flush=True)


if __name__ == "__main__":
    main()
