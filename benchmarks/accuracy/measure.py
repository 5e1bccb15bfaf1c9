"""One row: start and end its processes, and read their measurements."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assets import Assets
from rows import Row

from shardwise.diagnosis.probes.ranks import host_call_seconds
from shardwise.launch.nodes import Nodes, free_port
from shardwise.launch.spec import LaunchSpec
from shardwise.record.read import read_events
from shardwise.trials.exposed import read_trace
from shardwise.trials.process import end_session

DOES_NOT_FIT = 3
FOREVER = 100_000
"""Steps: the driver ends a row. A last checkpoint would only measure the disk."""
LAUNCH = """
import json, sys
from shardwise.launch.local import launch
from shardwise.trials.process import end_session
from shardwise.launch.spec import LaunchSpec
sys.exit(launch(LaunchSpec.from_json(json.load(open(sys.argv[1])))))
"""
BY_RANK = {
    "peak_allocated_bytes": "peak_memory_allocated_bytes",
    "peak_reserved_bytes": "peak_memory_reserved_bytes",
    "allocated_after_step_bytes": "memory_allocated_bytes",
    "reserved_after_step_bytes": "memory_reserved_bytes",
    "outside_allocator_bytes": "outside_allocator_bytes",
    "host_memory_bytes": "host_memory_bytes",
    "pinned_memory_bytes": "pinned_memory_bytes",
}
"""A row's key and the step events' key."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a row has run long enough."""

    warmup_steps: int
    """Dropped: kernels are compiled, the allocator settles."""
    steady_steps: int
    steady_seconds: float
    """Steps continue until both are reached, or until `row_seconds` if three are steady by then."""
    row_seconds: float
    timeout_seconds: float
    """After this time the row counts as failed."""
    profile: bool = False
    """The row ends after `steady_steps` and two steps under torch's profiler; the second is recorded."""


