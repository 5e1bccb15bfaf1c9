"""The training loop: engine-neutral, and never waiting for the GPU in the step it has just issued.

A step's loss and gradient norm are copied back asynchronously and read while the next step is
already running. That is safe because a step with a non-finite loss or gradient does not change the
weights: the engines guard it on the device, so noticing one step later loses nothing.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardwise.data.batch import StepBatch
from shardwise.data.loader import BatchStream, EvalStream
from shardwise.engines.runtime.protocol import Engine, StepResult
from shardwise.errors import DivergedError, JobError, Problem
from shardwise.job.schema import DECAY_SHARE, WARMUP_SHARE, Job, Optimizer
from shardwise.launch.heartbeat import FIRST_STEPS, mark
from shardwise.record.read import best_step
from shardwise.training.checkpoint import Keep
from shardwise.training.meter import MEMORY_FIELDS, Mark, Stopwatch, memory
from shardwise.training.process import Ranks, StopSignal
from shardwise.training.saving import Progress, Saved, Saver


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One finished optimizer step, as numbers on the host."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    target_tokens: int
    seconds: float
    skipped: bool
    loss_scale: float | None
    memory: dict[str, list[int]]  # By rank: the values of `meter.MEMORY_FIELDS`


LEAST_LOSS_SCALE = 1.0  # Of fp16: DeepSpeed's least, too
AT_FIRST = "no step was applied yet: correct the weights or config of model.source, or train.precision"
START_AGAIN = "lower optimizer.learning_rate or lengthen optimizer.warmup_steps, and start under another name"


class Observer(Protocol):
    """What the loop reports to; rank 0's writes the record and the display."""

    def on_step(self, report: StepReport) -> None: ...

    def on_eval(self, *, step: int, loss: float, seconds: float, **more: Any) -> None: ...

    def on_save(self, saved: Saved) -> None: ...


@dataclass(frozen=True, kw_only=True)
class _Issued:
    """A step whose numbers are still on their way to the host."""

    step: int
    batch: StepBatch
    learning_rate: float
    ended: Mark
    numbers: Callable[[], list[float]]
    shared: Callable[[], list[list[float]]]


