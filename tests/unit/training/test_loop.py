"""The loop's decisions: when it evaluates, saves and stops, and which numbers end a run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from shardwise.data.batch import IGNORED, MicroBatch, StepBatch
from shardwise.engines.runtime.protocol import StepResult, World
from shardwise.errors import DivergedError, MachineError
from shardwise.job.schema import Job
from shardwise.training import saving
from shardwise.training.loop import Loop, StepReport
from shardwise.training.process import Ranks, StopSignal
from shardwise.training.saving import Progress, Saved, Saver

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), data_rank=0, data_size=1)
ROW = torch.zeros(1, 4, dtype=torch.int64)
MICRO_BATCH = MicroBatch(
    input_ids=ROW,
    labels=torch.full((1, 4), IGNORED),
    position_ids=ROW,
    cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
    max_seqlen=4,
)


class Scripted:
    """An engine with losses and gradient norms from a list; what the loop does with them is the test."""

    world = WORLD
    loss_scale: float | None = None

    def __init__(self, losses: Sequence[float], norm: float = 1.0) -> None:
        self.losses = list(losses)
        self.norm = norm
        self.rates: list[float] = []

    def step(self, micro_batches: Any, *, target_tokens: int, learning_rate: float) -> StepResult:
        loss = self.losses[len(self.rates)]
        self.rates.append(learning_rate)
        return StepResult(
            loss=torch.tensor(loss),
            grad_norm=torch.tensor(self.norm),
            skipped=torch.tensor(float(not math.isfinite(loss + self.norm))),
            loss_scale=None if self.loss_scale is None else torch.tensor(self.loss_scale),
        )

    def evaluate(self, micro_batch: MicroBatch) -> torch.Tensor:
        return torch.tensor(6.0)


class Evaluation:
    target_tokens = 3

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter([MICRO_BATCH])


class Falling(Evaluation):
    """Evaluations with these losses, one after the other."""

    def __init__(self, losses: Sequence[float]) -> None:
        self._targets = iter([2 * 3.0 / loss for loss in losses])

    def __iter__(self) -> Iterator[MicroBatch]:
        self.target_tokens = next(self._targets)  # type: ignore[assignment]  # the sum of losses is 6
        return iter([MICRO_BATCH])


class Diary:
    """An observer that writes down what it is told, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.losses: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.lines.append(f"step {report.step}")
        self.losses.append(report.loss)

    def on_eval(self, *, step: int, loss: float, samples: Sequence[object] = (), **_: object) -> None:
        self.lines.append(f"eval {step}: {loss}{' with samples' if samples else ''}")

    def on_save(self, saved: Saved) -> None:
        self.lines.append(f"save {saved.step}")


def stream() -> Iterator[StepBatch]:
    while True:
        yield StepBatch(micro_batches=[MICRO_BATCH], target_tokens=3, tokens=4, epoch=0)


def make(
    losses: Sequence[float],
    *,
    steps: int,
    start: int = 0,
    norm: float = 1.0,
    evaluated: bool | None = None,
    evaluations: Sequence[float] | None = None,
    **train: Any,
) -> tuple[Loop, Diary]:
    job = Job.model_validate(
        {
            "name": "t",
            "model": {"source": "x"},
            "data": {"train": "x"},
            "train": {"steps": steps, "eval_every": 0, "save_every": 0, "worst_case_first": False, **train},
        }
    )
    diary = Diary()
    loop = Loop(
        job=job,
        engine=Scripted(losses, norm),  # type: ignore[arg-type]
        stream=stream(),  # type: ignore[arg-type]
        evaluation=Evaluation() if evaluations is None else Falling(evaluations),  # type: ignore[arg-type]
        ranks=Ranks(WORLD),
        stop=StopSignal(),
        observer=diary,
        saver=Saver(lambda progress: progress.step),
        progress=Progress(step=start),
        total_steps=steps,
        evaluations=[(start, 6.0)] if (start > 0 if evaluated is None else evaluated) else [],
    )
    return loop, diary


def test_evaluates_before_on_the_way_and_after_and_saves_the_last_step() -> None:
    loop, diary = make([5, 4, 3, 2], steps=4, eval_every=2, save_every=3)
    assert loop.run(4)
    assert diary.lines == [
        "eval 0: 2.0",
        "step 1",
        "step 2",
        "eval 2: 2.0",
        "step 3",
        "save 3",
        "step 4",
        "save 4",
        "eval 4: 2.0",
    ]
    assert diary.losses == [5, 4, 3, 2]


@pytest.mark.parametrize("every", [0, 9])
def test_the_worst_case_is_saved_after_the_first_step_if_there_are_saves(every: int) -> None:
    loop, diary = make([5, 4], steps=2, worst_case_first=True, save_every=every)
    loop.run(2)
    first = ["save 1"] if every else []
    assert diary.lines == ["eval 0: 2.0", "step 1", *first, "step 2", "save 2", "eval 2: 2.0"]