class Running:
    """A row whose processes run."""

    def __init__(
        self,
        row: Row,
        *,
        assets: Assets,
        gpus: Sequence[str],
        cores: Sequence[int],
        limits: Limits,
        keep: Path | None,
    ) -> None:
        """`gpus`: entries for CUDA_VISIBLE_DEVICES, empty ones on CPUs. `cores`: those it may use."""
        self.row = row
        self.gpus = gpus
        self._limits = limits
        self._keep = keep
        self._cores = cores
        self._folder = Path(tempfile.mkdtemp(prefix="accuracy-"))
        self._run = self._folder / "runs" / "row"
        source, text = str(assets.source(row)), str(assets.text(row))
        job = row.job(source=source, text=text, output=str(self._folder / "runs"))
        self._trace = self._folder / "trace.json.gz"
        spec = LaunchSpec(
            job=job.model_dump(mode="json"),
            run_dir=str(self._run),
            processes=row.gpus // row.nodes,
            memory_cap_bytes=row.memory_cap_bytes,
            # one that runs out of memory just ends
            measure_steps=limits.warmup_steps + limits.steady_steps if limits.profile else FOREVER,
            profile=str(self._trace) if limits.profile else None,
        )
        self._host_call: float | None = None
        self._processors = processor_ticks(cores)
        self._since = time.monotonic()
        rendezvous = f"127.0.0.1:{free_port()}"
        self._nodes = [self._start(node, spec, rendezvous) for node in range(row.nodes)]

    def _start(self, node: int, spec: LaunchSpec, rendezvous: str) -> subprocess.Popen[bytes]:
        """The launcher of one node, which has its share of the GPUs and cores."""
        if self.row.nodes > 1:
            spec = replace(spec, nodes=Nodes(count=self.row.nodes, rank=node, rendezvous=rendezvous))
        file = self._folder / f"spec-{node}.json"
        file.write_text(json.dumps(spec.to_json()), encoding="utf-8")
        cores = _part(self._cores, node, self.row.nodes)
        # Not `shardwise train`: it refuses adapters on random weights, which nobody could load again.
        with (self._folder / f"log{node or ''}").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(file)],
                env=self._environment(node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509 - no threads here
            )

    def look(self) -> dict[str, Any] | None:
        """The finished row's measurements; None while it runs."""
        code = self._nodes[0].poll()
        seconds = time.monotonic() - self._since
        steps = self._steps()
        if code is None and self._host_call is None and len(steps) > self._limits.warmup_steps:
            self._host_call = host_call_seconds()
            self._processors = processor_ticks(self._cores)
        if code is None and not self._enough(steps, seconds) and seconds < self._limits.timeout_seconds:
            return None
        stolen, ticks = (
            now - then for now, then in zip(processor_ticks(self._cores), self._processors, strict=True)
        )
        self.end()
        result = self._result(code, seconds) | {"stolen_share": round(stolen / max(ticks, 1), 4)}
        if self._keep is not None and self._folder.exists():
            shutil.copytree(self._folder, self._keep / self.row.id, dirs_exist_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        return result

    def end(self) -> None:
        for process in self._nodes:
            end_session(process)

    @property
    def events_file(self) -> Path:
        """It appears when the run has begun."""
        return self._run / "events.jsonl"

    def _environment(self, node: int) -> dict[str, str]:
        # One thread a core and process, of this row's cores, is the launcher's own choice.
        given = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if any(self.gpus):
            fixed["CUDA_VISIBLE_DEVICES"] = ",".join(_part(self.gpus, node, self.row.nodes))
        if self.row.nodes > 1:
            fixed["NCCL_HOSTID"] = f"node-{node}"
        return {**given, **fixed}

    def _events(self) -> list[dict[str, Any]]:
        return read_events(self.events_file) if self.events_file.exists() else []

    def _steps(self) -> list[dict[str, Any]]:
        return [event for event in self._events() if event["kind"] == "step"]

    def _enough(self, steps: Sequence[dict[str, Any]], seconds: float) -> bool:
        limits = self._limits
        steady = steps[limits.warmup_steps :]
        if limits.profile:  # it ends by itself
            return False
        if seconds > limits.row_seconds and len(steady) >= 3:
            return True
        long = sum(step["seconds"] for step in steady) >= limits.steady_seconds
        return len(steady) >= limits.steady_steps and long

    def _result(self, code: int | None, seconds: float) -> dict[str, Any]:
        events = self._events()
        steps = [event for event in events if event["kind"] == "step"]
        header = next((event for event in events if event["kind"] == "run"), {})
        log = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
        enough = code is None and self._enough(steps, seconds)  # one that ended by itself has failed
        profiled: dict[str, Any] = {}
        if self._limits.profile and code == 0:
            enough, profiled = True, self._profiled()
            steps = steps[: self._limits.warmup_steps + self._limits.steady_steps]
        out_of_memory = code == DOES_NOT_FIT
        return {
            "id": self.row.id,
            "set": self.row.set,
            "row": self.row.to_json(),
            "strategy": self.row.resolved(devices="cuda" if any(self.gpus) else "cpu").to_json(),
            "oom": out_of_memory,
            "error": None if enough else f"{_why(code, seconds)}\n{_tail(log)}",
            "row_seconds": round(seconds, 1),
            "cpu_cores": len(self._cores),
            "host_call_seconds_meanwhile": self._host_call,
            **{name: header.get(name) for name in ("parameters", "trainable_parameters")},
            **(measured(steps, self._limits.warmup_steps) if enough else {"steps": len(steps)}),
            **{name: header.get(name) for name in ("energy_source", "outside_allocator_source")},
            **profiled,
        }

    def _profiled(self) -> dict[str, Any]:
        """How long rank 0's GPU ran kernels in the recorded step, communication included."""
        step = read_trace(self._trace)
        busy = None if step.idle_seconds is None else round(step.step_seconds - step.idle_seconds, 5)
        return {"profiled_step_seconds": round(step.step_seconds, 5), "profiled_busy_seconds": busy}


def _part(values: Sequence[Any], node: int, nodes: int) -> Sequence[Any]:
    """A node's equal share."""
    return values[node * len(values) // nodes : (node + 1) * len(values) // nodes]


def processor_ticks(cores: Sequence[int], stat: Path = Path("/proc/stat")) -> list[int]:
    """Ticks that the hypervisor took from these cores while they wanted to run, and all their ticks; proc(5).

    This share limits the precision of a step that waits for the host.
    """
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in stat.read_text().splitlines()] if stat.exists() else []
    ticks = [[int(field) for field in line[1:9]] for line in lines if line[0] in names]
    return [sum(core[7] for core in ticks), sum(map(sum, ticks))]


def measured(steps: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Memory, time, energy and curves of a run's step events; the first `warmup` do not count as steady."""
    steady = steps[warmup:]
    result: dict[str, Any] = {}
    for name, key in BY_RANK.items():
        by_rank = steps[-1][key]
        result |= {name: by_rank and max(by_rank), f"{name}_by_rank": by_rank}
    joules = [step["joules"] for step in steady]
    return result | {
        "peak_reserved_by_step_bytes": [max(step["peak_memory_reserved_bytes"]) for step in steps],
        "steps": len(steps),
        "warmup_steps": warmup,
        "step_seconds": round(statistics.median(step["seconds"] for step in steady), 5),
        "step_seconds_all": [round(step["seconds"], 5) for step in steps],
        "tokens_per_step": steady[-1]["tokens"],
        "tokens_all": [step["tokens"] for step in steps],
        "joules_per_step": None if None in joules else round(statistics.fmean(joules), 3),
        "joules_all": [step["joules"] for step in steps],
        "joules_unavailable": next(
            (step["joules_unavailable"] for step in steady if step["joules"] is None), None
        ),
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
    }


def _why(code: int | None, seconds: float) -> str:
    return f"not done after {seconds:.0f} s" if code is None else f"exit code {code}"


def _tail(log: str, lines: int = 25) -> str:
    return "\n".join(log.splitlines()[-lines:])[-4000:]
