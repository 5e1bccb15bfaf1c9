"""Whether a configuration fits the GPUs and how fast it is, as predicted for the equivalent job."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from shardwise.engines import descriptor
from shardwise.errors import JobError, MachineError
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.lint.check import Checked
from shardwise.lint.document import Document, Kind
from shardwise.lint.finding import Finding, Severity
from shardwise.lint.rules.accelerate import DS, FSDP
from shardwise.lint.rules.zero import ZERO
from shardwise.lint.setup import Setup
from shardwise.lint.translate import Translated, translate
from shardwise.planner.plan import Option, Plan, in_words
from shardwise.planner.sketch import sketch
from shardwise.strategy import Strategy
from shardwise.units import duration, gib

RULE = "does-not-fit"
LEFT_OPEN = ("strategy", "train.micro_batch", "train.checkpointing")  # how a step is computed, not its rows
OWN_LOOP = "shardwise's own training loop: fused loss, packed rows; a script that keeps logits needs more"
OWN_ORDER = "shardwise's order of offloaded gradients: DeepSpeed alone keeps up to three buckets of them"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The simulator's prediction."""

    unavailable: str = ""  # why there is no prediction; empty if there is one
    option: Option | None = None  # with the best choices for open settings; or the nearest to fitting
    file: str = ""
    gpus: str = ""
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    nearest: str = ""  # the cheapest change that makes it fit
    host_bytes: int | None = None  # of each host, as stated

    @property
    def fits(self) -> bool:
        return self.option is not None and self.option.fit != "no"

    def applied(self, checked: Checked) -> Checked:
        """Add a finding if it does not fit, or only with host memory that is not stated."""
        if self.option is None:
            return checked
        memory, host = self.option.prediction.memory, self.host_bytes
        of_host = f"{gib(memory.host_bytes)} of each host's memory"
        severity: Severity = "error"
        if not self.fits:
            gpu = f"{gib(memory.needed_bytes)} of {gib(memory.capacity_bytes)} on the fullest GPU"
            lacks = [gpu] * (not memory.fits) + [of_host] * (memory.fits or memory.host_bytes > (host or inf))
            needs = f"{in_words(self.option.strategy)} needs {' and '.join(lacks)}"
            what = f"it does not fit {self.gpus}: {needs}"
            fix = self.nearest or "`shardwise plan` shows what fits"
        elif host is None and memory.host_bytes >= 2**30:
            severity, what = "warning", f"it fits only if there are {of_host}, which --gpus does not state"
            fix = f"--gpus ...+{-(-memory.host_bytes // 2**30)}GiB, if a host has that much (`free -g`)"
        else:
            return checked
        what = f"{what} (predicted)"
        one = Finding(rule=RULE, severity=severity, file=self.file, what=what, fix=fix)
        return replace(checked, findings=(one, *checked.findings))

    def lines(self, name: str = "fit") -> list[str]:
        if self.option is None:
            return [f"{name}: not known: {self.unavailable}"]
        memory, time = self.option.prediction.memory, self.option.prediction.time
        verdict = {"fits": "fits", "tight": "fits barely", "no": "does not fit"}[self.option.fit]
        host = f", {gib(memory.host_bytes)} of each host's" if memory.host_bytes else ""
        waiting = f"{time.exposed_communication_fraction:.0%} of it waiting for communication"
        return [
            f"{name}: {verdict} {self.gpus} (predicted): {in_words(self.option.strategy)}",
            f"  memory: {gib(memory.needed_bytes)} of {gib(memory.capacity_bytes)} on the fullest GPU{host}",
            f"  speed: {time.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, a step takes "
            f"{duration(time.step_seconds)}, {waiting}",
            *(f"  assumed: {what}" for what in self.assumed),
            *(f"  not simulated as written: {what}" for what in self.left_out),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file or None,
            "unavailable": self.unavailable or None,
            "option": None if self.option is None else self.option.to_json(),
            "assumed": list(self.assumed),
            "left_out": list(self.left_out),
            "nearest": self.nearest or None,
        }


def fit_of(
    setup: Setup,
    model: str,
    changes: Sequence[str],
    hardware: Hardware,
    make_plan: Callable[[Job, Hardware], Plan],
) -> Fit:
    """Plan the job of the setup's files with `changes` (`key=value`), then with more left open.

    JobError if the model or the changes are wrong.
    """
    asked = next(translate(setup, as_it_runs=True), None) or _of_scripts(setup)
    if isinstance(asked, str):
        return Fit(unavailable=asked)
    drawn = sketch(model, [*asked.changes, *changes], world_size=hardware.world_size)
    nearest = ""
    try:
        plan = make_plan(drawn.job, hardware)
        if plan.chosen is None:
            left = [change for change in asked.changes if change.partition("=")[0] not in LEFT_OPEN]
            other = sketch(model, [*left, *changes], world_size=hardware.world_size)
            nearest = _nearest(plan, make_plan(other.job, hardware))
    except (JobError, MachineError) as error:  # the findings about the files stay
        return _unavailable(error)
    found = _planned(plan, asked.file, nearest)
    strategy = found.option.strategy if found.option else None
    orders = strategy is not None and strategy.stage == 3 and strategy.offload_optimizer != "none"
    assumed = (*asked.assumed, *drawn.assumed, OWN_LOOP, *([OWN_ORDER] if orders else []))
    return replace(found, assumed=assumed, left_out=asked.left_out)


