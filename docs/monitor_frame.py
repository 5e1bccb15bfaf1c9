"""The frame of docs/monitor.md: `python docs/monitor_frame.py [WIDTH]` prints it.

The GPUs are replayed from docs/examples/two-h200.json. The run, the host and the time are examples too. The
run folder is written here, with the functions that training uses.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from shardwise.device import Replay
from shardwise.record.schema import EvalEvent, RunEvent, StepEvent
from shardwise.record.write import RunFolder, to_line
from shardwise.report.live.frame import frame
from shardwise.report.live.machine import Machine
from shardwise.report.live.run import LiveRun
from shardwise.units import GIB

NOW = 1_795_428_000.0  # Unix seconds
STEP_SECONDS, STEP_TOKENS, STEPS = 2.18, 65_536, 340
HEAD = RunEvent(
    name="example",
    strategy="fsdp2",
    processes=2,
    total_steps=1000,
    global_batch=16,
    sequence_length=4096,
    parameters=8_030_261_248,
    trainable_parameters=41_943_040,
    energy_source="counter",
)
PREDICTED = {
    "time": {"tokens_per_second_per_gpu": 15_600.0},
    "energy": {"joules_per_token": 0.0421},
    "memory": {"peak_reserved_bytes": 84 * GIB},
}


def step(number: int) -> StepEvent:
    """A step with a loss that falls."""
    rate = STEP_TOKENS / STEP_SECONDS
    return StepEvent(
        step=number,
        epoch=0,
        loss=1.72 + 0.5 * math.exp(-number / 90) + 0.02 * math.sin(number / 7),
        learning_rate=1e-4,
        grad_norm=0.8,
        skipped=False,
        tokens=STEP_TOKENS,
        target_tokens=STEP_TOKENS,
        seconds=STEP_SECONDS,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / 2,
        mfu=0.487,
        peak_memory_reserved_bytes=[int(85.9 * GIB), int(85.7 * GIB)],
        joules=None if number % 100 == 1 else 1248.0 * STEP_SECONDS,
        joules_unavailable="an evaluation or a save lies between the readings" if number % 100 == 1 else None,
    )


def write(path: Path) -> RunFolder:
    """A run of STEPS steps up to NOW, still locked as a running one is."""
    plan = {"schema": 1, "chosen": {"prediction": PREDICTED}}
    run = RunFolder.create(path, job_yaml="name: example\n", plan=plan, environment={"schema": 1})
    lines = [to_line(HEAD, now=NOW - STEPS * STEP_SECONDS - 1)]
    for number in range(1, STEPS + 1):
        at = NOW - (STEPS - number) * STEP_SECONDS - 1
        lines.append(to_line(step(number), now=at))
        if number % 100 == 0:
            evaluation = EvalEvent(step=number, loss=1.82, target_tokens=10**6, seconds=20.0)
            lines.append(to_line(evaluation, now=at))
    run.events.write_text("".join(lines), encoding="utf-8")
    return run


def main(width: int = 80) -> None:
    """Print the frame."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    machine = Machine(Replay(json.loads((Path(__file__).parent / "examples" / "two-h200.json").read_text())))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run = write(Path("runs/example"))
        sample = {"time": NOW, **machine.sample(), "run": LiveRun(run.path).look(NOW)}
        run.close()
    for gpu in sample["gpus"]:
        for process in gpu["processes"]:
            process["name"] = "python"
    sample["host"] |= {
        "cpu_fraction": 0.09,
        "cpu_cores": 32,
        "memory_used_bytes": 41.3 * GIB,
        "memory_bytes": 256 * GIB,
        "allowed_memory_bytes": 256 * GIB,
    }
    Console(width=width).print(frame(sample, width=width, note="  every 2 s, Ctrl-C ends"))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
