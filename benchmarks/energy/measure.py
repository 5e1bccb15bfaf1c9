"""Energy on a real GPU: the run's own joules compared with an independent reader, and with the prediction.

    python benchmarks/energy/measure.py --out measured.jsonl

Rows are those of `../accuracy/rows.toml` with `set = "attention"`. A line of OUT is one of the accuracy
ledger, with three keys more:

    counter_joules   what NVML's counter moved by while the steps of `window_steps` arrived, seen from here
    window_joules    what the run's own step events add up to for the same steps
    window_steps     first and last of them

This process reads the counter every few milliseconds, and between two of its updates takes a straight line.
All it knows of the run is when a line arrives in the file of events. Both ends of a window are late by the
same number of steps, so the window has the right length.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import re
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pynvml

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from assets import Assets
from measure import Limits, Running
from rows import Row, load_rows
from run import describe_machine

POLL_SECONDS = 0.004


class Reader:
    """NVML's energy counter of GPU 0 over time, and when the lines of a file of events arrived."""

    def __init__(self, events: Path) -> None:
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._events, self._read = events, 0
        self._moves: list[tuple[float, int]] = []  # when the counter had moved, and its millijoules
        self.arrived: dict[int, float] = {}

    def poll(self) -> None:
        now, counter = time.monotonic(), int(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu))
        if not self._moves or counter != self._moves[-1][1]:
            self._moves.append((now, counter))
        if not self._events.exists():
            return
        with self._events.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            event = json.loads(line)
            if event["kind"] == "step":
                self.arrived[event["step"]] = now

    def joules(self, since: float, until: float) -> float:
        return (self._at(until) - self._at(since)) / 1000.0

    def _at(self, moment: float) -> float:
        place = bisect.bisect_right(self._moves, (moment, sys.maxsize))
        (before, low), (after, high) = self._moves[place - 1], self._moves[min(place, len(self._moves) - 1)]
        return low if after == before else low + (high - low) * (moment - before) / (after - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--match", default="")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a row's window, at least")
    arguments = parser.parse_args()
    rows = load_rows(Path(__file__).parents[1] / "accuracy" / "rows.toml")
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="energy-") as folder, arguments.out.open("a") as out:
        os.environ.setdefault("SHARDWISE_CACHE", f"{folder}/cache")
        assets = Assets(Path(folder) / "assets", [])
        for row in rows:
            if row.set == "attention" and re.search(arguments.match, row.id):
                date = datetime.now(UTC).isoformat(timespec="seconds")
                line = {**measure(row, assets, arguments.seconds), "date": date, **machine}
                line["command"] = f"python benchmarks/energy/measure.py --seconds {arguments.seconds:g}"
                print(summary(line), file=sys.stderr, flush=True)
                out.write(json.dumps(line) + "\n")
                out.flush()


def measure(row: Row, assets: Assets, seconds: float) -> dict[str, Any]:
    limits = Limits(
        warmup_steps=4, steady_steps=6, steady_seconds=seconds, row_seconds=45.0, timeout_seconds=80.0
    )
    cores = sorted(os.sched_getaffinity(0))
    running = Running(row, assets=assets, gpus=["0"], cores=cores, limits=limits, keep=None)
    reader = Reader(running.events_file)
    try:
        while (result := running.look()) is None:
            reader.poll()
            time.sleep(POLL_SECONDS)
    finally:
        running.end()
    if result["error"] is not None:
        return result
    # `look` times the host's calls at the first step that counts, and the reader may miss the last line.
    first, last = limits.warmup_steps + 3, result["steps"] - 1
    window = result["joules_all"][first:last]  # steps count from 1: from the first's reading to the last's
    if None in window:
        return result
    own = {"window_steps": [first, last], "window_joules": round(sum(window), 3)}
    seen = reader.joules(reader.arrived[first], reader.arrived[last])
    return result | own | {"counter_joules": round(seen, 3)}


def summary(line: dict[str, Any]) -> str:
    if "counter_joules" not in line:
        return f"{line['id']}: {(line['error'] or line.get('joules_unavailable') or '')[-700:]}"
    difference = line["window_joules"] / line["counter_joules"] - 1.0
    return (
        f"{line['row_seconds']:5.1f} s  {line['id']}: {line['peak_reserved_bytes'] / 2**30:.2f} GiB, "
        f"{line['step_seconds']:.4f} s/step, {line['joules_per_step']:.1f} J/step, "
        f"{100 * difference:+.2f} % from the counter, loss {line['loss'][-1]:.3f}"
    )


if __name__ == "__main__":
    main()
