"""What the GPU runs in one profiled step of a row of the accuracy ledger: milliseconds and calls by kernel.

python benchmarks/mixtures/kernels.py --match 'gpt-oss-20b-4l.*s2048' --text c4.jsonl > kernels.txt

`results/kernels-*.txt`, of an H200, come from an earlier form of it, whose first two lines differ; that of
`before` was cut after twelve kernels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

ACCURACY = Path(__file__).parents[1] / "accuracy"
sys.path.insert(0, str(ACCURACY))

from assets import Assets  # noqa: E402
from rows import Row, load_rows  # noqa: E402

from shardwise.launch.local import launch  # noqa: E402
from shardwise.launch.spec import LaunchSpec  # noqa: E402

STEPS = 16
ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 60


def profile(row: Row, assets: Assets, folder: Path) -> None:
    trace, run = folder / "trace.json.gz", folder / "runs" / "row"
    job = row.job(source=str(assets.source(row)), text=str(assets.text(row)), output=str(run.parent))
    spec = LaunchSpec(
        job=job.model_dump(mode="json"),
        run_dir=str(run),
        processes=row.gpus,
        measure_steps=STEPS,
        profile=str(trace),
    )
    if code := launch(spec):
        sys.exit(code)
    steps = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    print(row.id, [round(one["seconds"], 4) for one in steps if one["kind"] == "step"])
    with gzip.open(trace, "rt", encoding="utf-8") as text:
        events = [one for one in json.load(text)["traceEvents"] if one.get("cat") in ON_THE_GPU]
    seconds, calls = Counter[str](), Counter(one["name"] for one in events)
    for one in events:
        seconds[one["name"]] += one["dur"]
    print(f"{sum(seconds.values()) / 1e3:9.3f} ms in all")
    for name, microseconds in seconds.most_common(SHOWN):
        print(f"{microseconds / 1e3:9.3f} ms {calls[name]:5d} {name[:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="List the kernels of a step, longest first")
    parser.add_argument("--match", required=True, metavar="REGEX", help="rows whose id matches")
    parser.add_argument("--text", type=Path, required=True, help="documents, one JSON object a line")
    arguments = parser.parse_args()
    for row in load_rows(ACCURACY / "rows.toml"):
        if re.search(arguments.match, row.id):
            with tempfile.TemporaryDirectory() as folder:
                profile(row, Assets(Path(folder) / "assets", [arguments.text]), Path(folder))


if __name__ == "__main__":
    main()
