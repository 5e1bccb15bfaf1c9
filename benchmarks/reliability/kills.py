"""kill -9 at every file event of a save, and at random moments: what a run finds then, and how it goes on.

    python benchmarks/reliability/kills.py [--what events,random] [--strategies zero1,...] [--stride 1]

On CPUs, with the real engines, store and launch specification, and a tiny Llama. A chain of kills is
one run: each launch resumes it and is killed. `events`: at the n-th file event of its first save, n =
1, 2, ... until its second save has begun; each step is saved. `random`: at a moment drawn from the
launch's first seconds. After each kill the newest sound checkpoint must have the hashes of the
undisturbed run's, and no smaller step than after the kill before. In the end the run must have the
losses and weights of the undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from itertools import count, product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests" / "distributed"
sys.path[:0] = [str(TESTS), str(HERE.parents[1] / "tests" / "shared")]
SWITCH = "SHARDWISE_BACKGROUND_SAVES"
STRATEGIES = ("zero1", "zero2", "zero3", "fsdp2")
STEPS, SECONDS = 40, 1.0  # Of a run; after the engine is built, of a launch that is killed at random


def worker(specs: str) -> None:
    """In each rank: train, and die where the environment says."""
    import harness
    import torch

    from shardwise.training import snapshot

    torch.set_num_threads(1)
    if os.environ["RANK"] == os.environ["KILL_RANK"]:
        if "KILL_AT" in os.environ:
            _watch(int(os.environ["KILL_AT"]))
        else:
            restore = snapshot.Snapshots.__init__
            timer = threading.Timer(float(os.environ["KILL_AFTER"]), _die)
            timer.daemon = True

            def built(self: Any, **values: Any) -> None:
                restore(self, **values)
                timer.start()

            snapshot.Snapshots.__init__ = built  # type: ignore[method-assign]
    harness.main(specs)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(at: int) -> None:
    """Count what is done below `checkpoints`; die before the n-th, or in the middle of a rank's own file."""
    from shardwise.engines.runtime import host_copy, state

    seen = [0]

    def event() -> bool:
        seen[0] += 1
        return seen[0] == at

    def audited(name: str, arguments: tuple[Any, ...]) -> None:
        writes = name in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
        writes |= name == "open" and isinstance(arguments[1], str) and bool(set(arguments[1]) & set("wxa"))
        if writes and "/checkpoints/" in f"{arguments[0]}/" and event():
            _die()

    def fsync(descriptor: int) -> None:
        if "/checkpoints" in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and event():
            _die()
        flush(descriptor)

    def write_file(path: Path, header: bytes, chunks: Any) -> None:
        if event():
            path.write_bytes(header + b"half")
            _die()
        write(path, header, chunks)

    flush, write = os.fsync, state.write_file
    os.fsync = fsync  # type: ignore[assignment]
    state.write_file = host_copy.write_file = write_file
    sys.addaudithook(audited)