def _planned(plan: Plan, file: str, nearest: str) -> Fit:
    """What a plan says of the file, and the cheapest change that makes it fit."""
    gpus = f"{plan.hardware.world_size} x {plan.hardware.gpu.name}"
    host = plan.hardware.host_memory_bytes
    return Fit(option=plan.options[0], file=file, gpus=gpus, nearest=nearest, host_bytes=host)


def _unavailable(error: JobError | MachineError) -> Fit:
    """Why there is no plan."""
    return Fit(unavailable="; ".join(problem.what for problem in error.problems))


def fit_of_job(job: Job, file: str, hardware: Hardware, make_plan: Callable[[Job, Hardware], Plan]) -> Fit:
    """Plan a job of shardwise's own."""
    try:
        plan = make_plan(job, hardware)
    except (JobError, MachineError) as error:
        return replace(_unavailable(error), file=file)
    return _planned(plan, file, _changed(plan))


def _of_scripts(setup: Setup) -> Translated | str:
    """What scripts run that no file distributes: one process, DDP or FSDP2; else what is missing."""
    alone, fsdp = setup.world_size == 1, str(setup.training("fsdp", "fsdp_config") or "")
    files = setup.of("training") + setup.of("accelerate")
    if not files:
        return "no file says how the training is distributed; add the script, or the DeepSpeed JSON"
    by_deepspeed = setup.training("deepspeed") or (setup.reader == "deepspeed" and not setup.lightning)
    if by_deepspeed or any(DS in one.values for one in files):
        return "the DeepSpeed configuration is not among the files; name it, too"
    if not alone and setup.reader not in ("trainer", "accelerate"):
        return "no file says how the processes share the work; name the DeepSpeed JSON or Accelerate's file"
    if not alone and setup.training("device_map") in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "`device_map` spreads one process over the GPUs, which is not simulated"
    formats = [name for name in ("bf16", "fp16") if setup.training(name) in (True, "auto")]  # Axolotl's
    formats += [one.get("mixed_precision") for one in files]
    used = next((one for one in formats if one in ("bf16", "fp16")), None)
    values: dict[str, Any] = {ZERO: {"stage": 0}, used or "bf16": {"enabled": used is not None}}
    kind: Kind = "accelerate" if fsdp and not alone else "deepspeed"
    if kind == "accelerate":
        offload = re.search("offload(_params': True|$| )", fsdp) is not None
        values = {FSDP: {"fsdp_version": 2, "fsdp_offload_params": offload}, "mixed_precision": used}
    made = Document(name=files[0].name, text="", syntax="json", values=values, marks={}, kind=kind)
    found = next(translate(replace(setup, documents=(made, *setup.documents))))
    how = "one process" if alone else "DDP, one process a GPU, as torchrun starts it"
    how = "FSDP2, for the Trainer's `fsdp`" if kind == "accelerate" else how
    number = () if used else ("fp32: no file asks for bf16 or fp16",)
    found = replace(found, assumed=(how, *number, *found.assumed), left_out=())
    own = "strategy=single" if alone else "strategy=ddp"
    return found if kind == "accelerate" else replace(found, changes=(own, *found.changes[1:]))


def _nearest(plan: Plan, other: Plan) -> str:
    """The cheapest change: first to how a step is computed, else to what is trained or on what."""
    wanted = plan.options[0].strategy
    option = cheapest(wanted, other.options)
    if option is not None:
        return as_settings(wanted, option)
    return _changed(other) or _changed(plan)


def _changed(plan: Plan) -> str:
    """What the plan would change to make it fit; empty if nothing."""
    near = plan.nearest
    return "" if near is None else f"{near.what}: {in_words(near.option.strategy)} fits"


def cheapest(asked: Strategy, options: Iterable[Option]) -> Option | None:
    """The option of the same engine that fits with the cheapest change, or None; the fastest of equals."""

    def price(option: Option) -> tuple[float, ...]:
        other = option.strategy
        return (
            option.fit == "tight",
            (other.offload_optimizer != asked.offload_optimizer)
            + (other.offload_parameters != asked.offload_parameters),
            (other.stage, other.reshard) != (asked.stage, asked.reshard),
            other.micro_batch != asked.micro_batch,
            other.checkpoint_every != asked.checkpoint_every,
            -option.prediction.time.tokens_per_second_per_gpu,
        )

    kept = (asked.engine, asked.tensor_parallel)
    alike = (one for one in options if (one.strategy.engine, one.strategy.tensor_parallel) == kept)
    return min((one for one in alike if one.fit != "no"), key=price, default=None)


def as_settings(asked: Strategy, option: Option) -> str:
    """The changes from the request to the option, in the terms of the checked files."""
    other, changes = option.strategy, []
    if (every := other.checkpoint_every) != asked.checkpoint_every:
        how = {0: "none", 1: "all blocks"}.get(every, f"one block in {every}")
        changes.append(f"activation checkpointing (gradient_checkpointing) of {how}")
    if other.micro_batch != asked.micro_batch:
        changes.append(f"a micro-batch of {other.micro_batch} and accumulation over {other.accumulation}")
    changes += descriptor(asked).changed_settings(asked, other)
    memory = option.prediction.memory
    barely = " (barely)" if option.fit == "tight" else ""
    host = f" and {gib(memory.host_bytes)} of each host's memory" if memory.host_bytes else ""
    return f"{', '.join(changes)}: fits{barely}, in {gib(memory.needed_bytes)}{host} (predicted)"
