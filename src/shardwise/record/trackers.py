"""Metrics to other places beside events.jsonl: TensorBoard files, or a service's own client.

A client is imported only when the job names it. Keys come from the service's environment variables.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import MachineError
from shardwise.record.redact import redact_tree

PROJECT = "shardwise"


class Tracker(Protocol):
    """Takes numbers by name, at a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers of a run. One that fails later is reported and left out: a run outlives its services."""

    def __init__(self, names: Iterable[str], *, run_dir: Path, job: Mapping[str, Any]) -> None:
        """MachineError where a client is not installed or does not start."""
        self._active: dict[str, Tracker] = {}
        safe_job = redact_tree(job)
        for name in names:
            try:
                self._active[name] = _START[name](Path(run_dir), safe_job)
            except ImportError as error:
                raise MachineError(
                    f"tracking with {name} needs a package that is not installed ({error.name})",
                    where="tracking",
                    fix=f"pip install 'shardwise[{name}]', or take {name} out of `tracking`",
                ) from None
            except Exception as error:
                raise MachineError(
                    f"{name} did not start: {type(error).__name__}: {error}",
                    where="tracking",
                    fix=f"log in to {name}, or take it out of `tracking`",
                ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._active.clear()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._active.items()):
            try:
                action(tracker)
            except Exception as error:  # noqa: BLE001 - clients raise what they like
                del self._active[name]
                print(f"warning: {name} failed and gets no more numbers: {error}", file=sys.stderr)


class _TensorBoard:
    """Event files in `tensorboard/`, written with TensorBoard's own writer (torch's is a wrapper of it)."""

    def __init__(self, run_dir: Path, _: Mapping[str, Any]) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        numbers = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=numbers)
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run_dir: Path, job: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=PROJECT, name=job["name"], dir=str(run_dir), config=dict(job))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, _: Path, job: Mapping[str, Any]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=job["name"])
        self._mlflow.log_dict(dict(job), "job.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Trackio:
    def __init__(self, _: Path, job: Mapping[str, Any]) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(project=PROJECT, name=job["name"], config=dict(job))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


_START: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}
