"""The rows of a bench: one complete strategy each, with its prediction."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.device import Unavailable
from shardwise.engines import settings_of
from shardwise.engines.facts import Devices
from shardwise.errors import JobError, Problem, ShardwiseError
from shardwise.job.schema import Job, StrategySpec
from shardwise.job.strategies import Parts
from shardwise.planner.plan import Option, Plan
from shardwise.planner.why import does_not_fit
from shardwise.space.auto import resolve
from shardwise.space.candidates import ADAPTERS, ALL_WEIGHTS, FOR_ADAPTERS, FOR_ALL_WEIGHTS
from shardwise.strategy import Strategy
from shardwise.trials.sweep import ALL, Point, own_parts, shapes, varied

NO_GPU = Unavailable(reason="the simulator predicts GPUs, and there is none here")

PlanFor = Callable[[Job], Plan]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on one variant of the job."""

    job: Job  # Complete: it always gives this strategy
    strategy: Strategy
    sweep: Mapping[str, str]
    option: Option | Unavailable  # The prediction
    refused: str | None = None  # Why it cannot be run at all

    @property
    def label(self) -> str:
        """`zero2`, `zero2 micro_batch=4`."""
        swept = (f"{key.rpartition('.')[2]}={value}" for key, value in self.sweep.items())
        return " ".join([self.strategy.name, *swept])

    @property
    def slug(self) -> str:
        """Name of its run; as the label, in characters that a name may have."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.label).strip("-.")[:90]

    @property
    def key(self) -> str:
        """A hash of the job without its names: the identity of a result."""
        content = self.job.model_dump(mode="json", exclude={"name", "output", "tracking"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def predicted(self) -> dict[str, Any]:
        """For the result: the prediction with its memory over the step, or why there is none."""
        if isinstance(self.option, Unavailable):
            reason = self.option.reason
            return {"predicted": None, "predicted_unavailable": reason, "fit": None, "why": []}
        prediction, fit, why = self.option.prediction.to_json(), self.option.fit, list(self.option.why)
        prediction["memory"]["timeline"] = [asdict(m) for m in self.option.prediction.memory.timeline]
        return {"predicted": prediction, "predicted_unavailable": None, "fit": fit, "why": why}


def make_rows(
    points: Sequence[Point], names: Sequence[str] | None, *, processes: int, plan_for: PlanFor | None
) -> tuple[list[Row], list[dict[str, str]]]:
    """The rows to run, and [{strategy, reason}] of what was left out because it cannot be run or fit.

    `names`: the strategies asked for; [ALL]: each kind of which the plan says that it fits, without a GPU
    each that the rules allow; None: the job's own. `plan_for` makes a plan; None without a GPU.

    Raises DoesNotFitError where nothing fits, JobError where nothing is allowed.
    """
    rows: dict[str, Row] = {}
    left_out: dict[str, str] = {}
    nothing: ShardwiseError | None = None
    for point in points:
        making = _Making(point, processes, plan_for)
        if names is None:
            made = [making.own()]
        elif ALL in names:
            made, refused = making.everything()
            left_out |= refused
            nothing = nothing or (None if made else making.nothing(refused))
        else:
            made = [making.named(name) for name in names]
        for row in made:
            rows.setdefault(row.key, row)
    if not rows and nothing is not None:
        raise nothing
    return list(rows.values()), [{"strategy": name, "reason": why} for name, why in left_out.items()]


class _Making:
    """The rows of one point; its job is planned at most once for each set of parts."""

    def __init__(self, point: Point, processes: int, plan_for: PlanFor | None) -> None:
        self._point, self._processes, self._plan_for = point, processes, plan_for
        self._shapes = shapes(processes)
        self._auto_plan: Plan | JobError | None = None

    def own(self) -> Row:
        """The job's own strategy; `auto`: the plan's choice, without a GPU the rule of thumb's."""
        spec = self._point.job.strategy
        if self._point.parts or spec != "auto":
            return self._of(varied(own_parts(self._point.job), self._point.parts))
        if self._plan_for is None:
            return self._row(self._resolved("auto"), NO_GPU)
        best = self._plan_for(self._point.job).options[0]
        return self._row(best.strategy, best)

    def named(self, name: str) -> Row:
        if not self._point.parts and self._plan_for is not None:
            return self._planned(name, self._all())
        return self._of(varied(self._shapes[name], self._point.parts))

    def everything(self) -> tuple[list[Row], dict[str, str]]:
        kept: list[Row] = []
        full = self._point.job.model.lora is None
        others, why_not = (FOR_ADAPTERS, ALL_WEIGHTS) if full else (FOR_ALL_WEIGHTS, ADAPTERS)
        left_out = {name: why_not for name, parts in self._shapes.items() if parts in others}
        for row in map(self.named, [name for name in self._shapes if name not in left_out]):
            option, why = row.option, row.refused
            if why is None and isinstance(option, Option) and option.fit == "no":
                why = option.why[0] if option.why else "it does not fit"
            elif why is None and isinstance(option, Unavailable) and self._plan_for is not None:
                why = option.reason
            if why is None:
                kept.append(row)
            else:
                left_out[row.strategy.name] = why
        return kept, left_out

    def nothing(self, left_out: Mapping[str, str]) -> ShardwiseError:
        """The error that there is nothing to run."""
        if isinstance(self._auto_plan, Plan) and self._auto_plan.chosen is None:
            return does_not_fit(self._auto_plan)
        problems = [Problem(what=f"{name}: {reason}") for name, reason in left_out.items()]
        return JobError("no strategy can be used for this job", problems=problems)

    def _all(self) -> Plan | JobError:
        """The plan with all strategies open; the error where none is allowed."""
        if self._auto_plan is None:
            assert self._plan_for is not None
            try:
                self._auto_plan = self._plan_for(self._point.job.model_copy(update={"strategy": "auto"}))
            except JobError as error:
                self._auto_plan = error
        return self._auto_plan

    def _of(self, parts: Parts) -> Row:
        """A strategy of these parts, planned on its own."""
        if self._plan_for is None:
            return self._unplanned(parts, NO_GPU)
        try:
            spec = StrategySpec.model_validate(parts)
            plan = self._plan_for(self._point.job.model_copy(update={"strategy": spec}))
        except JobError as error:
            return self._unplanned(parts, Unavailable(reason=_said(error)))
        return self._row(plan.options[0].strategy, plan.options[0])

    def _planned(self, name: str, plan: Plan | JobError) -> Row:
        """The best simulated strategy of a kind, even if it does not fit."""
        parts = self._shapes[name]
        if isinstance(plan, JobError):
            return self._unplanned(parts, Unavailable(reason=_said(plan)))
        for option in plan.options:
            if option.strategy.name == name:
                return self._row(option.strategy, option)
        for skipped in plan.skipped:
            if skipped.strategy.name == name:
                return self._row(skipped.strategy, Unavailable(reason=f"not simulated: {skipped.reason}"))
        for refused in plan.refused:
            if refused.strategy.name == name:
                return self._unplanned(parts, Unavailable(reason=refused.reason))
        return self._of(parts)  # `auto` leaves it out

    def _unplanned(self, parts: Parts, why: Unavailable) -> Row:
        """A strategy without a prediction; refused where a rule forbids it."""
        try:
            return self._row(self._resolved(StrategySpec.model_validate(parts)), why)
        except JobError as error:
            strategy = Strategy(**parts, data_parallel=self._processes)
            return replace(self._row(strategy, why), refused=_said(error))

    def _resolved(self, spec: str | StrategySpec) -> Strategy:
        job = self._point.job.model_copy(update={"strategy": spec})
        devices: Devices = "cpu" if self._plan_for is None else "cuda"
        return resolve(job, world_size=self._processes, devices=devices)[0]

    def _row(self, strategy: Strategy, option: Option | Unavailable) -> Row:
        job = _pinned(self._point.job, strategy)
        return Row(job=job, strategy=strategy, sweep=self._point.values, option=option)


def _pinned(job: Job, strategy: Strategy) -> Job:
    """The job with strategy, micro-batch and checkpointing named: nothing is left open."""
    every = strategy.checkpoint_every
    checkpointing = {0: "none", 1: "full"}.get(every, every)
    sizes = {"micro_batch": strategy.micro_batch, "checkpointing": checkpointing}
    train = job.train.model_copy(update=sizes)
    return job.model_copy(update={"strategy": settings_of(strategy), "train": train, "tracking": []})


def _said(error: JobError) -> str:
    return "; ".join(problem.what for problem in error.problems)
