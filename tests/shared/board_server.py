"""The board as a user starts it, in a process of its own, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.record.schema import Event, RunEvent, StepEvent
from shardwise.record.write import RunFolder, to_line
from shardwise.simulate.prediction import MemoryTerms


class Server:
    """A board that answers on a free port."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        command = [sys.executable, "-m", "shardwise", "board", str(folder), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://(127\.0\.0\.1):(\d+)/", line)
        assert found is not None, line
        self.host, self.port = found[1], int(found[2])
        self.address = f"http://{self.host}:{self.port}"

    def ask(self, path: str, values: Any = None, **headers: str) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers of an answer; with `values`, they are sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        body = None if values is None else json.dumps(values)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET" if body is None else "POST", path, body, sent)
        answer = connection.getresponse()
        found = answer.read().decode()
        connection.close()
        return answer.status, found, {name.lower(): value for name, value in answer.getheaders()}

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The values of a stream of events, as they come."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        connection.request("GET", path)
        lines = connection.getresponse()
        try:
            yield (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
        finally:
            connection.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stderr is not None
        self.process.stderr.close()


def begin(path: Path, job: dict[str, Any] | None = None, plan: dict[str, Any] | None = None) -> Path:
    """A run folder without events."""
    job = job or {"name": path.name, "model": {"source": "org/tiny"}, "data": {"train": "texts.jsonl"}}
    RunFolder.create(path, job_yaml=json.dumps(job), plan=plan or {}, environment={}).close()
    (path / "events.jsonl").write_text("")
    return path


def write(path: Path, *events: Event, now: float = 1_700_000_000.0) -> None:
    """Append events as a training does."""
    with (path / "events.jsonl").open("a") as file:
        file.write("".join(to_line(event, now=now + number) for number, event in enumerate(events)))


HOSTILE = "</title><script>document.title='owned'</script>\x1b[31m\u202e"


def head(steps: int = 200) -> RunEvent:
    return RunEvent(
        name="a",
        strategy="zero2",
        processes=2,
        total_steps=steps,
        global_batch=4,
        sequence_length=32,
        parameters=10,
        trainable_parameters=10,
    )


def step(number: int, **more: Any) -> StepEvent:
    """A second long, at 300 W, with 8 GiB reserved by the worse of two ranks."""
    values: dict[str, Any] = {
        "step": number,
        "epoch": 0,
        "loss": 5.0 - number / 100,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "skipped": False,
        "tokens": 1000,
        "target_tokens": 1000,
        "seconds": 1.0,
        "tokens_per_second": 1000.0,
        "tokens_per_second_per_gpu": 500.0,
        "peak_memory_reserved_bytes": [7 << 30, 8 << 30],
        "joules": 300.0,
    }
    return StepEvent(**{**values, **more})


PLAN = {
    "chosen": {
        "strategy": {"name": "zero2", "micro_batch": 1, "accumulation": 2, "checkpoint_every": 0},
        "prediction": {
            "time": {"tokens_per_second_per_gpu": 520.0, "exposed_communication_fraction": 0.1},
            "energy": {"joules_per_token": 0.31},
            "memory": {
                "peak_reserved_bytes": 8 << 30,
                "peak_allocated_bytes": 7 << 30,
                "outside_allocator_bytes": 1 << 30,
                "capacity_bytes": 15 << 30,
                "terms": dict.fromkeys((field.name for field in fields(MemoryTerms)), 8 << 30),
            },
        },
    }
}


class Folders(NamedTuple):
    server: Server
    root: Path
    outside: Path
