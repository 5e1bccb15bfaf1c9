"""What reading the energy counter costs a step: on and off in turns, within one run.

    python benchmarks/energy/overhead.py --out overhead.json

Every 20 steps the reading is left out of the loop, or put back. Blocks next to each other are compared, so
that the drift of the GPU's clock falls out. The small model's step waits for the host: the worst case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from assets import Assets
from measure import Limits, Running
from rows import Row
from run import describe_machine

BLOCK, BLOCKS, FIRST = 20, 16, 20
ROWS = (
    Row(model="smollm2-135m", micro_batch=1, sequence_length=512, strategy_name="single"),
    Row(model="tinyllama-1.1b", micro_batch=4, strategy_name="single"),
)
SITE = f"""
import sys
from importlib.abc import MetaPathFinder


class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "shardwise.training.meter":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            real, calls = module.millijoules, [0]

            def millijoules(device):
                calls[0] += 1
                off = (calls[0] // {BLOCK}) % 2
                return module.UNKNOWN if off else real(device)

            module.millijoules = millijoules

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--match", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="energy-") as folder:
        os.environ.setdefault("SHARDWISE_CACHE", f"{folder}/cache")
        (Path(folder) / "sitecustomize.py").write_text(SITE)
        os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        assets = Assets(Path(folder) / "assets", [])
        found = [measure(row, assets) for row in ROWS if arguments.match in row.id]
    result = {**describe_machine(), "block_steps": BLOCK, "rows": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(row: Row, assets: Assets) -> dict[str, Any]:
    """The median of the differences of neighbouring blocks, and how far apart their quartiles are."""
    steps = FIRST + BLOCK * BLOCKS
    limits = Limits(
        warmup_steps=FIRST,
        steady_steps=steps - FIRST,
        steady_seconds=0,
        row_seconds=75.0,
        timeout_seconds=90.0,
    )
    cores = sorted(os.sched_getaffinity(0))
    running = Running(row, assets=assets, gpus=["0"], cores=cores, limits=limits, keep=None)
    try:
        while (result := running.look()) is None:
            time.sleep(0.2)
    finally:
        running.end()
    if result["error"]:
        raise SystemExit(result["error"])
    seconds, joules = result["step_seconds_all"], result["joules_all"]
    blocks: dict[bool, list[float]] = {True: [], False: []}
    pairs: list[float] = []
    on = [one is not None for one in joules]
    edges = [i for i in range(FIRST, len(on)) if on[i] != on[i - 1]] + [len(on)]
    medians = [
        (on[a], statistics.median(seconds[a + 1 : b])) for a, b in itertools.pairwise(edges) if b - a > 4
    ]
    for (reads, one), (_, other) in itertools.pairwise(medians):
        pairs.append(one / other - 1.0 if reads else other / one - 1.0)
        blocks[reads].append(one)
    quartiles = statistics.quantiles(pairs, n=4)
    print(f"{row.id}: {100 * quartiles[1]:+.3f} % ({len(pairs)} pairs)", file=sys.stderr, flush=True)
    return {
        "id": row.id,
        "step_seconds_with": round(statistics.median(blocks[True]), 6),
        "step_seconds_without": round(statistics.median(blocks[False]), 6),
        "pairs": len(pairs),
        "overhead_fraction": round(quartiles[1], 5),
        "overhead_quartiles": [round(quartiles[0], 5), round(quartiles[2], 5)],
    }


if __name__ == "__main__":
    main()
