"""One optimizer step under torch.profiler, after those that count."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.protocol import Engine, StepResult
from shardwise.launch.spec import LaunchSpec

PROFILED_STEPS = 2
"""The first lets the profiler get ready, which takes seconds; the second is recorded."""


class Profiled:
    """An engine whose steps after `spec.measure_steps` run under the profiler.

    All ranks do, so that none is slower than the others; rank 0 writes the Chrome trace. A recorded step
    begins and ends with an idle GPU.
    """

    def __init__(self, engine: Engine, spec: LaunchSpec) -> None:
        assert spec.profile is not None
        assert spec.measure_steps is not None
        self.world = engine.world
        self._engine = engine
        self._left = spec.measure_steps
        self._trace = Path(spec.profile)
        activities = [ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            profile_memory=True,
            on_trace_ready=self._write,
        )

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """See `Engine.step`."""
        self._left -= 1
        if self._left >= 0:
            return self._step(micro_batches, target_tokens, learning_rate)
        self._wait()
        if self._left == -1:
            self._profile.start()
        result = self._step(micro_batches, target_tokens, learning_rate)
        self._wait()
        self._profile.step()
        if self._left == -PROFILED_STEPS:
            self._profile.stop()
        return result

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """See `Engine.loss_sum`."""
        return self._engine.loss_sum(micro_batch)

    def save(self, directory: Path) -> None:
        """See `Engine.save`."""
        self._engine.save(directory)

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        self._engine.load(directory)

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine.weights`."""
        return self._engine.weights(names)

    def config(self) -> dict[str, Any]:
        """See `Engine.config`."""
        return self._engine.config()

    def _step(
        self, micro_batches: Sequence[MicroBatch], target_tokens: int, learning_rate: float
    ) -> StepResult:
        return self._engine.step(micro_batches, target_tokens=target_tokens, learning_rate=learning_rate)

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def _write(self, done: profile) -> None:
        if self.world.rank == 0:
            done.export_chrome_trace(str(self._trace))
