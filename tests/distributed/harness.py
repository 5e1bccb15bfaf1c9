"""Runs whole jobs through the real worker code, several per set of processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import run_set

from shardwise.launch.spec import LaunchSpec

ROOT = Path(__file__).parents[2]
VENV_BIN = str(Path(sys.executable).parent)


@dataclass(frozen=True)
class Run:
    """One job to run, and how."""

    job: dict[str, Any]
    resume: bool = False
    max_steps: int | None = None


def run_all(
    runs: list[Run], *, processes: int, folder: Path, timeout: float = 600.0, listen: bool = False
) -> list[Path]:
    """Runs the jobs one after the other in one set of processes; returns their run folders.

    `listen`: each process notes the all-reduces of its tensor-parallel group, see `sums_of`. Raises
    AssertionError with the processes' output when one of them fails.
    """
    specs = []
    for run in runs:
        run_dir = Path(run.job["output"]) / run.job["name"]
        spec = LaunchSpec(
            job=run.job,
            run_dir=str(run_dir),
            processes=processes,
            resume=run.resume,
            max_steps=run.max_steps,
        )
        specs.append(spec.to_json())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "specs.json"
    path.write_text(json.dumps(specs))
    flags = ["listen"] if listen else []
    run_set("harness:main", str(path), *flags, processes=processes, folder=folder, timeout=timeout)
    return [Path(spec["run_dir"]) for spec in specs]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The step events of a run, in order."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "step"]


def sums_of(run_dir: Path, rank: int) -> list[int]:
    """Bytes of each tensor that was summed over the tensor-parallel group of a run, in their order.

    Scalars, of which gradient norms are made, are left out.
    """
    noted: list[int] = json.loads((run_dir / f"sums-{rank}.json").read_text())
    return noted


def main(specs: str, *flags: str) -> None:
    """In each of the processes: run every spec of the file in turn."""
    from shardwise.training.run import run

    listen = "listen" in flags
    for record in json.loads(Path(specs).read_text()):
        spec = LaunchSpec.from_json(record)
        noted: list[int] = []
        with _listening(noted) if listen else nullcontext():
            run(spec)
        if listen:
            (Path(spec.run_dir) / f"sums-{os.environ['RANK']}.json").write_text(json.dumps(noted))


@contextmanager
def _listening(noted: list[int]) -> Iterator[None]:
    """Adds the bytes of all sums over the tensor-parallel group to `noted`."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    original = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        of_rows = group is not None and group is groups.get_tensor_model_parallel_group()
        if of_rows and op == dist.ReduceOp.SUM and tensor.numel() > 1:
            noted.append(tensor.numel() * tensor.element_size())
        return original(tensor, op=op, group=group, **options)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original
