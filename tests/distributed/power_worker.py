"""A rank of a run on fake cards: what harness.py does, with short windows, and notes for the test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import harness

WARMUP_SECONDS, WINDOW_SECONDS = 0.1, 0.2


def main(specs: str) -> None:
    """Runs every spec; leaves `pid-RANK`, `counters.json` and `progress-RANK` next to the file of specs."""
    from shardwise.device.fake import FakeNvml
    from shardwise.device.find import fake_file
    from shardwise.power import search
    from shardwise.training import run as module
    from shardwise.training.observe import Recorder

    folder, rank, file = Path(specs).parent, os.environ["RANK"], fake_file()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    assert file is not None
    fake, counters = FakeNvml(file), list[float]()
    search.WARMUP_SECONDS, search.WINDOW_SECONDS = WARMUP_SECONDS, WINDOW_SECONDS

    def note() -> None:
        counters.append(sum(map(fake.joules, fake.state()["gpus"])))
        (folder / "counters.json").write_text(json.dumps(counters))

    make_engine = module.make_engine

    def noting(*arguments: Any) -> Any:
        """The meter begins before the engine is made."""
        if rank == "0":
            note()
        return make_engine(*arguments)

    class Noting(Recorder):
        """Reads the cards' counters by itself when the meter ends."""

        def finish(self, **named: Any) -> None:
            note()
            super().finish(**named)

    class Loop(module.Loop):
        """Leaves the step that this rank has come to."""

        def run(self, last_step: int) -> bool:
            try:
                return super().run(last_step)
            finally:
                (folder / f"progress-{rank}").write_text(str(self.progress.step))

    module.make_engine = noting
    module.Recorder, module.Loop = Noting, Loop  # type: ignore[misc,assignment]
    harness.main(specs)
