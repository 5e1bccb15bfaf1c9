"""Metrics for other places than events.jsonl: TensorBoard files, or a service's own client.

A client is imported only when the job names it. Keys come from the service's environment variables.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import MachineError
from shardwise.record.write import redact_tree

PROJECT = "shardwise"


class Tracker(NamedTuple):
    """Takes numbers by name at a step, until it is closed."""

    log: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


class Trackers:
    """All trackers of a run. One that fails later is reported and left out: a run outlives its services."""

    def __init__(self, names: Iterable[str], *, run_dir: Path, job: Mapping[str, Any]) -> None:
        """Start the trackers. MachineError where a client is not installed or does not start."""
        self._active: dict[str, Tracker] = {}
        safe_job = redact_tree(job)
        for name in names:
            try:
                self._active[name] = _START[name](Path(run_dir), safe_job)
            except ImportError as error:
                what = f"tracking with {name} needs a package that is not installed ({error.name})"
                fix = f"pip install 'shardwise[{name}]', or take {name} out of `tracking`"
                raise MachineError(what, where="tracking", fix=fix) from None
            except Exception as error:
                what = f"{name} did not start: {type(error).__name__}: {error}"
                fix = f"log in to {name}, or take it out of `tracking`"
                raise MachineError(what, where="tracking", fix=fix) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, dict(values)))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._active.clear()

    def _each(self, action: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._active.items()):
            try:
                action(tracker)
            except Exception as error:  # noqa: BLE001 - clients raise what they like
                del self._active[name]
                print(f"warning: {name} failed and gets no more numbers: {error}", file=sys.stderr)


def _tensorboard(run_dir: Path, _: Mapping[str, Any]) -> Tracker:
    """Event files in `tensorboard/`, written with TensorBoard's own writer (torch's is a wrapper of it)."""
    writer = import_module("tensorboard.summary.writer.event_file_writer")
    event = import_module("tensorboard.compat.proto.event_pb2").Event
    summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
    file = writer.EventFileWriter(str(run_dir / "tensorboard"))

    def log(step: int, values: Mapping[str, float]) -> None:
        numbers = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        file.add_event(event(step=step, wall_time=time.time(), summary=summary(value=numbers)))

    return Tracker(log, file.close)


def _wandb(run_dir: Path, job: Mapping[str, Any]) -> Tracker:
    run = import_module("wandb").init(project=PROJECT, name=job["name"], dir=str(run_dir), config=dict(job))
    return Tracker(lambda step, values: run.log(values, step=step), run.finish)


def _mlflow(_: Path, job: Mapping[str, Any]) -> Tracker:
    mlflow = import_module("mlflow")
    mlflow.set_experiment(PROJECT)
    mlflow.start_run(run_name=job["name"])
    mlflow.log_dict(dict(job), "job.json")
    return Tracker(lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run)


def _trackio(_: Path, job: Mapping[str, Any]) -> Tracker:
    trackio = import_module("trackio")
    trackio.init(project=PROJECT, name=job["name"], config=dict(job))
    return Tracker(lambda step, values: trackio.log(values, step=step), trackio.finish)


_START = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
