"""Shows the progress: a live bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.training.loop import StepReport
from shardwise.units import count, duration, gib

QUIET_SECONDS = 10.0
"""Seconds between two lines where there is no terminal."""


class Display:
    """Shows steps as they finish, on stderr; stdout stays free for results."""

    def __init__(self, *, first_step: int, total_steps: int) -> None:
        self.console = Console(stderr=True)
        self.total_steps = total_steps
        self._spoke = -math.inf
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=first_step)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def step(self, report: StepReport) -> None:
        peak = max(report.memory["peak_reserved_bytes"])
        text = (
            f"loss {report.loss:.4f}  lr {report.learning_rate:.2e}  norm {report.grad_norm:.2f}  "
            f"{count(report.tokens / report.seconds)} tok/s  {gib(peak)}"
        )
        self._bar.update(self._task, completed=report.step, description=text)
        now = time.monotonic()
        last = report.step == self.total_steps
        if not self.console.is_terminal and (last or now - self._spoke >= QUIET_SECONDS):
            self._spoke = now
            self.say(f"step {report.step}/{self.total_steps}  {text}")

    def evaluation(self, *, step: int, loss: float, seconds: float) -> None:
        perplexity = math.exp(min(loss, 50.0))
        self.say(
            f"step {step}: evaluation loss {loss:.4f} (perplexity {perplexity:.4g}), {duration(seconds)}"
        )