def test_a_pause_is_saved_and_not_evaluated_as_an_end() -> None:
    loop, diary = make([5, 4, 3], steps=3)
    assert loop.run(2)
    assert diary.lines == ["eval 0: 2.0", "step 1", "step 2", "save 2"]


def test_a_stop_signal_saves_and_says_so() -> None:
    loop, diary = make([5] * 9, steps=9)
    loop.stop.requested = True
    assert not loop.run(9)
    assert diary.lines == ["eval 0: 2.0", "step 1", "save 1"]


def test_what_is_evaluated_has_been_saved() -> None:
    """An evaluation that fails, or is cut off, loses no step."""

    def fails() -> Iterator[MicroBatch]:
        if loop.progress.step:
            raise RuntimeError("out of memory")
        return iter([MICRO_BATCH])

    loop, diary = make([5, 4, 3, 2], steps=4, eval_every=2, save_every=2)
    loop.evaluation.__class__ = type("Failing", (Evaluation,), {"__iter__": lambda _: fails()})
    with pytest.raises(RuntimeError):
        loop.run(4)
    assert diary.lines == ["eval 0: 2.0", "step 1", "step 2", "save 2"]


@pytest.mark.parametrize("start", [0, 2, 4])
def test_an_evaluation_that_was_missed_is_made_up_for(start: int) -> None:
    loop, diary = make([5] * (4 - start), steps=4, start=start, evaluated=False, eval_every=2)
    assert loop.run(4)
    assert diary.lines[0] == f"eval {start}: 2.0"


def test_a_stop_is_not_kept_waiting_by_an_evaluation() -> None:
    loop, diary = make([5] * 9, steps=9, eval_every=1)
    loop.stop.requested = True
    assert not loop.run(9)
    assert diary.lines == ["eval 0: 2.0", "step 1", "save 1"]


def test_a_finished_run_that_is_resumed_does_nothing() -> None:
    loop, diary = make([], steps=3, start=3)
    assert loop.run(3)
    assert diary.lines == []


