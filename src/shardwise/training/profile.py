"""One optimizer step under torch.profiler, after those that count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.protocol import Engine, StepResult

PROFILED_STEPS = 2
"""The first prepares the profiler, which takes seconds; the second is recorded."""


def profile_steps(engine: Engine, *, after: int, trace: Path) -> None:
    """Run the engine's steps behind the first `after` under the profiler; rank 0 writes the Chrome trace.

    All ranks do, so that none is slower than the others. A recorded step begins and ends with an idle GPU.
    """
    world, step, done = engine.world, engine.step, 0

    def write(finished: profile) -> None:
        if world.rank == 0:
            finished.export_chrome_trace(str(trace))

    def wait() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    cuda = [ProfilerActivity.CUDA] if world.device.type == "cuda" else []
    profiler = profile(
        activities=[ProfilerActivity.CPU, *cuda],
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        profile_memory=True,
        on_trace_ready=write,
    )

    def profiled(
        micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        nonlocal done
        done += 1
        if done <= after:
            return step(micro_batches, target_tokens=target_tokens, learning_rate=learning_rate)
        wait()
        if done == after + 1:
            profiler.start()
        result = step(micro_batches, target_tokens=target_tokens, learning_rate=learning_rate)
        wait()
        profiler.step()
        if done == after + PROFILED_STEPS:
            profiler.stop()
        return result

    engine.step = profiled  # type: ignore[method-assign]