@dataclass(kw_only=True, eq=False)
class Loop:
    """Runs optimizer steps from `progress.step` to `last_step`; evaluates and saves unless those are None."""

    job: Job
    engine: Engine
    stream: BatchStream
    evaluation: EvalStream | None
    ranks: Ranks
    stop: StopSignal
    observer: Observer
    saver: Saver | None
    progress: Progress
    total_steps: int
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) of all evaluations so far, those before a resumed run's start included."""
    sample: Callable[[], list[tuple[str, str]]] = list  # Prompts and what the model makes of them; collective
    explain: Callable[[StepBatch], list[tuple[str, str]]] = lambda _: []
    """What of a step is not finite, and on which ranks; collective."""
    check: Callable[[int, StepBatch], None] = lambda *_: None  # Before a step; collective
    _issued: _Issued | None = field(default=None, init=False)
    _stop_agreed: bool = field(default=False, init=False)
    _compiled: int = field(default=FIRST_STEPS, init=False)  # The step in which the last kernel is compiled

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.engine.world.device)

    def run(self, last_step: int) -> bool:
        """Train up to and including `last_step`. True when it got there, False when asked to stop.

        Either way the state is on disk before this returns. A step is saved before it is evaluated: that may
        fail, or take longer than the machine is ours.
        """
        try:
            self._run(last_step)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self._wait()  # what was copied is a checkpoint soon
            raise
        return self.progress.step >= last_step or self.worse

    def _run(self, last_step: int) -> None:
        saved_at = self.progress.step or None
        self._compiled = self.progress.step + FIRST_STEPS
        if self.progress.step not in dict(self.evaluations):
            self._evaluate_if_due()
        while self.progress.step < last_step and not self._stop_agreed and not self.worse:
            self._issue()
            step, train = self.progress.step, self.job.train
            early = train.worst_case_first and step == 1
            due = train.save_every and (early or step % train.save_every == 0)
            if due or step == last_step:
                self.save(wait=step == last_step)
                saved_at = step
            self._evaluate_if_due()
            if self.progress.best == step != saved_at:
                self.save()
                saved_at = step
        self._read()
        if saved_at != self.progress.step:
            self.save(wait=True)
        self._wait()

    @property
    def worse(self) -> bool:
        """Whether `train.patience` evaluations since the best one are used up."""
        patience, later = self.job.train.patience, [step for step, _ in self.evaluations if step]
        best = best_step(self.evaluations)
        return bool(patience and best and len(later) - later.index(best) > patience)

    def _evaluate_if_due(self) -> None:
        """Before the first step, after the last, and as often as asked; not once a stop is agreed."""
        step, every = self.progress.step, self.job.train.eval_every
        if step in (0, self.total_steps) or (every and step % every == 0):
            self._read()
            if not self._stop_agreed:
                self.evaluate()

    def evaluate(self) -> float | None:
        """Cross entropy in nats per target token on the held-out data; None without such data."""
        self._read()
        if self.evaluation is None:
            return None
        self.watch.restart()
        device = self.engine.world.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro_batch in self.evaluation:
            mark("evaluating", self.progress.step)
            total += self.engine.evaluate(micro_batch.to(device))
        # Of ranks that have seen the same rows the last one has the loss.
        shares = dict[int, Any](self.ranks.gather((self.engine.world.data_rank, total.item())))
        loss = sum(shares.values()) / self.evaluation.target_tokens
        if not math.isfinite(loss):
            fix = "lower optimizer.learning_rate, or look at the held-out data"
            raise DivergedError(f"the evaluation loss is {loss}", where=f"step {self.progress.step}", fix=fix)
        step, tokens = self.progress.step, self.evaluation.target_tokens
        self.evaluations.append((step, loss))
        if Keep.of(self.job.train).best:
            self.progress.best = best_step(self.evaluations)
        more = {"samples": samples} if (samples := self.sample()) else {}
        seconds = self.watch.lap()
        self.observer.on_eval(step=step, loss=loss, target_tokens=tokens, seconds=seconds, **more)
        self.watch.restart()
        return loss

    def save(self, *, wait: bool = False) -> None:
        """Save, in the background where that is possible and `wait` is not asked for."""
        self._read()
        if self.saver is not None:
            mark("saving", self.progress.step)
            self._report(self.saver.save(self.progress, wait=wait))

    def _wait(self) -> None:
        """Until what is being written is on disk."""
        if self.saver is not None:
            mark("saving", self.progress.step)
            self._report(self.saver.wait())

    def _report(self, checkpoints: Iterable[Saved]) -> None:
        for saved in checkpoints:
            self.observer.on_save(saved)
            if saved.background_seconds is None:
                self.watch.restart()

    def _issue(self) -> None:
        """Start one optimizer step, then read the one before it while this one runs."""
        step = self.progress.step + 1
        mark("training" if step > self._compiled else "the first steps", step)
        batch = next(self.stream)
        rate = learning_rate(self.job.optimizer, step=step, steps=self.total_steps)
        self.check(step, batch)
        device = self.engine.world.device
        result = self.engine.step(
            [micro_batch.to(device) for micro_batch in batch.micro_batches],
            target_tokens=batch.target_tokens,
            learning_rate=rate,
        )
        ended = self.saver is not None and self.saver.ended
        issued = _Issued(
            step=step,
            batch=batch,
            learning_rate=rate,
            ended=self.watch.mark(),
            numbers=_copy_back(result),
            shared=self.ranks.exchange([float(self.stop.requested), float(ended), *memory(device)]),
        )
        self._read()
        self._issued = issued
        self.progress.step = step
        self.progress.tokens += batch.tokens
        self.progress.target_tokens += batch.target_tokens
        if device.type == "cpu":
            self._read()  # it has run already: waiting would only blur whose seconds are whose

    def _read(self) -> None:
        """Bring the last issued step's numbers to the host, report them, stop if they are not finite."""
        if self._issued is None:
            return
        issued, self._issued = self._issued, None
        loss, grad_norm, skipped, *scale = issued.numbers()
        by_rank = issued.shared()
        self._stop_agreed = self._stop_agreed or any(values[0] > 0 for values in by_rank)
        names = enumerate(MEMORY_FIELDS, start=2)
        report = StepReport(
            step=issued.step,
            epoch=issued.batch.epoch,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=issued.learning_rate,
            tokens=issued.batch.tokens,
            target_tokens=issued.batch.target_tokens,
            seconds=self.watch.lap(issued.ended),
            skipped=bool(skipped),
            loss_scale=scale[0] if scale else None,
            memory={name: [int(values[index]) for values in by_rank] for index, name in names},
        )
        self.observer.on_step(report)
        if any(values[1] > 0 for values in by_rank):  # on all ranks after the same step
            self._wait()
        fp16 = self.job.train.precision == "fp16"
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or fp16):
            what = f"the loss is {loss}, the gradient norm {grad_norm}; this step was not applied"
            fix = START_AGAIN if issued.step > 1 else AT_FIRST
            found = [
                Problem(what=one, where=f"step {issued.step}, {ranks}", fix=fix)
                for one, ranks in self.explain(issued.batch)
            ]
            raise DivergedError(what, where=f"step {issued.step}", fix=fix, problems=found)
        _check(report)


