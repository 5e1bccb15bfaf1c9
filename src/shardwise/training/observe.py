"""Records what the loop reports on rank 0: events.jsonl, trackers, the display."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from shardwise.device import Unavailable
from shardwise.device.rapl import PARTS
from shardwise.energy import END_SECONDS, StepJoules
from shardwise.errors import JobError, printable
from shardwise.record.energy import WRITE_SECONDS, Used, read_used, write_used
from shardwise.record.read import read_events
from shardwise.record.schema import EvalEvent, Event, ResumeEvent, RunEvent, SaveEvent, StepEvent, StopEvent
from shardwise.record.trackers import Trackers
from shardwise.record.write import EventWriter, RunFolder
from shardwise.report.compare import row_of
from shardwise.report.terminal import compared
from shardwise.training.loop import StepReport
from shardwise.training.meter import UNKNOWN, lag, sources, why_no_energy, why_no_host
from shardwise.training.mirror import Mirroring
from shardwise.training.saving import Saved
from shardwise.units import duration, gib

Floats = Sequence[float]

BAR_WIDTH = 110  # Columns of a terminal; in a narrower one the numbers need the bar's place
OF_LAUNCH = ("strategy", "processes", "total_steps")  # Where one differs, a resumed run has another header
QUIET_SECONDS = 10.0  # Seconds between two lines where there is no terminal


class Display:
    """Shows steps as they finish, on stderr; stdout stays free for results."""

    def __init__(self, *, first_step: int, total_steps: int) -> None:
        self.console = Console(stderr=True)
        self.total_steps = total_steps
        self._spoke = -math.inf
        bar = [BarColumn(bar_width=24)] if self.console.width >= BAR_WIDTH else []
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            *bar,
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
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
        self.console.print(Text(printable(text)), soft_wrap=True)

    def step(self, report: StepReport) -> None:
        peak = max(report.memory["peak_reserved_bytes"])
        text = (
            f"loss {report.loss:.4f} lr {report.learning_rate:.1e} norm {report.grad_norm:.2f} "
            f"{report.tokens / report.seconds:,.0f} tok/s {gib(peak)}"
        )
        self._bar.update(self._task, completed=report.step, description=text)
        now, last = time.monotonic(), report.step == self.total_steps
        if not self.console.is_terminal and (last or now - self._spoke >= QUIET_SECONDS):
            self._spoke = now
            self.say(f"step {report.step}/{self.total_steps}  {text}")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What turns tokens per second into FLOP/s and MFU."""

    gpus: int  # Processes, where there is no GPU
    flops_per_token: float
    peak_flops: float | None
    why_no_peak: str | None


class Quiet:
    """The observer of the other ranks."""

    stopping: str | None = None

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_eval(self, **_: object) -> None: ...

    def on_save(self, saved: Saved) -> None: ...

    def finish(self, **_: object) -> None: ...


