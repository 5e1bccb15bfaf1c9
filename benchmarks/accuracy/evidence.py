"""Write src/shardwise/planner/evidence.toml: how far predictions were off, by kind of strategy.

python benchmarks/accuracy/evidence.py
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from predict import HERE, compare_all, hash_alike
from rows import load_rows

from shardwise.planner.evidence import HOST_BOUND, kind_of

TABLE = HERE.parents[1] / "src" / "shardwise" / "planner" / "evidence.toml"
HEAD = "# Errors of the accuracy ledger's predictions; made by benchmarks/accuracy/evidence.py\n"


def table(comparisons: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Absolute differences by kind of strategy: `memory`, `time`, `time_host_bound`.

    Of predictions for a host that nobody measured, as most plans are.
    """
    rows = {row.id: row for name in ("rows", "h100") for row in load_rows(HERE / f"{name}.toml")}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in comparisons:
        kind = kind_of(rows[one["id"]].resolved())
        usual = one["uncalibrated"]
        waits = "time_host_bound" if usual["host_share"] >= HOST_BOUND else "time"
        for name, difference in (("memory", one["differences"]["reserved"]), (waits, usual["step"])):
            if difference is not None:
                found[kind][name].append(abs(difference))
    return found


def as_toml(found: Mapping[str, Mapping[str, Sequence[float]]], gpus: Mapping[str, set[str]]) -> str:
    lines = [HEAD]
    for kind in sorted(found):
        names = ", ".join(f'"{name}"' for name in sorted(gpus[kind]))
        lines.append(f'\n["{kind}"]\ngpus = [{names}]\n')
        for name, values in sorted(found[kind].items()):
            mean, worst = statistics.fmean(values), max(values)
            lines.append(f"{name} = {{ runs = {len(values)}, mean = {mean:.4f}, worst = {worst:.4f} }}\n")
    return "".join(lines)


def computed(comparisons: Sequence[Mapping[str, Any]], on_h100: Sequence[Mapping[str, Any]]) -> str:
    """The file: of the ledger's rows, and of those on two H100."""
    rows = load_rows(HERE / "h100.toml")
    assert [row.id for row in rows] == [one["id"] for one in on_h100], "a row was not measured"
    gpus = {kind: {"H200 SXM"} for kind in table(comparisons)}
    for row in rows:
        gpus.setdefault(kind_of(row.resolved()), set()).add("H100 SXM")
    return as_toml(table([*comparisons, *on_h100]), gpus)


if __name__ == "__main__":
    hash_alike()
    TABLE.write_text(computed(compare_all(), compare_all("h100")), encoding="utf-8")
