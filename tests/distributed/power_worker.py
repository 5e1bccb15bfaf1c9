"""A rank of a run on fake cards: what harness.py does, with short windows, and notes for the test."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import harness

WARMUP_SECONDS, WINDOW_SECONDS = 0.1, 0.2


def main(specs: str) -> None:
    """Runs every spec; leaves `pid-RANK`, `counters-RANK.json` and `progress-RANK` next to the file of specs.

    The counters are those of all cards in joules, by the moment: the meter begins between "ready" and
    "making", and ends between "trained" and "finished".
    """
    from shardwise.device.fake import FakeNvml
    from shardwise.device.find import fake_file
    from shardwise.power import search
    from shardwise.training import meter
    from shardwise.training import run as module
    from shardwise.training.observe import Recorder

    folder, rank, file = Path(specs).parent, os.environ["RANK"], fake_file()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    assert file is not None
    fake, counters = FakeNvml(file), dict[str, list[float]]()
    search.WARMUP_SECONDS, search.WINDOW_SECONDS = WARMUP_SECONDS, WINDOW_SECONDS

    def note(moment: str) -> None:
        counters[moment] = [fake.joules(gpu) for gpu in fake.state()["gpus"]]
        while meter.millijoules(meter.CPU) < 1000 * counters[moment][int(rank)] - 1:
            time.sleep(0.01)  # until this rank's meter, which samples its card, has seen that
        (folder / f"counters-{rank}.json").write_text(json.dumps(counters))

    check_alike, make_engine = module.check_alike, module.make_engine

    def checking(*arguments: Any) -> None:
        check_alike(*arguments)
        note("ready")

    def making(*arguments: Any) -> Any:
        note("making")
        return make_engine(*arguments)

    class Noting(Recorder):
        def finish(self, **named: Any) -> None:
            note("finished")
            super().finish(**named)

    class Loop(module.Loop):
        """Leaves the step that this rank has come to, too."""

        def run(self, last_step: int) -> bool:
            try:
                return super().run(last_step)
            finally:
                note("trained")
                (folder / f"progress-{rank}").write_text(str(self.progress.step))

    module.check_alike, module.make_engine = checking, making
    module.Recorder, module.Loop = Noting, Loop  # type: ignore[misc,assignment]
    harness.main(specs)
