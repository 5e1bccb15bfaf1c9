"""A run's numbers while it runs, from the events that it writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.record.follow import Follower
from shardwise.record.read import read_run, status
from shardwise.report.compare import LEAST_ENERGY_SECONDS, WARM_UP_STEPS
from shardwise.units import duration

RECENT_SECONDS = 30.0
"""Speed and energy are of the newest steps that took so long together."""

ACTIVE = ("starting", "running")
"""The status of a run that will write events."""

CURVE_STEPS = 240  # of `recent_losses`

QUIET_SECONDS, QUIET_STEPS = 60.0, 10
"""A run that writes nothing for so long, and for so many of its steps, has no predicted end."""


class _Step(NamedTuple):
    number: int
    tokens: int
    seconds: float
    time: float
    loss: float | None
    joules: float | None
    mfu: float | None
    peak_bytes: int | None  # the worst rank's

    @staticmethod
    def of(event: Mapping[str, Any]) -> _Step:
        """TypeError or ValueError where a value is no number."""
        return _Step(
            number=int(event["step"]),
            tokens=int(event["tokens"]),
            seconds=float(event["seconds"]),
            time=float(event["time"]),
            loss=_float(event.get("loss")),
            joules=_float(event.get("joules")),
            mfu=_float(event.get("mfu")),
            peak_bytes=max(map(int, event.get("peak_memory_reserved_bytes") or [0])) or None,
        )


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


class LiveRun:
    """One run folder, read again and again at little cost."""

    def __init__(self, path: Path) -> None:
        """JobError where `path` is no run folder."""
        record = read_run(path, with_events=False)
        self.path = path
        self._name = record.job.get("name")
        self._predicted = _prediction(record.plan)
        self._follower = Follower(path)
        self._begin()

    def _begin(self) -> None:
        self._head: Mapping[str, Any] = {}
        self._last: Mapping[str, Any] = {}  # event, of any kind
        self._last_time = 0.0
        self._event: Mapping[str, Any] = {}  # of the newest step
        self._step: _Step | None = None  # the newest
        self._eval: Mapping[str, Any] = {}
        self._resumed_step: int | None = None
        self._tokens, self._joules, self._steps, self._without_joules = 0, 0.0, 0, 0
        self._curve = deque[float](maxlen=CURVE_STEPS)
        self._bad = ""
        self._launch()

    def _launch(self) -> None:
        self._in_launch = 0  # steps
        self._recent, self._recent_seconds = deque[_Step](), 0.0
        self._warm: _Step | None = None  # the last step of the launch's warm-up

    def look(self, now: float) -> dict[str, Any]:
        """The run at `now`, in Unix seconds; None has its reason in `unavailable`."""
        more = True
        while more:
            again, events = self._follower.read()
            if again:
                self._begin()
            for event in events:
                try:
                    self._add(event)
                except (TypeError, ValueError, KeyError, OverflowError) as error:
                    self._bad = f"an event has a value that is no number ({error})"
            more = bool(events)
        problems = [text for text in (self._follower.problem, self._bad) if text]
        return {"path": str(self.path), "name": self._name, **self._values(now), "problems": problems}

    def _add(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        now = float(event["time"])
        if kind == "step":
            self._add_step(_Step.of(event))
            self._event = event
        elif kind == "run":
            _ = int(event["processes"]), int(event["total_steps"])
            self._head = event
        elif kind == "eval":
            _float(event["loss"])
            self._eval = event
        if kind in ("run", "resume"):
            self._resumed_step = event.get("step")
            self._launch()
        self._last, self._last_time = event, now

    def _add_step(self, step: _Step) -> None:
        self._step, self._in_launch = step, self._in_launch + 1
        self._tokens += step.tokens
        self._joules += step.joules or 0.0
        self._steps, self._without_joules = self._steps + 1, self._without_joules + (step.joules is None)
        if step.loss is not None:
            self._curve.append(step.loss)
        if self._in_launch == WARM_UP_STEPS + 1:
            self._recent, self._recent_seconds = deque(), 0.0
        if self._in_launch == WARM_UP_STEPS:
            self._warm = step
        self._recent.append(step)
        self._recent_seconds += step.seconds
        while self._recent_seconds - self._recent[0].seconds >= RECENT_SECONDS:
            self._recent_seconds -= self._recent.popleft().seconds

    def _values(self, now: float) -> dict[str, Any]:
        reasons: dict[str, str] = {}
        in_use = self._follower.is_written(now)  # by a process that trains, starts or ends
        step = self._step
        found = {
            "status": status(self._last, in_use=in_use),
            "in_use": in_use,
            "strategy": self._head.get("strategy"),
            "processes": self._head.get("processes"),
            "resumed_step": self._resumed_step,
            "step": self._resumed_step or 0 if step is None else step.number,
            "total_steps": self._head.get("total_steps"),
            "tokens": self._tokens,
            "loss": step and step.loss,
            "loss_not_finite": (self._event.get("not_finite") or {}).get("loss"),
            "recent_losses": list(self._curve),
            "eval_loss": self._eval.get("loss"),
            "eval_step": self._eval.get("step"),
            **self._speed(reasons),
            **self._energy(reasons),
            "peak_memory_reserved_bytes": step and step.peak_bytes,
            "quiet_seconds": max(0.0, now - self._last_time) if self._last else None,
        }
        found["eta_seconds"] = self._eta(found, reasons)
        for key, value in found.items():
            if value is None and key not in reasons:
                reasons[key] = _WITHOUT.get(key, "no step is done yet")
        return {**found, "predicted": self._predicted, "unavailable": reasons}

    def _speed(self, reasons: dict[str, str]) -> dict[str, Any]:
        rate = each = middle = None
        if self._recent:
            seconds = sum(step.seconds for step in self._recent)
            rate = sum(step.tokens for step in self._recent) / seconds if seconds else None
            middle = seconds / len(self._recent)
            each = None if rate is None else rate / int(self._head.get("processes") or 1)
        if self._event.get("mfu_unavailable"):
            reasons["mfu"] = str(self._event["mfu_unavailable"])
        return {
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": each,
            "step_seconds": middle,
            "mfu": self._step and self._step.mfu,
        }

    def _energy(self, reasons: dict[str, str]) -> dict[str, Any]:
        """Of all GPUs of the run, without the host."""
        known = [step for step in self._recent if step.joules is not None]
        joules, seconds = sum(step.joules or 0.0 for step in known), sum(step.seconds for step in known)
        tokens = sum(step.tokens for step in known)
        enough = bool(tokens) and seconds >= LEAST_ENERGY_SECONDS
        if known and not enough:
            reasons["joules_per_token"] = f"{duration(seconds)} of steps are too short for the counter"
        elif not known and self._recent:
            reasons["joules_per_token"] = str(self._event.get("joules_unavailable") or "no reading")
        if not enough and "joules_per_token" in reasons:
            reasons["run_watts"] = reasons["joules_per_token"]
        return {
            "joules_per_token": joules / tokens if enough else None,
            "run_watts": joules / seconds if enough else None,
            "joules_in_steps": self._joules,
            "steps_recorded": self._steps,
            "steps_without_joules": self._without_joules,
        }

    def _eta(self, found: Mapping[str, Any], reasons: dict[str, str]) -> float | None:
        """Seconds to the last step, at the pace of this launch: evaluations and saves are in it."""
        if found["status"] != "running":
            reasons["eta_seconds"] = f"the run is {found['status']}"
            return None
        if not self._recent or not found["total_steps"]:
            return None
        last, warm = self._recent[-1], self._warm
        pace: float = found["step_seconds"]
        if warm is not None and last.number > warm.number:
            pace = (last.time - warm.time) / (last.number - warm.number)
        quiet: float = found["quiet_seconds"]
        if quiet > max(QUIET_SECONDS, QUIET_STEPS * pace):
            reasons["eta_seconds"] = f"no event for {duration(quiet)}"
            return None
        return max(0.0, (int(found["total_steps"]) - last.number) * pace - quiet)


_WITHOUT = {
    "resumed_step": "the run was not resumed",
    "loss": "it is not finite, or no step is done yet",
    "loss_not_finite": "the loss is finite, or no step is done yet",
    "eval_loss": "it is not finite, or no evaluation is done yet",
    "eval_step": "no evaluation is done yet",
    "mfu": "the GPU's peak is not known, or no step is done yet",
    "peak_memory_reserved_bytes": "it is not recorded, or no step is done yet",
    **dict.fromkeys(("strategy", "processes", "total_steps", "quiet_seconds"), "no event is written yet"),
}


def _prediction(plan: Mapping[str, Any]) -> dict[str, float]:
    """What the plan predicted of speed, energy and memory; empty without a prediction."""
    try:
        found = plan["chosen"]["prediction"]
        return {
            "tokens_per_second_per_gpu": float(found["time"]["tokens_per_second_per_gpu"]),
            "joules_per_token": float(found["energy"]["joules_per_token"]),
            "peak_memory_reserved_bytes": float(found["memory"]["peak_reserved_bytes"]),
        }
    except (KeyError, TypeError, ValueError):
        return {}
