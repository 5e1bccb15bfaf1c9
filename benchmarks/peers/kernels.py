"""Which kernels a step of `shardwise train` takes, by kind: one step of rank 0 under torch's profiler.

    python kernels.py --assets assets/8b --lora 16 --micro-batch 2 --steps 70
    python kernels.py --assets assets/7b --processes 2 --strategy zero3 --micro-batch 2 --sequence 2048

Prints a line of JSON: the steps without the profiler, and for each kind of kernel its calls and milliseconds
in the profiled step. Kernels of two streams overlap, so that the sum may be longer than the step.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import environment
from shardwise_run import job, parse

from shardwise.job.schema import Job
from shardwise.launch.local import launch
from shardwise.launch.spec import LaunchSpec

KINDS = {
    "communication": "nccl",
    "optimizer": "FusedOptimizer",
    "attention": "flash|sdpa|fmha",
    "matrix products": "nvjet|gemm|cutlass|splitK",
}
"""By parts of a kernel's name, in this order; all others are `other`."""


def kind_of(name: str) -> str:
    return next((kind for kind, part in KINDS.items() if re.search(part, name)), "other")


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Calls and milliseconds of each kind, of (name, microseconds) pairs."""
    seconds, calls = Counter[str](), Counter[str]()
    for name, micro in kernels:
        seconds[kind_of(name)] += micro
        calls[kind_of(name)] += 1
    return {kind: {"calls": calls[kind], "ms": round(seconds[kind] / 1e3, 2)} for kind in seconds}


def main() -> None:
    arguments = parse(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        run, trace = Path(folder) / "runs" / "kernels", Path(folder) / "trace.json.gz"
        spec = LaunchSpec(
            job=Job.model_validate(job(arguments, run.parent)).model_dump(mode="json"),
            run_dir=str(run),
            processes=arguments.processes,
            measure_steps=arguments.steps,
            profile=str(trace),
        )
        code = launch(spec)
        if code:
            raise SystemExit(code)
        lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = [event["seconds"] for event in map(json.loads, lines) if event["kind"] == "step"]
        content = trace.read_bytes()
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    work = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [(event["name"], event["dur"]) for event in events if event.get("cat") in work]
    steps = [round(one, 4) for one in seconds[arguments.warmup : arguments.steps]]
    found = {"strategy": arguments.strategy, "lora": arguments.lora, "step_seconds": steps}
    print(json.dumps({**environment(), **found, "kernels": by_kind(kernels)}))


if __name__ == "__main__":
    main()