def test_a_resumed_run_is_not_evaluated_at_its_start() -> None:
    loop, diary = make([5, 4], steps=4, start=2)
    loop.run(4)
    assert diary.lines == ["step 3", "step 4", "save 4", "eval 4: 2.0"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize(("step", "cause"), [(1, "the weights or config"), (2, "optimizer.learning_rate")])
def test_a_loss_that_is_not_finite_ends_the_run_unsaved(loss: float, step: int, cause: str) -> None:
    loop, diary = make([5] * (step - 1) + [loss, 3], steps=3)
    with pytest.raises(DivergedError, match="not applied") as caught:
        loop.run(3)
    assert caught.value.problems[0].where == f"step {step}"
    assert cause in caught.value.problems[0].fix
    assert not [line for line in diary.lines if line.startswith("save")]


def test_a_norm_that_is_not_finite_ends_the_run_but_not_in_fp16() -> None:
    loop, _ = make([5, 4], steps=2, norm=math.inf)
    with pytest.raises(DivergedError):
        loop.run(2)
    loop, _ = make([5, 4], steps=2, norm=math.inf, precision="fp16")
    assert loop.run(2), "the loss scale is about to be halved"


def test_a_gradient_of_zero_ends_the_run() -> None:
    loop, _ = make([5, 5], steps=2, norm=0.0)
    with pytest.raises(DivergedError, match="exactly zero"):
        loop.run(2)


@pytest.mark.parametrize(("scale", "ends"), [(2.0, False), (1.0, True)])
def test_fp16_that_overflows_at_every_scale_ends_the_run(scale: float, ends: bool) -> None:
    loop, diary = make([5, 5], steps=2, norm=math.inf, precision="fp16")
    loop.engine.loss_scale = scale
    with pytest.raises(DivergedError, match="loss scale of 1") if ends else nullcontext():
        loop.run(2)
    assert ("save 2" in diary.lines) != ends


def test_without_a_lower_loss_it_ends_and_keeps_the_best_step() -> None:
    """Losses of the evaluations at 0, 2, 4, ...: the one before training does not count."""
    loop, diary = make([5] * 20, steps=20, eval_every=2, patience=2, evaluations=[1, 4, 3, 3.5, 3, 2])
    kept: list[tuple[int, int | None]] = []
    loop.saver = Saver(lambda progress: kept.append((progress.step, progress.best)) or 1)
    assert loop.run(20), "it is done"
    assert loop.worse
    assert diary.lines[-2:] == ["eval 8: 3.0", "save 8"]
    assert kept == [(2, 2), (4, 4), (8, 4)], (
        "each best step is saved, and the last; an equal loss is no better"
    )


def test_patience_0_keeps_the_best_step_and_never_ends() -> None:
    loop, _ = make([5] * 8, steps=8, eval_every=2, save_every=4, patience=0, evaluations=[9, 2, 3, 4, 5])
    kept: list[tuple[int, int | None]] = []
    loop.saver = Saver(lambda progress: kept.append((progress.step, progress.best)) or 1)
    assert loop.run(8)
    assert not loop.worse
    assert kept == [(2, 2), (4, 2), (8, 2)]


def test_keeping_the_best_saves_it_as_patience_does() -> None:
    loop, _ = make(
        [5] * 8, steps=8, eval_every=2, save_every=4, keep={"best": 1}, evaluations=[9, 2, 3, 4, 5]
    )
    kept: list[tuple[int, int | None]] = []
    loop.saver = Saver(lambda progress: kept.append((progress.step, progress.best)) or 1)
    assert loop.run(8)
    assert not loop.worse
    assert kept == [(2, 2), (4, 2), (8, 2)]


def test_a_resumed_run_counts_the_evaluations_before() -> None:
    loop, diary = make([5] * 2, steps=8, start=6, eval_every=2, patience=2, evaluations=[])
    loop.evaluations = [(2, 1.0), (4, 2.0), (6, 3.0)]
    assert loop.run(8)
    assert diary.lines == []


def test_samples_go_with_an_evaluation() -> None:
    loop, diary = make([5], steps=1)
    loop.sample = lambda: [("a", "b")]
    assert loop.run(1)
    assert diary.lines[-1] == "eval 1: 2.0 with samples"


class Disk:
    """Where the thread writes; it is done when `go` is set."""

    def __init__(self) -> None:
        self.go, self.copied, self.written = threading.Event(), list[int](), list[int]()

    def stage(self, progress: Progress) -> Callable[[], int]:
        step = progress.step
        self.copied.append(step)

        def write() -> int:
            assert self.go.wait(30)
            self.written.append(step)
            return 10

        return write

    def save(self, progress: Progress) -> int:
        self.copied.append(progress.step)
        self.written.append(progress.step)
        return 10


class Watching(Diary):
    """Lets the disk finish after a step."""

    def __init__(self, disk: Disk, step: int) -> None:
        super().__init__()
        self.disk, self.step = disk, step

    def on_step(self, report: Any) -> None:
        super().on_step(report)
        if report.step == self.step:
            self.disk.go.set()


def test_training_goes_on_and_a_checkpoint_counts_when_it_is_on_disk() -> None:
    disk = Disk()
    loop, _ = make([5] * 6, steps=6, save_every=2, evaluated=True)
    loop.saver, loop.observer = Saver(disk.save, disk.stage), Watching(disk, 3)
    assert loop.run(6)
    lines = [line for line in loop.observer.lines if not line.startswith("eval")]  # type: ignore[attr-defined]
    assert lines.index("save 2") > lines.index("step 3"), "it was written during the third step"
    assert [line for line in lines if line.startswith("save")] == ["save 2", "save 4", "save 6"]
    assert disk.copied == disk.written == [2, 4, 6]


def test_the_next_save_waits_for_the_one_before(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(saving, "LONG_SECONDS", 0.05)
    disk = Disk()
    saver = Saver(disk.save, disk.stage)
    assert saver.save(Progress(step=2), wait=False) == []
    threading.Timer(0.2, disk.go.set).start()
    (before,) = saver.save(Progress(step=4), wait=False)
    assert (before.step, disk.written[:1]) == (2, [2])
    assert "step 4: waited 0 s for the checkpoint of step 2" in capsys.readouterr().err
    assert [saved.step for saved in saver.wait()] == [4]
    assert not saver.ended


def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_the_next_step() -> None:
    def fails() -> int:
        raise MachineError("the disk is full")

    class Waiting(Diary):
        def on_step(self, report: Any) -> None:
            super().on_step(report)
            while report.step == 3 and not saver.ended:
                time.sleep(0.001)

    saver = Saver(Disk().save, lambda _: fails)
    loop, _ = make([5] * 50, steps=50, worst_case_first=True, save_every=50, evaluated=True)
    loop.saver = saver
    loop.observer = diary = Waiting()
    with pytest.raises(MachineError, match="the disk is full"):
        loop.run(50)
    assert len(diary.lines) <= 4
    assert not [line for line in diary.lines if line.startswith("save")]


def test_what_was_copied_is_written_when_training_fails() -> None:
    disk = Disk()
    disk.go.set()
    loop, diary = make([5, 5, float("nan")], steps=9, save_every=2, evaluated=True)
    loop.saver = Saver(disk.save, disk.stage)
    with pytest.raises(Exception, match="not applied"):
        loop.run(9)
    assert "save 2" in diary.lines
    assert disk.written == [2]
