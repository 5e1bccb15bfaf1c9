"""Write src/shardwise/planner/evidence.toml: how far predictions were off, by kind of strategy.

python benchmarks/accuracy/evidence.py
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from predict import compare_all, hash_alike
from rows import load_rows

from shardwise.planner.evidence import HOST_BOUND, kind_of

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "src" / "shardwise" / "planner" / "evidence.toml"
HEAD = "# Errors of the accuracy ledger's predictions; made by benchmarks/accuracy/evidence.py\n"


def table(comparisons: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Absolute differences by kind of strategy: `memory`, `time`, `time_host_bound`."""
    rows = {row.id: row for row in load_rows(HERE / "rows.toml")}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in comparisons:
        kind = kind_of(rows[one["id"]].resolved())
        waits = "time_host_bound" if one["host_share"] >= HOST_BOUND else "time"
        for name, quantity in (("memory", "reserved"), (waits, "step")):
            if one["differences"][quantity] is not None:
                found[kind][name].append(abs(one["differences"][quantity]))
    return found


def as_toml(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    lines = [HEAD, 'gpus = ["H200 SXM"]\n']
    for kind in sorted(found):
        lines.append(f'\n[kinds."{kind}"]\n')
        for name, values in sorted(found[kind].items()):
            mean, worst = statistics.fmean(values), max(values)
            lines.append(f"{name} = {{ runs = {len(values)}, mean = {mean:.4f}, worst = {worst:.4f} }}\n")
    return "".join(lines)


if __name__ == "__main__":
    hash_alike()
    TABLE.write_text(as_toml(table(compare_all())), encoding="utf-8")
