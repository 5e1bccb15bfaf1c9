"""Power is lost at every file event of a save: what may be on the disk then, and what a run finds.

    python benchmarks/reliability/power_loss.py [--out FILE]

A run on the CPU is recorded: what is flushed, renamed and removed, and what lies in the folder. After
each event states of the disk are built in which nothing that was not flushed need be there: the names
in a folder are those of its last flush or the present ones; the content of a file is that of its last
flush, or zeros, or nothing, or what was written. One state has flushed things alone, one all present
names with flushed content, the others are drawn. In each the newest sound checkpoint must be no older
than the last that was reported as saved, with the hashes that the manifest had when it was written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / folder) for folder in ("distributed", "shared")]
SWITCH = "SHARDWISE_BACKGROUND_SAVES"
STEPS, DRAWN = 5, 12
Names = dict[int, dict[str, int]]  # Of a folder, by inode: the inodes of what is in it
Contents = dict[int, bytes]


@dataclass
class Moment:
    """After an event."""

    event: str
    saved: int  # The last step that was reported as saved
    root: int
    names: Names = field(default_factory=dict)
    contents: Contents = field(default_factory=dict)
    flushed_names: Names = field(default_factory=dict)
    flushed: Contents = field(default_factory=dict)


class Recording:
    """The events of a run, in order."""

    def __init__(self, root: Path) -> None:
        self.root, self.moments, self.saved = root, list[Moment](), 0
        self._names, self._contents = Names(), Contents()  # As flushed
        self._open: dict[int, int] = {}  # Descriptors, so that no inode is used twice

    def note(self, event: str, path: Path, *, flushed: bool = False) -> None:
        now = Moment(event, self.saved, self._inode(self.root))
        self._look(self.root, now)
        if flushed:
            inode = self._inode(path)
            if path.is_dir():
                self._names[inode] = {child.name: self._inode(child) for child in path.iterdir()}
            else:
                self._contents[inode] = path.read_bytes()
        now.flushed_names, now.flushed = dict(self._names), dict(self._contents)
        self.moments.append(now)

    def _inode(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._open:
            self._open[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _look(self, folder: Path, now: Moment) -> None:
        found = now.names[self._inode(folder)] = {}
        for child in folder.iterdir():
            found[child.name] = self._inode(child)
            if child.is_dir():
                self._look(child, now)
            else:
                now.contents[found[child.name]] = child.read_bytes()


def record(run_dir: Path, spec: Any) -> Recording:
    """Train, and note what the store does."""
    from shardwise.training.checkpoint import CheckpointStore, FileSystem
    from shardwise.training.run import run

    recording = Recording(run_dir / "checkpoints")
    actions = {name: getattr(FileSystem, name) for name in ("make_folder", "unlink", "remove_folder")}
    rename, write, sync, save = FileSystem.rename, FileSystem.write, FileSystem.sync, CheckpointStore.save

    def noted(name: str) -> Any:
        def act(self: Any, path: Path) -> None:
            actions[name](self, path)
            recording.note(f"{name} {path.name}", path)

        return act

    def renamed(self: Any, source: Path, target: Path) -> None:
        rename(self, source, target)
        recording.note(f"rename {target.name}", target)

    def written(self: Any, path: Path, content: bytes) -> None:
        write(self, path, content)
        recording.note(f"write {path.name}", path, flushed=True)

    def synced(self: Any, path: Path) -> None:
        sync(self, path)
        if path != recording.root.parent:
            recording.note(f"sync {path.name}", path, flushed=True)

    def saved(self: Any, step: int, *writes: Any, origin: Any) -> Any:
        done = save(self, step, *writes, origin=origin)
        recording.saved = step
        return done

    changed: dict[str, Any] = {name: noted(name) for name in actions}
    changed |= {"rename": renamed, "write": written, "sync": synced}
    before = {name: getattr(FileSystem, name) for name in changed}
    try:
        for name, function in changed.items():
            setattr(FileSystem, name, function)
        CheckpointStore.save = saved  # type: ignore[method-assign]
        run(spec)
    finally:
        for name, function in before.items():
            setattr(FileSystem, name, function)
        CheckpointStore.save = save  # type: ignore[method-assign]
    return recording


def build(moment: Moment, inode: int, folder: Path, how: str, dice: random.Random) -> None:
    """A state of the disk in which power may have been lost. `how`: flushed, names, or drawn."""
    folder.mkdir()
    flushed = moment.flushed_names.get(inode, {})
    present = moment.names.get(inode, {})
    drawn = how == "drawn" and dice.random() < 0.5
    for name, child in (present if how == "names" or drawn else flushed).items():
        if child in moment.names or child in moment.flushed_names:
            build(moment, child, folder / name, how, dice)
        else:
            content = moment.flushed.get(child)
            if content is None:
                full = moment.contents.get(child, b"")
                content = dice.choice([full, bytes(len(full)), b""]) if how == "drawn" else bytes(len(full))
            (folder / name).write_bytes(content)


def states(moment: Moment, folder: Path, dice: random.Random) -> Iterator[Path]:
    for number, how in enumerate(["flushed", "names", *["drawn"] * DRAWN]):
        place = folder / f"{number}" / "checkpoints"
        place.parent.mkdir()
        build(moment, moment.root, place, how, dice)
        yield place


def judge(place: Path, moment: Moment, expected: dict[int, str]) -> str | None:
    """What is wrong with a state; None where a run goes on from what was saved."""
    from shardwise.errors import CheckpointError
    from shardwise.training.checkpoint import newest_valid

    try:
        found = newest_valid(place)
    except CheckpointError as error:
        return f"{error}"
    step = found.step if found else 0
    if step < moment.saved:
        return f"step {step} is found, {moment.saved} was saved"
    if found and found.manifest.to_text() != expected[step]:
        return f"step {step} has another content"
    return None


def rehearse(folder: Path, strategy: str, *, background: bool) -> dict[str, Any]:
    from test_out_of_memory import job

    from shardwise.launch.spec import LaunchSpec

    os.environ[SWITCH] = "1" if background else "0"
    settings = {"steps": STEPS, "save_every": 1, "eval_every": 0, "keep": 1}
    values = job(folder, "run", strategy, **settings)
    run_dir = folder / "runs" / "run"
    recording = record(run_dir, LaunchSpec(job=values, run_dir=str(run_dir), processes=1))
    expected: dict[int, str] = {}
    for moment in recording.moments:
        kind, name = moment.event.split(" ")
        if kind == "rename":
            manifest = moment.contents[moment.names[moment.names[moment.root][name]]["manifest.json"]]
            expected[int(name.removeprefix("step-"))] = manifest.decode()
    dice, wrong, count = random.Random(0), list[str](), 0
    for moment in recording.moments:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            for state in states(moment, Path(place), dice):
                count += 1
                why = judge(state, moment, expected)
                wrong += [] if why is None else [f"after {moment.event}: {why}"]
    row = {"strategy": strategy, "background": background, "events": len(recording.moments)}
    return {**row, "states": count, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "power_loss.jsonl")
    asked = parser.parse_args()
    about = {name: version(name) for name in ("torch", "transformers")}
    for strategy, background in product(("single", "fsdp2"), (False, True)):
        with tempfile.TemporaryDirectory() as folder:
            row = rehearse(Path(folder), strategy, background=background)
        print(json.dumps(row), flush=True)
        with asked.out.open("a") as out:
            out.write(json.dumps({**row, "versions": about}) + "\n")


if __name__ == "__main__":
    main()
