"""The folder that the board shows: its runs and benches, and nothing outside of it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, what_of
from shardwise.record import bench, energy, follow, manifest, read, restarts
from shardwise.report.compare import about, rate

_FILES = (read.JOB, read.PLAN, read.ENVIRONMENT, read.EVENTS, read.LOCK, bench.BENCH, bench.ROWS)
READ = (".", *_FILES, energy.METER, restarts.LOG, "checkpoints")
"""What is read of a run or bench, with the manifests of checkpoints: no link out of the board's folder."""
MOST_EVENTS = 128 << 20
"""Bytes of events that a report reads at once: 200,000 steps on 2 GPUs, in 0.4 GB of memory."""


class Folder:
    """Runs and benches in a folder and in its subfolders, by their names seen from there."""

    def __init__(self, root: Path) -> None:
        """JobError where `root` is no folder, or a run or a bench itself."""
        if not root.is_dir() or read.is_run_folder(root) or bench.is_bench_folder(root):
            what = f"{root} is one run" if root.is_dir() else f"there is no folder {root}"
            raise JobError(what, where=str(root), fix="name the folder that holds your runs")
        self.root = root.resolve()

    def names(self) -> dict[str, Path]:
        """All runs and benches that lie entirely within the folder."""
        found = [*read.runs_in(self.root), *read.runs_in(self.root, bench.is_bench_folder)]
        return {path.relative_to(self.root).as_posix(): path for path in found if self._holds(path)}

    def find(self, name: str) -> Path:
        """The folder of a run or bench; JobError where there is none of this name."""
        path = self.names().get(name)
        if path is None:
            raise JobError(f"there is no run {name!r} here", fix="choose one on the first page")
        return path

    def entries(self) -> list[dict[str, Any]]:
        """What the first page shows of each run and bench, the newest first; little of each is read."""
        found = [_entry(name, path) for name, path in self.names().items()]
        return sorted(found, key=lambda one: str(one["changed"]), reverse=True)

    def _holds(self, folder: Path) -> bool:
        def inside(path: Path) -> bool:
            return path.resolve().is_relative_to(self.root)

        steps = (folder / "checkpoints").glob("*") if inside(folder / "checkpoints") else ()
        read_too = (path for step in steps for path in (step, step / manifest.NAME))
        try:
            return all(map(inside, (*(folder / name for name in READ), *read_too)))
        except (OSError, RuntimeError):  # a link to itself
            return False


@contextmanager
def readable(names: Collection[str]) -> Iterator[None]:
    """JobError for what readers meet in files of these runs that hold other values than shardwise writes."""
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        if not names:
            raise
        what = f"{', '.join(names)} cannot be read: {type(error).__name__}: {str(error)[:200]}"
        raise JobError(what, fix="restore the files from a copy") from error


def few_events(paths: Mapping[str, Path]) -> list[Path]:
    """The folders; JobError without any, or where a report of one would take much time and memory."""
    if not paths:
        raise JobError("no run is named", fix="choose one on the first page")
    for name, path in paths.items():
        if (path / read.EVENTS).exists() and (size := (path / read.EVENTS).stat().st_size) > MOST_EVENTS:
            what = f"the events of {name} have {size >> 20} MiB, a report here reads {MOST_EVENTS >> 20}"
            raise JobError(what, fix=f"/run?of={name} draws it; `shardwise report` writes a report")
    return [*paths.values()]


def _entry(name: str, path: Path) -> dict[str, Any]:
    of_run = read.is_run_folder(path)
    file = path / (read.EVENTS if of_run else bench.ROWS)
    changed = datetime.fromtimestamp((file if file.exists() else path).stat().st_mtime).astimezone()
    entry = {"name": name, "bench": not of_run, "changed": f"{changed:%Y-%m-%d %H:%M:%S}"}
    try:
        with readable([name]):
            return entry | (_of_run(path) if of_run else _of_bench(path))
    except JobError as error:
        return entry | {"about": what_of(error), "status": "damaged"}


def _of_run(path: Path) -> dict[str, Any]:
    first, events = follow.ends(path)
    newest = {event["kind"]: event for event in (first, *events) if event}
    step, head = newest.get("step", {}), newest.get("run", {})
    return {
        "about": _about(path, (path / read.JOB).stat().st_mtime_ns),
        "status": read.status(events[-1] if events else first, in_use=read.is_being_written(path)),
        "step": _number(step.get("step"), int),
        "total": _number(head.get("total_steps"), int),
        "loss": _number(step.get("loss")),
        "rate": rate([first, *events]),
    }


def _number(value: Any, kind: Callable[[Any], float] = float) -> float | None:
    return None if value is None else kind(value)


@lru_cache(maxsize=1024)
def _about(run: Path, _: int) -> str:
    """Read again where the time of change is another: its YAML and JSON take milliseconds."""
    return " on ".join(about(read.read_run(run, with_events=False).job))


def _of_bench(path: Path) -> dict[str, Any]:
    found = bench.read_bench(path)
    done, total = len(found.rows), len(found.head["order"])
    state = "running" if read.is_being_written(path) else "finished" if done >= total else "stopped"
    return {"about": " on ".join(about(found.head["job"])), "status": state, "step": done, "total": total}
