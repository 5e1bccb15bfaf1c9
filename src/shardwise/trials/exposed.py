"""What a Chrome trace of one step says: how long it waited, and for what; how its memory went."""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
Event = dict[str, Any]

STEP = "ProfilerStep#"
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
GPU = 1  # `Device Type` of a GPU in a memory event (c10/core/DeviceType.h)
MOST_POINTS = 240  # Of the memory curve that is kept; the trace has every allocation


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """One step of rank 0 under the profiler; seconds and bytes."""

    step_seconds: float  # On a GPU from the first kernel to the end of the last
    communication_seconds: float
    exposed_communication_seconds: float  # Communication ran and nothing else did
    idle_seconds: float | None
    """The GPU ran nothing: it waited for the host, which the profiler slows. None without a GPU."""
    memory: list[tuple[float, int, int]]
    """(share of the step, allocated, reserved), each the highest around that time; empty without a GPU."""

    @property
    def exposed_communication_fraction(self) -> float:
        return self.exposed_communication_seconds / self.step_seconds

    @property
    def idle_fraction(self) -> float | None:
        return None if self.idle_seconds is None else self.idle_seconds / self.step_seconds


def read_trace(path: Path) -> ProfiledStep:
    """Reads torch.profiler's Chrome trace, gzipped or not. ValueError where it holds no step."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    events: list[Event] = trace["traceEvents"]
    steps = [event for event in events if event["name"].startswith(STEP) and event.get("dur")]
    if not steps:
        raise ValueError(f"{path.name} holds no step")
    recorded = max(steps, key=lambda event: event["ts"])
    inside = (recorded["ts"], recorded["ts"] + recorded["dur"])
    kernels = [event for event in events if event.get("cat") in GPU_WORK]
    if kernels:
        communication = [_interval(event) for event in kernels if "nccl" in event["name"].lower()]
        work = [_interval(event) for event in kernels if "nccl" not in event["name"].lower()]
        both = [*communication, *work]
        inside = (min(start for start, _ in both), max(end for _, end in both))
    else:
        communication, work = _on_cpus(events)
    communication, work = (_union(_clip(part, inside)) for part in (communication, work))
    step, busy = inside[1] - inside[0], _length(_union([*communication, *work]))
    return ProfiledStep(
        step_seconds=step / 1e6,
        communication_seconds=_length(communication) / 1e6,
        exposed_communication_seconds=(busy - _length(work)) / 1e6,
        idle_seconds=(step - busy) / 1e6 if kernels else None,
        memory=_memory(events, inside),
    )


def _on_cpus(events: Sequence[Event]) -> tuple[list[Interval], list[Interval]]:
    """(gloo's collectives, torch's operators) of a process without a GPU.

    A collective counts from when it is asked for. Operators on gloo's own threads belong to it; what
    autograd and DeepSpeed wrap around operators is no work of its own, and may be waiting.
    """
    gloo = [event for event in events if event["name"].startswith("gloo:") and event.get("dur")]
    threads = {event["tid"] for event in gloo}
    operators = (one for one in events if one.get("cat") == "cpu_op" and one["name"].startswith("aten::"))
    return [*map(_interval, gloo)], [_interval(one) for one in operators if one["tid"] not in threads]


def _memory(events: Sequence[Event], inside: Interval) -> list[tuple[float, int, int]]:
    """The curve in at most MOST_POINTS points; each keeps the highest of its share of the step."""
    start, end = inside
    bins: dict[int, tuple[int, int]] = {}
    for event in events:
        values = event.get("args", {})
        if event["name"] != "[memory]" or values.get("Device Type") != GPU:
            continue
        if start <= event["ts"] <= end:
            place = min(MOST_POINTS - 1, int(MOST_POINTS * (event["ts"] - start) / (end - start)))
            allocated, reserved = bins.get(place, (0, 0))
            bins[place] = max(allocated, values["Total Allocated"]), max(reserved, values["Total Reserved"])
    return [((place + 0.5) / MOST_POINTS, *bins[place]) for place in sorted(bins)]


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _clip(intervals: Iterable[Interval], inside: Interval) -> list[Interval]:
    clipped = ((max(start, inside[0]), min(end, inside[1])) for start, end in intervals)
    return [(start, end) for start, end in clipped if start < end]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
