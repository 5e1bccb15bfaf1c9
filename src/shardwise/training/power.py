"""Chooses the power limit of a run's GPUs in its own first steps, and puts the present one back at the end.

Rank 0's observer around the recorder, for one node. Whatever fails here, the run goes on and measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.device import Device, Unavailable
from shardwise.device.find import fake_file
from shardwise.errors import CheckpointError, MachineError
from shardwise.folders import replace_json
from shardwise.job.schema import Energy
from shardwise.power.control import Permission, PowerControl, PowerRange, permission
from shardwise.power.objective import Objective
from shardwise.power.search import Choice, Request, Search, Window
from shardwise.record.energy import FOLDER
from shardwise.record.schema import PowerEvent
from shardwise.training.loop import StepReport
from shardwise.training.meter import UNKNOWN
from shardwise.training.observe import Recorder
from shardwise.training.saving import Saved
from shardwise.training.windows import Held, Measured, Windows

PROFILE = f"{FOLDER}/profile.json"
LEVEL_WATTS = 25.0
WATCH_STEPS, WATCH_SECONDS = 8, 10.0  # windows after the choice: readings are off by up to 0.2 s at both ends


@dataclass
class _Tally:
    """Steps with a reading."""

    steps: int = 0
    seconds: float = 0.0
    joules: float = 0.0

    def add(self, other: _Tally) -> _Tally:
        return _Tally(self.steps + other.steps, self.seconds + other.seconds, self.joules + other.joules)


class PowerTuner:
    """Records every step, and sets the power limit between steps."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        energy: Energy,
        device: Device,
        cards: Sequence[str | None],
        key: Mapping[str, Any],
        folder: Path,
    ) -> None:
        """`cards`: UUIDs by rank. `key`: what a saved search has to match, in addition to the GPUs."""
        self._recorder, self._energy, self._device, self._folder = recorder, energy, device, folder
        self._uuids = [card for card in dict.fromkeys(cards) if card is not None]
        self._ranks = [cards.index(uuid) for uuid in self._uuids]
        self._nowhere = None in cards
        self._key = dict(key)
        self._step = recorder.step
        self._control: PowerControl | None = None
        self._held: Held | None = None
        self._windows = Windows()
        self._watts: int | None = None
        self._request: Request | None = None
        self._chosen: Choice | None = None
        self._searching, self._after = _Tally(), _Tally()
        self._simulated = fake_file() is not None

    @property
    def stopping(self) -> str | None:
        return self._recorder.stopping

    def __enter__(self) -> PowerTuner:
        self._recorder.__enter__()
        try:
            self._start()
        except MachineError as error:
            problem = error.problems[0]
            self._measure(Permission(status="unavailable", reason=problem.what, fixes=[problem.fix]).block())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._end()
        finally:
            self._recorder.__exit__(*exception)

    def on_step(self, report: StepReport) -> None:
        self._recorder.on_step(report)
        self._step = report.step
        if self._control is None or self._energy.power_limit is not None:
            return
        joules = self._recorder.last_joules
        if joules is not None:
            tally = self._searching if self._chosen is None else self._after
            tally.steps, tally.seconds = tally.steps + 1, tally.seconds + report.seconds
            tally.joules += joules
        values = [report.memory["energy_millijoules"][rank] for rank in self._ranks]
        measuring = self._windows.measuring
        found = self._windows.add(report.seconds, None if UNKNOWN in values else values)
        if self._windows.measuring and not measuring and self._held is not None:
            self._held.clear()
        if found is not None:
            self._take(found)

    def on_eval(self, *, step: int, loss: float, seconds: float, **more: Any) -> None:
        self._windows.interrupt()
        self._recorder.on_eval(step=step, loss=loss, seconds=seconds, **more)

    def on_save(self, saved: Saved) -> None:
        self._windows.interrupt()
        self._recorder.on_save(saved)

    def finish(self, *, step: int, status: str, **energy: Any) -> None:
        self._end()
        self._recorder.finish(step=step, status=status, **energy)

    def _start(self) -> None:
        """Ask for permission, take control, and begin or go on with the search."""
        why = "a rank has no GPU that the driver shows" if self._nowhere else self._recorder.no_energy
        if why is not None:
            reason = f"their energy is not known: {why}"
            return self._measure(Permission(status="unavailable", reason=reason).block())
        missing = set(self._uuids) - {card.uuid for card in self._device.cards}
        if missing:
            reason = "the run has GPUs on other nodes, and limits are set on one"
            return self._measure(Permission(status="unavailable", reason=reason).block())
        found = permission(self._device, self._uuids)
        if not found.allowed:
            return self._measure(found.block())
        fixed = self._energy.power_limit
        limits, notes = levels(self._energy.power_limits if fixed is None else [fixed], found.ranges)
        if fixed is not None and fixed not in limits:
            return self._measure("\n  ".join(["the power limit is not set, only measured", *notes]))
        self._key |= self._of_gpus(found.ranges, limits)
        self._control = PowerControl(self._device, self._uuids, run=self._folder)
        self._control.__enter__()
        notes += self._control.notes
        self._control.notes.clear()
        if fixed is not None:
            if self._set(fixed, ["the job asks for it", *notes]):
                self._recorder.say(f"power limit: {fixed} W{self._tag()}, until the run ends")
            return None
        self._search, said = self._begun(limits)
        self._held = Held(self._device, self._uuids)
        text = objective_of(self._energy, len(self._uuids)).text()
        about = f"{len(limits)} limits from {limits[0]} to {limits[-1]} W; objective: {text}"
        self._log("begin", [about, *notes, *said])
        return self._ask()

    def _of_gpus(self, ranges: Mapping[str, PowerRange], limits: list[int]) -> dict[str, Any]:
        driver = self._device.driver_version()
        names = {card.uuid: card.name for card in self._device.cards}
        spans = [[ranges[uuid].least_watts, ranges[uuid].most_watts] for uuid in self._uuids]
        return {
            "gpus": [names[uuid] for uuid in self._uuids],
            "driver": driver if isinstance(driver, str) else None,
            "ranges_watts": spans,
            "limits_watts": limits,
            "simulated": self._simulated,
        }

    def _begun(self, limits: list[int]) -> tuple[Search, list[str]]:
        """The search that the run folder has, if it belongs to this run; else a new one."""
        objective, path = objective_of(self._energy, len(self._uuids)), self._folder / PROFILE
        if not path.exists():
            return Search(limits, objective), []
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            key, text = saved["key"], saved["search"]
            now = json.loads(json.dumps(self._key))
            changed = [name for name in {**key, **now} if key.get(name) != now.get(name)]
            if not changed:
                search = Search.from_json(text, objective)
                return search, [f"{len(search.windows)} windows of earlier launches count"]
            why = f"{', '.join(changed)} changed"
        except CheckpointError as error:
            why = error.problems[0].what
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            why = f"{PROFILE} is damaged"
        return Search(limits, objective), [f"the search begins again: {why}"]

    def _take(self, found: Measured) -> None:
        assert self._watts is not None
        held = None if self._held is None else self._held.value
        window = Window(
            watts=self._watts, steps=found.steps, seconds=found.seconds, joules=found.joules, held=held
        )
        if self._held is not None:
            self._held.clear()
        if self._request is None:
            if self._search.drifted(window):
                self._search, self._chosen = self._search.recheck(), None
                self._log("drift", ["time or energy at the chosen limit has changed: it is searched again"])
                self._ask()
            return
        self._search.tell(window)
        self._save()
        self._log("window", [self._request.why], window=window)
        self._ask()

    def _ask(self) -> None:
        """Go on with the search: set what it asks for, or what it has chosen."""
        self._request = request = self._search.ask()
        if request is None:
            self._choose()
            return
        changed = request.watts != self._watts
        if self._set(request.watts, [request.why]):
            self._windows.begin(
                steps=request.steps,
                seconds=request.seconds,
                warmup_steps=request.warmup_steps if changed else 0,
                warmup_seconds=request.warmup_seconds if changed else 0.0,
            )

    def _choose(self) -> None:
        choice = self._search.choice()
        changed = choice.watts != self._watts
        if not self._set(choice.watts, ["it is chosen"]):
            return
        self._chosen = choice
        self._windows.begin(steps=WATCH_STEPS, seconds=WATCH_SECONDS, warmup_steps=2 if changed else 0)
        reasons = [*choice.reasons, *self._against("The search", self._searching)]
        self._log("choice", reasons, tally=self._searching)
        self._recorder.say("\n  ".join([f"power limit: {choice.watts} W{self._tag()}", *reasons]))

    def _set(self, watts: int, why: list[str]) -> bool:
        """Whether the cards have this limit now."""
        assert self._control is not None
        if watts == self._watts:
            return True
        applied = self._control.set(watts)
        if isinstance(applied, Unavailable):
            lines = [f"power limits are measured from here on, not set: {applied.reason}"]
            self._measure("\n  ".join(lines + self._control.notes))
            return False
        self._watts = watts
        self._log("level", why, applied=applied)
        return True

    def _against(self, who: str, tally: _Tally) -> list[str]:
        """What steps have saved against the present limit at the start, as sentences."""
        saved = self._saved(tally)
        if saved is None:
            return []
        joules, seconds = saved
        share = [
            100 * part / (part + spent) for part, spent in ((joules, tally.joules), (seconds, tally.seconds))
        ]
        return [
            f"{who}: {tally.steps} steps, {tally.seconds:.1f} s, {tally.joules / 1000:.3g} kJ. Compared with "
            f"{self._search.limits[-1]} W: {-share[0]:+.1f} % energy and {-share[1]:+.1f} % time."
        ]

    def _saved(self, tally: _Tally) -> tuple[float, float] | None:
        """Joules and seconds that these steps would have taken more at the highest limit."""
        if not tally.steps:
            return None
        top = [one for one in self._search.windows if one.watts == self._search.limits[-1]]
        steps = sum(one.steps for one in top)
        if not steps:
            return None
        each = (sum(one.joules for one in top) / steps, sum(one.seconds for one in top) / steps)
        return each[0] * tally.steps - tally.joules, each[1] * tally.steps - tally.seconds

    def _save(self) -> None:
        path = self._folder / PROFILE
        try:
            path.parent.mkdir(exist_ok=True)
            replace_json(path, {"schema": 1, "key": self._key, "search": self._search.to_json()})
        except OSError as error:
            self._recorder.say(f"warning: the search for a power limit is not saved: {error}")

    def _measure(self, block: str) -> None:
        """Set nothing from here on; what was set is put back."""
        self._release()
        self._log("measure", block.splitlines())
        self._recorder.say(block)

    def _end(self) -> None:
        """Put everything back, and say what it was good for."""
        if self._control is None:
            return
        total = self._searching.add(self._after)
        reasons = self._against("In this launch, the search included", total)
        if self._request is not None:
            count, lost = len(self._search.windows), self._windows.interrupted
            reasons = [f"The search has not ended: {count} windows are kept for the next launch, {lost} were "
                       "interrupted."]  # fmt: skip
        reasons += self._release()
        self._log("end", reasons, tally=total)
        self._recorder.say("\n  ".join([f"power limits put back{self._tag()}", *reasons]))

    def _release(self) -> list[str]:
        control, self._control = self._control, None
        if self._held is not None:
            self._held.end()
        if control is None:
            return []
        with suppress(MachineError, OSError):  # its guardian tries again
            control.close()
        return control.notes

    def _tag(self) -> str:
        return " (SIMULATED)" if self._simulated else ""

    def _log(
        self,
        what: str,
        reasons: list[str],
        *,
        applied: Mapping[str, float] | None = None,
        window: Window | None = None,
        tally: _Tally | None = None,
    ) -> None:
        part = window or tally
        saved = None if tally is None else self._saved(tally)
        event = PowerEvent(
            step=self._step,
            what=what,
            reasons=reasons,
            watts=self._watts,
            limits_watts=None if applied is None else dict(applied),
            steps=None if part is None else part.steps,
            seconds=None if part is None else part.seconds,
            joules=None if part is None else part.joules,
            held=None if window is None else window.held,
            saved_joules=None if saved is None else saved[0],
            saved_seconds=None if saved is None else saved[1],
            simulated=self._simulated,
        )
        self._recorder.record(event)