def _check(report: StepReport) -> None:
    """Raise DivergedError where no further step can be useful."""
    where, loss, grad_norm = f"step {report.step}", report.loss, report.grad_norm
    if report.skipped and report.loss_scale is not None and report.loss_scale <= LEAST_LOSS_SCALE:
        raise overflows(where)
    if grad_norm == 0.0 and not report.skipped:
        what = f"the gradient is exactly zero at a loss of {loss}: the model cannot learn any more"
        raise DivergedError(what, where=where, fix=START_AGAIN)


def overflows(where: str) -> DivergedError:
    """Of fp16, where no loss scale is small enough."""
    what = f"the gradients are not finite in fp16 at a loss scale of {LEAST_LOSS_SCALE:g} either"
    fix = "train.precision: bf16 or fp32, or lower optimizer.learning_rate"
    return DivergedError(what, where=where, fix=fix)


def _copy_back(result: StepResult) -> Callable[[], list[float]]:
    """Starts the copy of a step's scalars to the host; the returned function waits for it."""
    values = (result.loss, result.grad_norm, result.skipped, result.loss_scale)
    scalars = torch.stack([value.float() for value in values if value is not None])
    if scalars.device.type != "cuda":
        return scalars.tolist
    host = torch.empty_like(scalars, device="cpu", pin_memory=True).copy_(scalars, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return host.tolist()

    return read


def warmup_steps(optimizer: Optimizer, steps: int) -> int:
    """Steps of linear warm-up: as asked, or 3 % of all steps. A share leaves a step after the warm-up."""
    asked = optimizer.warmup_steps
    if asked is None:
        return round(WARMUP_SHARE * steps)
    return asked if isinstance(asked, int) else min(math.ceil(asked * steps), steps - 1)


def check_warmup(optimizer: Optimizer, steps: int) -> None:
    """JobError where no step follows the warm-up. A job that names its steps is checked as it is read."""
    warmup = warmup_steps(optimizer, steps)
    if warmup >= steps and warmup > 0:
        what = f"a warm-up of {warmup} steps does not end within the {steps} steps of train.epochs"
        fix = "lower it, or leave it out for 3 % of the steps"
        raise JobError(what, where="optimizer.warmup_steps", fix=fix)


def learning_rate(optimizer: Optimizer, *, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1 to `steps`; a resumed run needs no other state.

    Rises linearly to the peak over the warm-up (step 1 is already above zero), then follows the
    schedule down to `final_fraction` of the peak, which the last step reaches exactly.
    """
    warmup, peak = warmup_steps(optimizer, steps), optimizer.learning_rate
    if step <= warmup:
        return peak * step / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    if optimizer.schedule == "wsd":
        remaining = 1 - math.sqrt(max(0.0, 1 - (steps - step) / (DECAY_SHARE * steps)))
    else:
        remaining = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (optimizer.final_fraction + (1 - optimizer.final_fraction) * remaining)
