"""A rehearsal of power limits without GPUs: ranks compute on the CPU, each with a card of the fake driver."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.device.fake import FakeNvml
from shardwise.device.find import fake_file
from shardwise.engines.runtime.protocol import Engine, StepResult

LOAD = 0.9  # of a card that trains

NOTICE = """SIMULATED POWER: energy, power and limits in this run are a fake driver's, not those of any GPU;
  steps are slowed down as if clocks followed the limits. Nothing of it is a measurement."""


@contextmanager
def rehearsal(engine: Engine, uuid: str | None) -> Iterator[None]:
    """Within, a step takes as long as it would at the clock of the fake card; without one, as ever."""
    file = fake_file()
    if file is None or uuid is None or engine.world.device.type != "cpu":
        yield
        return
    fake, step = FakeNvml(file), engine.step

    def slowed(*arguments: Any, **named: Any) -> StepResult:
        began = time.perf_counter()
        result = step(*arguments, **named)
        time.sleep((time.perf_counter() - began) * (1 / fake.clock_ratio(uuid) - 1))
        return result

    engine.step = slowed  # type: ignore[method-assign]
    fake.change(uuid, load=LOAD)
    try:
        yield
    finally:
        fake.change(uuid, load=0.0)