class Recorder:
    """Writes every event to the run folder and shows it."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        job: Mapping[str, Any],
        header: RunEvent,
        speed: Speed,
        resumed_step: int | None,
        cards: Sequence[str | None] = (),
        first: Sequence[float] = (),
        waited: float = 0.0,
        stop: Callable[[], object] = lambda: None,
    ) -> None:
        """`cards`, `first`: UUIDs and energy counters by rank, as they were `waited` seconds ago.

        `stop` asks the loop to stop.
        """
        energy, outside = sources()
        self.no_energy, self._simulated = why_no_energy(), energy == "simulated"
        self._earlier = _earlier(folder, simulated=self._simulated, measured=self.no_energy is None)
        self.speed, self._folder = speed, folder
        self.step, self._total_steps = resumed_step or 0, header.total_steps
        self._began = self._last = time.monotonic()
        self._waited, self._written = waited, -math.inf
        self._host: dict[str, float] = {}  # joules
        self._events = EventWriter(folder.events, resumed_step=resumed_step)
        self._trackers = Trackers(job["tracking"], run_dir=folder.path, job=job)
        self._display = Display(first_step=self.step, total_steps=header.total_steps)
        header = replace(header, energy_source=energy, outside_allocator_source=outside)
        launches = [event for event in read_events(folder.events) if event["kind"] == header.kind]
        if not launches or any(launches[-1].get(key) != getattr(header, key) for key in OF_LAUNCH):
            self._events.write(header)
        if resumed_step is not None:
            self._events.write(ResumeEvent(step=resumed_step))
        self._joules = StepJoules(self.no_energy, cards=cards, first=_known(first), lag=lag(), waited=waited)
        self.last_joules: float | None = None
        self._stop, self._budget_kwh = stop, (job.get("energy") or {}).get("budget_kwh")
        self.stopping: str | None = None
        """Why the run is asked to stop by its own record: its budget is used up."""
        self._finished = False
        self.mirror: Mirroring | None = None

    def __enter__(self) -> Recorder:
        self._display.__enter__()
        if self.step:
            over = self.step >= self._total_steps
            said = "nothing is left to train after" if over else "going on after"
            self._display.say(f"{said} step {self.step} of {self._total_steps}")
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._finished:
            self.finish(step=self.step, status="failed")
        self._display.__exit__()
        self._trackers.close()
        self._events.close()
        self._folder.close()

    def on_step(self, report: StepReport) -> None:
        self.step = report.step
        per_second = report.tokens / report.seconds
        per_gpu = per_second / self.speed.gpus
        flops, peak = per_gpu * self.speed.flops_per_token, self.speed.peak_flops
        memory = report.memory
        joules = self._joules.of_step(_known(memory["energy_millijoules"]))
        self.last_joules = None if isinstance(joules, Unavailable) else joules
        event = StepEvent(
            **{name: value for name, value in vars(report).items() if name != "memory"},
            tokens_per_second=per_second,
            tokens_per_second_per_gpu=per_gpu,
            tflops_per_gpu=flops / 1e12,
            mfu=None if peak is None else flops / peak,
            mfu_unavailable=self.speed.why_no_peak,
            memory_allocated_bytes=memory["allocated_bytes"],
            memory_reserved_bytes=memory["reserved_bytes"],
            peak_memory_allocated_bytes=memory["peak_allocated_bytes"],
            peak_memory_reserved_bytes=memory["peak_reserved_bytes"],
            outside_allocator_bytes=_all_known(memory["outside_allocator_bytes"]),
            host_memory_bytes=memory["host_memory_bytes"],
            pinned_memory_bytes=_all_known(memory["pinned_memory_bytes"]),
            joules=self.last_joules,
            joules_unavailable=joules.reason if isinstance(joules, Unavailable) else None,
        )
        self._host, self._last = _host([memory[f"{part}_millijoules"] for part in PARTS]), time.monotonic()
        self._events.write(event)
        self._trackers.log(report.step, _numbers(event))
        self._display.step(report)
        self._count()

    def on_eval(self, *, step: int, loss: float, seconds: float, **more: Any) -> None:
        self._between("evaluation", seconds)
        self._events.write(EvalEvent(step=step, loss=loss, seconds=seconds, **more))
        self._trackers.log(step, {"eval/loss": loss})
        numbers = f"evaluation loss {loss:.4f} (perplexity {math.exp(min(loss, 50.0)):.4g})"
        self._display.say(f"step {step}: {numbers}, {duration(seconds)}")
        for prompt, text in more.get("samples", ()):
            self._display.say(f"  {prompt} -> {text}")

    def on_save(self, saved: Saved) -> None:
        if saved.background_seconds is None:
            self._between("saving", saved.seconds)
        event = SaveEvent(step=saved.step, seconds=saved.seconds, bytes=saved.size_bytes)
        copied = None if self.mirror is None else self.mirror.saved()
        self._events.write(replace(event, background_seconds=saved.background_seconds, mirror=copied))

    def record(self, event: Event) -> None:
        """Write an event of another observer."""
        self._events.write(event)

    def say(self, text: str) -> None:
        """Show a block to the user, as it is."""
        self._display.console.print(Text(text), soft_wrap=True)

    def finish(
        self, *, step: int, status: str, millijoules: Floats = (), host: Sequence[Floats] = ()
    ) -> None:
        """Energy counters after all that the run does: of GPUs by rank, and of hosts, PARTS by rank."""
        self._finished = True
        if millijoules:
            self._joules.finish(_known(millijoules), time.monotonic() - self._last)
            self._host = _host(host) or self._host
        self._written = -math.inf
        self._count()
        kwh, seconds = None if self.no_energy else self._used().kwh, time.monotonic() - self._began
        stop = StopEvent(step=step, status=status, seconds=seconds, kwh=kwh, kwh_unavailable=self.no_energy)
        copied = None if self.mirror is None else self.mirror.state(last=status != "failed")
        self._events.write(replace(stop, mirror=copied))
        advice = {
            "finished": f"next: shardwise report {self._folder.path}",
            "paused": f"shardwise train {self._folder.path} --resume goes on",
        }
        if status in advice and self.step:
            for label, text in compared(row_of(self._folder.path)[0]).items():
                self._display.say(f"{label}: {text}")
        if status in advice:
            self._display.say(f"{status} after step {step} of {self._total_steps}; {advice[status]}")

    def _between(self, phase: str, seconds: float) -> None:
        self._joules.interrupt(phase, seconds)
        self._last = time.monotonic()

    def _used(self) -> Used:
        """By all launches so far."""
        seconds, joules = self._waited + time.monotonic() - self._began, self._joules.joules
        now = Used(
            joules=joules,
            error_joules=END_SECONDS * joules / seconds,
            seconds=seconds,
            phases=self._joules.phases,
            host=self._host,
            host_unavailable=why_no_host(),
            simulated=self._simulated,
        )
        return self._earlier.plus(now)

    def _count(self) -> None:
        """Write the meter if it is due, and ask to stop once the budget is used up."""
        if self.no_energy is not None:
            return
        used, now = self._used(), time.monotonic()
        if now - self._written >= WRITE_SECONDS:
            self._written = now
            write_used(self._folder.path, used)
        if self._budget_kwh is not None and used.kwh >= self._budget_kwh and self.stopping is None:
            self.stopping = f"energy.budget_kwh {self._budget_kwh:g} is used up"
            self._stop()


def _earlier(folder: RunFolder, *, simulated: bool, measured: bool) -> Used:
    """What the launches before this one have used. JobError where that is simulated and this is not."""
    found = read_used(folder.path)
    if found is not None and measured and found.simulated != simulated:
        kind, flag = ("simulated", "with") if found.simulated else ("measured", "without")
        what = f"the energy of this run was {kind} so far, and would not be from here on"
        raise JobError(what, where=str(folder.path), fix=f"resume {flag} --simulate-power")
    return found or Used()


def _known(millijoules: Sequence[float]) -> list[int | None]:
    return [None if one == UNKNOWN else int(one) for one in millijoules]


def _host(by_part: Sequence[Sequence[float]]) -> dict[str, float]:
    """Joules of all nodes, for the parts that each node can read."""
    known = zip(PARTS, by_part, strict=False)
    return {part: sum(values) / 1000.0 for part, values in known if UNKNOWN not in values}


def _numbers(event: StepEvent) -> dict[str, float]:
    """A step's numbers for the trackers."""
    numbers = {
        "train/loss": event.loss,
        "train/learning_rate": event.learning_rate,
        "train/grad_norm": event.grad_norm,
        "speed/tokens_per_second": event.tokens_per_second,
        "speed/tokens_per_second_per_gpu": event.tokens_per_second_per_gpu,
        "speed/step_seconds": event.seconds,
        "memory/peak_reserved_bytes": float(max(event.peak_memory_reserved_bytes)),
    }
    if event.mfu is not None:
        numbers["speed/mfu"] = event.mfu
    if event.joules is not None:
        numbers["energy/joules_per_token"] = event.joules / event.tokens
        numbers["energy/joules_per_step"] = event.joules
        numbers["energy/watts"] = event.joules / event.seconds
    return numbers


def _all_known(values: list[int]) -> list[int] | None:
    return None if UNKNOWN in values else values