class Runs:
    """One job: its undisturbed run, and launches that are killed."""

    def __init__(self, folder: Path, strategy: str, processes: int, *, background: bool) -> None:
        from test_out_of_memory import job

        self.folder, self.processes = folder, processes
        folder.mkdir()
        os.environ[SWITCH] = "1" if background else "0"
        settings = {"steps": STEPS, "save_every": 1, "eval_every": 0}
        self._job = lambda name, keep: job(folder, name, strategy, **settings, keep=keep)
        self._launch(self._job("undisturbed", STEPS), resume=False)
        self.hashes = {step: hashes(path) for step, path in _steps(folder / "runs" / "undisturbed")}

    def start(self, name: str) -> Path:
        """The folder of a new run, which no launch has made yet."""
        self.name, self.run = name, self.folder / "runs" / name
        shutil.rmtree(self.run, ignore_errors=True)
        return self.run

    def launch(self, **kill: Any) -> bool:
        """Go on with the run; whether it was killed."""
        environment = {f"KILL_{key.upper()}": str(value) for key, value in kill.items()}
        return self._launch(self._job(self.name, 2), resume=self.run.exists(), **environment)

    def _launch(self, job: Any, *, resume: bool, **kill: str) -> bool:
        from shardwise.launch.nodes import free_port
        from shardwise.launch.spec import LaunchSpec

        run_dir = str(Path(job["output"]) / job["name"])
        spec = LaunchSpec(job=job, run_dir=run_dir, processes=self.processes, resume=resume)
        path = self.folder / "specs.json"
        path.write_text(json.dumps([spec.to_json()]))
        size = str(self.processes)
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", **kill}
        shared |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [self._fork(str(rank), str(path), shared) for rank in range(self.processes)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
        if any(codes) and -signal.SIGKILL not in codes:
            logs = [self._log(str(rank)).read_text()[-4000:] for rank in range(self.processes)]
            raise AssertionError("\n".join([f"exit codes {codes}", *logs]))
        return any(codes)

    def _fork(self, rank: str, specs: str, shared: dict[str, str]) -> int:
        from forks import replace_file, to_the_end

        process = os.fork()
        if process == 0:
            os.environ.update({"KILL_RANK": "-1", **shared, "RANK": rank, "LOCAL_RANK": rank})
            self._log(rank).write_bytes(b"")
            replace_file(1, self._log(rank))
            replace_file(2, self._log(rank))
            to_the_end(lambda: worker(specs))
        return process

    def _log(self, rank: str) -> Path:
        return self.folder / f"rank-{rank}.log"

    def found(self) -> int:
        """The step that would be resumed; -1 where its bytes are not those of the undisturbed run."""
        from shardwise.errors import CheckpointError
        from shardwise.training.checkpoint import newest_valid

        try:
            newest = newest_valid(self.run / "checkpoints")
        except CheckpointError:  # there are checkpoints, and none is sound
            return -1
        if newest is None:
            return 0
        return newest.step if hashes(newest.path) == self.hashes[newest.step] else -1

    def same_end(self) -> bool:
        """Losses of all steps, and the last checkpoint."""
        from harness import steps_of

        expected = [event["loss"] for event in steps_of(self.folder / "runs" / "undisturbed")]
        return expected == [event["loss"] for event in steps_of(self.run)] and self.found() == STEPS


def _steps(run: Path) -> list[tuple[int, Path]]:
    from shardwise.record.manifest import step_folders

    return step_folders(run / "checkpoints")


def hashes(checkpoint: Path) -> dict[str, str]:
    """Of all files of a checkpoint."""
    from shardwise.record.manifest import read_manifest

    return {name: entry.sha256 for name, entry in read_manifest(checkpoint).files.items()}


def chain(runs: Runs, name: str, kills: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Kill a run again and again, and let it end."""
    runs.start(name)
    before, killed, wrong = 0, 0, list[Any]()
    for kill in kills:
        if not runs.launch(**kill):
            break
        killed += 1
        found = runs.found()
        if found < before:
            wrong.append({**kill, "found": found, "before": before})
        before = max(before, found)
    else:
        runs.launch()
    return {"kills": killed, "wrong": wrong, "same_end": runs.same_end()}


def until_done(runs: Runs, rank: int, stride: int) -> Iterator[dict[str, Any]]:
    """A kill at each event of a launch's first save, until its next save has begun."""
    for at in count(1, stride):
        before = {step for step, _ in _steps(runs.run)}
        yield {"rank": rank, "at": at}
        if len({step for step, _ in _steps(runs.run)} - before) > 1:
            return  # this launch has saved twice: the event was one of a second save


def events(folder: Path, strategies: list[str], stride: int) -> Iterator[dict[str, Any]]:
    for strategy, processes, background in product(strategies, (1, 2), (False, True)):
        place = folder / f"{strategy}-{processes}-{background}"
        runs = Runs(place, strategy, processes, background=background)
        for rank in range(processes):
            began = time.monotonic()
            found = chain(runs, f"rank{rank}", until_done(runs, rank, stride))
            row = {"what": "events", "strategy": strategy, "processes": processes, "killed_rank": rank}
            seconds = round(time.monotonic() - began)
            yield {**row, "background": background, "stride": stride, **found, "seconds": seconds}
        shutil.rmtree(place)


def at_random(folder: Path, strategies: list[str], kills: int) -> Iterator[dict[str, Any]]:
    """So many kills of each strategy, in one run if that has enough steps."""
    dice = random.Random(0)
    for strategy in strategies:
        runs, left = Runs(folder / f"random-{strategy}", strategy, 2, background=True), kills
        while left > 0:
            began = time.monotonic()
            drawn = ({"rank": dice.randrange(2), "after": dice.uniform(0, SECONDS)} for _ in range(left))
            found = chain(runs, f"run{left}", drawn)
            row = {"what": "random", "strategy": strategy, "processes": 2, "background": True}
            yield {**row, **found, "seconds": round(time.monotonic() - began)}
            left -= max(1, int(found["kills"]))
        shutil.rmtree(runs.folder)


def import_all() -> None:
    """Before any fork, which then has it."""
    from forks import IMPORTED

    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", default="events,random")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--stride", type=int, default=1, help="of events that are tried")
    parser.add_argument("--random", type=int, default=50, help="kills of each strategy at random moments")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kills.jsonl")
    asked = parser.parse_args()
    import_all()
    about = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
    strategies = asked.strategies.split(",")
    parts: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
        "events": lambda folder: events(folder, strategies, asked.stride),
        "random": lambda folder: at_random(folder, strategies, asked.random),
    }
    with tempfile.TemporaryDirectory() as folder:
        for part in asked.what.split(","):
            for row in parts[part](Path(folder)):
                print(json.dumps(row), flush=True)
                with asked.out.open("a") as out:
                    out.write(json.dumps({**row, "versions": about}) + "\n")


if __name__ == "__main__":
    main()
