"""The tables of docs/throughput.md and docs/mamba.md, from the committed results: `python table.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = [HERE.parents[1] / "docs" / name for name in ("throughput.md", "mamba.md")]
HEADER = (
    "| | rows per GPU | tokens/s/GPU | step, s | peak allocated, GiB | peak reserved, GiB "
    "| loss at step | gradient norm |\n|---|---|---|---|---|---|---|---|"
)


def name(row: dict[str, Any]) -> str:
    """`shardwise {"engine": "fsdp2", "reshard": false}` as `shardwise fsdp2, not resharded`."""
    text: str = row["row"]
    parts = re.search(r"\{.*\}", text)
    if parts:
        spec = json.loads(parts.group())
        short = spec["engine"] if spec["engine"] != "deepspeed" else f"zero{spec['stage']}"
        text = text.replace(parts.group(), f"{short}, not resharded")
    return text


def line(row: dict[str, Any]) -> str:
    steps = row.get("logged_steps", range(1, len(row["loss"]) + 1))
    losses = ", ".join(f"{steps[at]}: {row['loss'][at]:.3f}" for at in (0, len(steps) // 2, -1))
    cells = (
        name(row),
        row["micro_batch"],
        f"{row['tokens_per_second_per_gpu']:,.0f}",
        f"{row['step_seconds_median']:.3f}",
        row["peak_allocated_gib"],
        row["peak_reserved_gib"],
        losses,
        f"{row['grad_norm'][0]:.3f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def table(path: Path) -> str:
    result = json.loads(path.read_text(encoding="utf-8"))
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    caption = f"`results/{path.name}`, {result['date'][:10]}, {result['gpu']}; {versions}."
    return "\n".join([caption, "", HEADER, *map(line, result["rows"])])


def filled(page: str) -> str:
    """The page with the table of every `<!-- results/FILE.json -->` … `<!-- end -->` replaced."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n\n{table(HERE / match[1])}\n\n<!-- end -->"

    return re.sub(r"<!-- (results/\S+) -->.*?<!-- end -->", fill, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
