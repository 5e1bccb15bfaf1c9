"""The clocks of one GPU and its process: what overlaps, and what waits for what.

Five things happen at a time: the process issues work, the GPU computes, it communicates with other GPUs, it
sums gradients with its replicas, and copies go to and from the host. Each has a clock that says until when it
is busy; copies have two, as engines bring weights on one stream and take gradients away on another.

The work of a schedule does not depend on the clocks. It is recorded once (`Streams`), and played (`Clocks`)
as often as it repeats: most micro-batches are alike.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.energy import Draw
from shardwise.simulate.time.roofline import Host, Roofline, held, table

COMPUTE, COMMUNICATE, COMPUTE_WAITS, COPY, ISSUE = range(5)
HOST_READS, HOST_WAITS, COMMUNICATION_WAITS, SETTLE, PEERS, REPLICATE = range(5, 11)

Work = tuple[Any, ...]
"""One piece of work: its kind, and the numbers that the method of `Streams` gives it. Plain tuples, as a plan
plays millions of them."""

NEVER, LATEST, REDUCED = range(3)
"""Events: one that is always over; the end of the last work without an event of its own; the end of the last
reduction of gradients."""


def event(index: int) -> int:
    """A further event of a schedule; `index` counts from 0."""
    return REDUCED + 1 + index


Interval = tuple[float, float]
"""Seconds: begin and end."""


@dataclass
class Totals:
    """Seconds and joules of the work that was played, on one GPU."""

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    exposed_to_peers: float = 0.0  # The share of that for sums over the tensor-parallel group
    exposed_to_copies: float = 0.0
    """Waiting for copies between host and GPU, by the computation or by a collective it waits for."""
    contended: float = 0.0  # What collectives add to the computation
    copy: float = 0.0
    optimizer: float = 0.0
    issue: float = 0.0
    joules: float = 0.0
    bubble: float = 0.0  # Waiting for the computation of other stages of a pipeline

    def wait(self, since: float, until: float, copies: Interval) -> None:
        """The computation waits for an event; during `copies` it waits for a copy."""
        if until > since:
            for_copies = max(0.0, min(until, copies[1]) - max(since, copies[0]))
            self.exposed += until - since - for_copies
            self.exposed_to_copies += for_copies


class Streams:
    """Records the work of a schedule in the order in which it is issued, as `work`."""

    def __init__(self, hardware: Hardware, precision: str) -> None:
        self.work: list[Work] = []
        self.draw = Draw(hardware.gpu)
        self.roofline = Roofline(hardware.gpu, precision)
        self._link = hardware.host_link
        link = (hardware.gpus_per_node == 1 and hardware.inter) or hardware.intra
        self._slower = 1.0 / (1.0 - held(link.name))

    def issue(self, seconds: float) -> None:
        """The process is busy for `seconds`."""
        self.work.append((ISSUE, seconds))

    def host_waits(self) -> None:
        """The process waits until the GPU has done all work."""
        self.work.append((HOST_WAITS,))

    def host_reads(self, until: int | None = None) -> None:
        """The process waits for the computation so far, to read a result; or until an event."""
        self.work.append((HOST_READS, until))

    def compute(
        self, seconds: float, *, issue: float = 0.0, joules: float = 0.0, grouped: float = 0.0
    ) -> None:
        """Kernels of `seconds`, issued by the process in `issue`; `grouped` of them multiply with experts."""
        slower = self._slower
        if grouped:
            slower += (table()["communication"]["grouped"] - slower) * grouped / seconds
        self.work.append((COMPUTE, seconds, issue, joules, slower))

    def move(
        self, num_bytes: float, key: str = "elementwise", *, kernels: int = 1, issue: float = 0.0
    ) -> None:
        """Kernels that read and write `num_bytes` together, at the share `key` of the memory's bandwidth."""
        self.compute(self.moving(num_bytes, key, kernels), issue=issue, joules=self.draw.moving(num_bytes))

    def moving(self, num_bytes: float, key: str = "elementwise", kernels: int = 1) -> float:
        """Seconds of such kernels."""
        return self.roofline.moving(num_bytes / max(kernels, 1), key) * kernels

    def communicate(
        self, seconds: float, num_bytes: float, *, after_compute: bool, done: int = LATEST
    ) -> int:
        """A collective after those before it; returns `done`, the event of its end.

        `num_bytes`: read and written in this GPU's memory. `after_compute`: it needs the computation so far.
        """
        self.work.append((COMMUNICATE, seconds, self.draw.linking(num_bytes), after_compute, done))
        return done

    def sum_over_peers(self, seconds: float, num_bytes: float) -> None:
        """Collectives of the tensor-parallel group, on the computation's own stream, in all `seconds`."""
        self.work.append((PEERS, seconds, self.draw.linking(num_bytes)))

    def sum_over_replicas(self, seconds: float, num_bytes: float, *, apart: bool) -> None:
        """A sum over replicas after the latest collective; `settle` waits for it, too.

        `apart`: over other links than the collectives, which go on meanwhile.
        """
        if apart:
            self.work.append((REPLICATE, seconds, self.draw.linking(num_bytes)))
        else:
            self.communicate(seconds, num_bytes, after_compute=False)

    def communication_waits(self, until: int) -> None:
        """The next collective begins after an event."""
        self.work.append((COMMUNICATION_WAITS, until))

    def compute_waits(self, until: int) -> None:
        """The computation continues after an event."""
        self.work.append((COMPUTE_WAITS, until))

    def settle(self) -> None:
        """The computation continues when all collectives are over."""
        self.work.append((SETTLE,))

    def copy(
        self, num_bytes: float, *, after: int = NEVER, read_seconds: float = 0.0, done: int = LATEST
    ) -> int:
        """A copy between host and GPU, after `after`; returns `done`, the event of its end.

        Gradients wait for their reduction, weights for nothing: so `after` tells their streams apart.
        `read_seconds`: how long the host reads the bytes before, from when the copy is issued.
        """
        seconds = self._link.latency_seconds + num_bytes / self._link.bytes_per_second
        self.work.append((COPY, seconds, self.draw.linking(num_bytes), after, read_seconds, done))
        return done