def objective_of(energy: Energy, gpus: int) -> Objective:
    """The job's objective with the numbers that it uses."""
    kind = energy.objective
    assert kind != "measure"
    cost = kind == "cost"
    return Objective(
        kind=kind,
        gpus=gpus,
        eta=energy.eta if kind == "eta" else None,
        price_per_kwh=energy.price_per_kwh if cost else None,
        price_per_gpu_hour=energy.price_per_gpu_hour if cost else None,
        max_slowdown=energy.max_slowdown if kind == "max-slowdown" else None,
    )


def levels(
    asked: Literal["auto"] | Sequence[int], ranges: Mapping[str, PowerRange]
) -> tuple[list[int], list[str]]:
    """Limits to try in watts, lowest first, and what the user should know about them.

    The highest is the present limit; each card has it or its own present limit, never more.
    """
    present, notes = [span.present_watts for span in ranges.values()], list[str]()
    top, least = int(max(present)), max(span.least_watts for span in ranges.values())
    if min(present) < top:
        notes.append(
            f"the GPUs have limits from {min(present):.0f} to {top} W now: none gets more than it has"
        )
    if isinstance(asked, str):
        count = max(1, round((top - least) / LEVEL_WATTS))
        return sorted({round(top - (top - least) * part / count) for part in range(count + 1)}), notes
    out = sorted({watts for watts in asked if not least <= watts <= top})
    if out:
        text = ", ".join(map(str, out))
        notes.append(f"left out, as they are not within {least:.0f} W and the present {top} W: {text} W")
    return sorted({top, *asked} - set(out)), notes
