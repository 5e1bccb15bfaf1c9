"""The clocks of one GPU and its process: what runs beside what, and who waits for whom.

Four things go on at a time: the process issues work, the GPU computes, it communicates with other GPUs, and
copies go to and from the host. Each is a clock that says until when it is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.host import Host
from shardwise.simulate.power import Draw
from shardwise.simulate.roofline import Roofline, table


@dataclass
class Totals:
    """Seconds and joules of what has been run, on one GPU."""

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    copy: float = 0.0
    optimizer: float = 0.0
    issue: float = 0.0
    joules: float = 0.0


@dataclass
class Streams:
    """Work is put on a stream in the order in which it is issued."""

    hardware: Hardware
    precision: str
    host_clock: float = 0.0
    compute_clock: float = 0.0
    communication_clock: float = 0.0
    copy_clock: float = 0.0
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self.host = Host()
        self.draw = Draw(self.hardware.gpu)
        self.roofline = Roofline(self.hardware.gpu, self.precision)
        self._launch = self.host.seconds("launch")
        self._slowed: float = 1.0 / (1.0 - table()["communication"]["multiprocessors"])

    @property
    def busy_until(self) -> float:
        """When both the computation and the process are done with what they have."""
        return max(self.host_clock, self.compute_clock)

    def issue(self, seconds: float) -> None:
        """The process is busy for so long."""
        self.host_clock += seconds
        self.totals.issue += seconds

    def host_waits(self) -> None:
        """The process waits until the GPU has done all it was asked for."""
        self.host_clock = max(self.host_clock, self.compute_clock, self.communication_clock, self.copy_clock)

    def compute(self, seconds: float, *, issue: float = 0.0, joules: float = 0.0) -> None:
        """Kernels of `seconds` together, which the process needs `issue` seconds to ask for."""
        start = max(self.compute_clock, self.host_clock + self._launch)
        self.issue(issue)
        self.compute_clock = max(start + self._beside(start, seconds), self.host_clock + self._launch)
        self.totals.compute += seconds
        self.totals.joules += joules

    def move(
        self, num_bytes: float, key: str = "elementwise", *, kernels: int = 1, issue: float = 0.0
    ) -> None:
        """Kernels that read and write `num_bytes` in all, at the share `key` of the memory's bandwidth."""
        self.compute(self.moving(num_bytes, key, kernels), issue=issue, joules=self.draw.moving(num_bytes))

    def moving(self, num_bytes: float, key: str = "elementwise", kernels: int = 1) -> float:
        """Seconds of them."""
        one = self.roofline.moving(num_bytes / max(kernels, 1), key)
        return one * kernels

    def _beside(self, start: float, seconds: float) -> float:
        """How long `seconds` of computing take from `start` on: collectives hold some multiprocessors."""
        shared = self.communication_clock - start
        if shared <= 0.0:
            return seconds
        if seconds * self._slowed <= shared:
            return seconds * self._slowed
        return shared + seconds - shared / self._slowed

    def communicate(self, seconds: float, num_bytes: float, *, after_compute: bool) -> float:
        """A collective behind those before it; when it ends.

        `num_bytes`: what it reads and writes of this GPU's memory. `after_compute`: it needs what was
        computed so far.
        """
        start = max(self.communication_clock, self.host_clock + self._launch)
        if after_compute:
            start = max(start, self.compute_clock)
        self.communication_clock = start + seconds
        self.totals.communication += seconds
        self.totals.joules += self.draw.moving(num_bytes)
        return self.communication_clock

    def host_reads(self) -> None:
        """The process waits for what was computed so far, to read it."""
        self.host_clock = max(self.host_clock, self.compute_clock)

    def compute_waits(self, until: float) -> None:
        """The computation goes on no sooner than `until`, when a collective or copy ends."""
        begin = max(self.compute_clock, self.host_clock)
        self.totals.exposed += max(0.0, until - begin)
        self.compute_clock = max(self.compute_clock, until)

    def copy(self, num_bytes: float, *, after: float = 0.0) -> float:
        """A copy between host and GPU, no sooner than `after`; when it ends."""
        link = self.hardware.host_link
        seconds = link.latency_seconds + num_bytes / link.bytes_per_second
        self.copy_clock = max(self.copy_clock, self.host_clock, after) + seconds
        self.totals.copy += seconds
        self.totals.joules += self.draw.moving(num_bytes)
        return self.copy_clock