class Clocks:
    """Until when host, computation, communication and copies are busy; seconds."""

    def __init__(self, events: int = 0) -> None:
        """`events`: how many a schedule adds to those of this module."""
        self.host = 0.0
        self.compute = 0.0
        self.communication = 0.0
        self.replicas = 0.0
        self.copies = [0.0, 0.0]  # Of weights, of gradients
        self.totals = Totals()
        self._events = [0.0] * event(events)
        self._copying: list[Interval] = [(0.0, 0.0)] * event(events)
        """For each event, when the copy ran that it ends, or that delayed its collective."""
        self._delayed_by: Interval = (0.0, 0.0)
        self._launch = Host().seconds("launch")
        self._slowed = 1.0
        """How many times as long the last computation takes while a collective runs."""
        self._waited = 0.0
        """Until when the computation last waited."""

    @property
    def busy_until(self) -> float:
        """When both the computation and the process have done their work."""
        return max(self.host, self.compute)

    def run(self, work: Iterable[Work]) -> None:
        """Play work: one loop for all kinds, as a plan plays millions of pieces."""
        totals, events, copying, launch = self.totals, self._events, self._copying, self._launch
        host, compute, communication, copies = self.host, self.compute, self.communication, self.copies
        replicas = self.replicas
        for item in work:
            kind = item[0]
            if kind == COMPUTE:
                _, seconds, issue, joules, self._slowed = item
                start = max(compute, host + launch)
                host += issue
                totals.issue += issue
                shared = max(communication, replicas) - start
                lasts = seconds if shared <= 0.0 else self._slower(shared, seconds)
                compute = max(start + lasts, host + launch)
                totals.contended += lasts - seconds
                totals.compute += seconds
                totals.joules += joules
            elif kind == COMMUNICATE:
                _, seconds, joules, after_compute, done = item
                start = max(communication, host + launch, compute if after_compute else 0.0)
                copying[done] = self._delayed_by
                events[done] = communication = start + seconds
                later = self._later(compute - max(start, self._waited), seconds)
                compute += later
                totals.contended += later
                totals.communication += seconds
                totals.joules += joules
            elif kind in (COMPUTE_WAITS, SETTLE):
                last = (max(communication, replicas), self._delayed_by)
                until, copied = last if kind == SETTLE else (events[item[1]], copying[item[1]])
                totals.wait(max(compute, host), until, copied)
                self._waited = until if until > compute else self._waited
                compute = max(compute, until)
            elif kind == ISSUE:
                host += item[1]
                totals.issue += item[1]
            elif kind == COPY:
                _, seconds, joules, after, read_seconds, done = item
                asked, way = max(host, events[after]), after != NEVER
                events[done] = copies[way] = max(copies[way], host + read_seconds, events[after]) + seconds
                copying[done] = asked, copies[way]
                totals.copy += seconds
                totals.joules += joules
            elif kind == PEERS:
                _, seconds, joules = item
                start = max(compute, host + launch)
                # half of the links each, until either is over
                shared = min(seconds, max(0.0, communication - start))
                if shared:
                    communication += shared
                    events[:] = [at + shared if at > start else at for at in events]
                waits = start + seconds + shared - max(compute, host)
                totals.exposed += waits
                totals.exposed_to_peers += waits
                compute = self._waited = start + seconds + shared
                totals.communication += seconds
                totals.joules += joules
            elif kind == REPLICATE:
                _, seconds, joules = item
                replicas = max(replicas, communication) + seconds
                totals.communication += seconds
                totals.joules += joules
            elif kind == COMMUNICATION_WAITS:
                over = (events[item[1]], copying[item[1]])  # the later one delays the next collective
                communication, self._delayed_by = max((communication, self._delayed_by), over)
            elif kind == HOST_READS:
                host = max(host, compute if item[1] is None else events[item[1]])
            else:
                host = max(host, compute, communication, replicas, *copies)
        self.host, self.compute, self.communication, self.replicas = host, compute, communication, replicas

    def _slower(self, shared: float, seconds: float) -> float:
        """Seconds of a computation while collectives, which use multiprocessors, run for `shared`."""
        if seconds * self._slowed <= shared:
            return seconds * self._slowed
        return shared + seconds - shared / self._slowed

    def _later(self, computed: float, seconds: float) -> float:
        """Seconds by which a collective of `seconds` delays a computation that is played already.

        `computed`: how long the computation goes on after the collective has begun.
        """
        return self._slower(seconds, computed) - computed if computed > 0.0 else 0.0
