"""A launcher that starts no process: it calls functions in their place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import StoppedError
from shardwise.launch.spec import Worker

Work = Callable[[int, Path, Path], int | None]
"""A fake process: gets its rank, the spec file and the folder; returns its exit code, None to run on."""


@dataclass
class FakeProcess:
    returncode: int | None
    pid: int = 0

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 0.0) -> int:
        if self.returncode is None:
            raise TimeoutError(timeout)
        return self.returncode


class FakeLauncher:
    """Calls a function in place of each process: `work[module]`. Notes each start's module and processes."""

    def __init__(self, work: Mapping[str, Work]) -> None:
        self.work = work
        self.started: list[tuple[str, int]] = []

    def start(self, processes: int, module: str, spec: Path, **_: object) -> list[Worker]:
        self.started.append((module, processes))
        folder = spec.parent
        codes = [self.work[module](rank, spec, folder) for rank in range(processes)]
        return [Worker(rank, FakeProcess(code), folder) for rank, code in enumerate(codes)]

    def stop(self, workers: Sequence[Worker]) -> None:
        self._end(workers, StoppedError.exit_code)

    def kill(self, workers: Sequence[Worker]) -> None:
        self._end(workers, -9)

    def _end(self, workers: Sequence[Worker], code: int) -> None:
        for worker in workers:
            if worker.process.returncode is None:
                worker.process = FakeProcess(code)
