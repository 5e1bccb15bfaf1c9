"""The tables and pictures of docs/accuracy.md, from the committed results and the current predictions.

    python benchmarks/accuracy/page.py

The page's prose is written by hand; this script writes what is between `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import idle
from choices import CHANGED, FASTEST, ON_H100, fastest_table, rehearsal_table
from earlier import earlier_kernels, mixed, with_timer
from hosts import over_sockets, paced, two_nodes
from missed import MISSED, MISSED_MEANS
from predict import (
    BOUNDS,
    Summary,
    compare,
    compare_all,
    hash_alike,
    measured_rows,
    predict,
    repeats,
    summarize,
    summary_of,
)
from rows import GIB, SETS, Row, load_rows
from scatter import FAMILIES, pictures

from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "accuracy.md"
PEERS = HERE / "results" / "peers.json"
HOST = HERE / "results" / "host.jsonl"
Comparison = Mapping[str, Any]

HEADLINES = {
    "peak reserved memory": "reserved",
    "peak allocated memory": "allocated",
    "step time": "step",
    "energy": "joules",
}
BOUND = {name: HEADLINES[name] for name in ("peak reserved memory", "step time")}
TERMS = {
    "allocated, at its peak": "allocated",
    "fragmentation: reserved but not allocated, as a share of reserved": "fragmentation",
    "outside the allocator: context, kernels, NCCL": "outside",
    "needed in total: reserved plus outside": "needed",
    "host memory, rows that offload": "host",
}
TOOLS = {
    "deepspeed": "DeepSpeed, `estimate_zero2/3_model_states_mem_needs`",
    "accelerate": "accelerate, `estimate-memory`, float16",
    "accelerate_float32": "accelerate, `estimate-memory`, float32",
    "cookbook": "EleutherAI cookbook, `calc_transformer_mem.py`",
}


def percent(share: float | None, *, sign: bool = False) -> str:
    if share is None:
        return "not measured"
    value = round(100 * share, 1 if abs(share) >= 0.01 else 2) or 0.0  # no "-0.00"
    return f"{value:{'+' if sign and value else ''}.{1 if abs(share) >= 0.01 else 2}f} %"


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def cells(summary: Summary | None) -> list[str]:
    """Number of rows, mean and worst."""
    if summary is None:
        return ["0", "", ""]
    return [str(summary.rows), percent(summary.mean), percent(summary.worst, sign=True)]


def headline(comparisons: Sequence[Comparison]) -> str:
    lines = []
    for name, quantity in HEADLINES.items():
        for of in SETS:
            summary = summarize([c for c in comparisons if c["set"] == of], quantity)
            worst = f"`{summary.worst_row}`" if summary else "not measured yet"
            lines.append([name, of, *cells(summary), worst])
    head = ["", "set", "rows", "mean difference", "worst", "the worst row"]
    return f"{table(head, lines)}\n\n{out_of_memory(comparisons)}"


def out_of_memory(comparisons: Sequence[Comparison]) -> str:
    ended = [c for c in comparisons if c["oom"]]
    ran = [c for c in comparisons if c["measured"]]
    refused = sum(not c["fits"] for c in ran)
    text = f"Of {len(ran)} rows that ran, {refused} {'was' if refused == 1 else 'were'} predicted not to fit."
    if not ended:
        return f"{text} No row that runs out of memory has been measured yet."
    seen = sum(not c["fits"] for c in ended)
    were = "was" if seen == 1 else "were"
    return f"{text} {len(ended)} rows ran out of memory: {seen} of them {were} predicted not to fit."


def bound(comparisons: Sequence[Comparison]) -> str:
    """Step time of rows that are not host-bound, and of rows that are."""
    lines = []
    for name, least, most in (("less than half", 0.0, 0.5), ("half or more", 0.5, math.inf)):
        for of in SETS:
            rows = [c for c in comparisons if c["set"] == of and least <= c["host_share"] < most]
            lines.append([name, of, *cells(summarize(rows, "step"))])
    head = [
        "predicted share of the step in which the host issues it",
        "set",
        "rows",
        "mean difference",
        "worst",
    ]
    return table(head, lines)


def host(_: Sequence[Comparison]) -> str:
    """Steps of 64 tokens, which the host limits."""
    found = repeats(HOST)
    lines = []
    for row in load_rows(HERE / "host.toml"):
        hosts = [paced(parse_hardware(f"{row.gpus}xH200"), one) for one in found[row.id]]
        earlier = earlier_kernels(found[row.id][0])
        seconds = [predict(row, earlier=earlier, hardware=host).time.step_seconds for host in hosts]
        pairs = zip(seconds, found[row.id], strict=True)
        differences = ", ".join(percent(ours / one["step_seconds"] - 1, sign=True) for ours, one in pairs)
        predicted = ", ".join(dict.fromkeys(f"{one:.3f}" for one in seconds))
        lines.append([f"`{row.id}`", ", ".join(map(_step, found[row.id])), predicted, differences])
    return table(["row", "step, s", "predicted", "difference"], lines)


def waits(_: Sequence[Comparison]) -> str:
    """How long the GPU runs no kernel."""
    head = ["row", "GPU", "step, s", "kernels, s", "the GPU waits", "a call on the host, us"]
    return f"{idle.summary()}\n\n{table(head, [*idle.lines()])}"


def _elsewhere(name: str, hardware: Callable[[Row, Comparison], Hardware] | None = None) -> str:
    """Rows of a file of its own; `hardware`: what each measurement is predicted on, if not the GPU alone."""
    found = measured_rows(HERE / "results" / f"{name}.jsonl")
    lines, compared = [], []
    for row in load_rows(HERE / f"{name}.toml"):
        measured = found[row.id]
        one = compare(row, measured, hardware=hardware(row, measured) if hardware else None)
        if one["oom"]:
            said = "predicted to fit" if one["fits"] else "as predicted"
            lines.append([f"`{row.id}`", f"out of memory, {said}", *[""] * 6])
            continue
        compared.append(one)
        speed = measured["tokens_per_step"] / measured["step_seconds"] / row.gpus
        off = (percent(one["differences"][key], sign=True) for key in ("reserved", "step", "joules"))
        loss = f"{measured['loss'][0]:.3f} to {measured['loss'][-1]:.3f}, {measured['grad_norm'][-1]:.2f}"
        reserved = f"{measured['peak_reserved_bytes'] / GIB:.2f}"
        lines.append([f"`{row.id}`", reserved, f"{speed:,.0f}", loss, f"{one['host_share']:.0%}", *off])
    head = ["reserved, GiB", "tokens/s/GPU", "loss, gradient norm", "predicted host share"]
    rows, time = table(["row", *head, "memory", "time", "energy"], lines), summarize(compared, "step")
    assert time is not None
    worst = f"{percent(time.worst, sign=True)} at worst, `{time.worst_row}`"
    return f"{rows}\n\nTime is off by {percent(time.mean)} in the mean, and {worst}."


def missed(comparisons: Sequence[Comparison]) -> str:
    """The rows beyond the bounds of tests/golden/test_ledger.py."""
    by_id = {c["id"]: c for c in comparisons}
    lines = [
        [f"`{name}`", by_id[name]["set"], words, percent(by_id[name]["differences"][key], sign=True), reason]
        for words, key in BOUND.items()
        for name, reason in MISSED[key].items()
    ]
    means = [
        f"the mean {words} of `{which}` ({reason})"
        for words, key in BOUND.items()
        for which, reason in MISSED_MEANS[key].items()
    ]
    if not lines:
        return "Every row is within its bound."
    return (
        f"These rows are beyond their bound. They count in every number of this page.\n\n"
        f"{table(['row', 'set', 'what', 'difference', 'why'], lines)}\n\n"
        f"Means beyond their bound: {'; '.join(means) or 'none'}."
    )


def again(_: Sequence[Comparison]) -> str:
    """Rows that were measured more than once, with every measurement."""
    lines = []
    for name, rows in repeats().items():
        ran = [row for row in rows if _timed(row)]
        if len(ran) > 1:
            seconds = ", ".join(_step(row) for row in ran)
            memory = ", ".join(f"{row['peak_reserved_bytes'] / GIB:.2f}" for row in ran)
            lines.append([f"`{name}`", seconds, memory])
    return table(["row", "step, s", "reserved, GiB"], lines)


def apart(comparisons: Sequence[Comparison]) -> str:
    """Differences between measurements of one row, and of its prediction from them."""
    predicted = {c["id"]: c["predicted"]["step"] for c in comparisons}
    names, theirs, ours = set(), [], []
    for name, rows in repeats().items():
        today = _ran_as(measured_rows()[name])
        ran = [row["step_seconds"] for row in rows if _timed(row) and _ran_as(row) == today]
        if len(ran) > 1:
            names.add(name)
            theirs += [abs(one / other - 1) for one, other in permutations(ran, 2)]
            ours += [abs(predicted[name] / one - 1) for one in ran]
    beyond = sum(difference > BOUNDS["step"][1] for difference in theirs) / len(theirs)
    head = ["rows", "pairs of measurements", "mean difference", "pairs beyond 20 %"]
    head += ["mean difference of the prediction from these measurements"]
    line = [str(len(names)), str(len(theirs) // 2), percent(statistics.mean(theirs)), f"{beyond:.0%}"]
    return table(head, [[*line, percent(statistics.mean(ours))]])


def _ran_as(measured: Mapping[str, Any]) -> tuple[bool, frozenset[str]]:
    """What a step depended on in addition to its row."""
    return with_timer(measured), earlier_kernels(measured)


def _timed(measured: Mapping[str, Any]) -> bool:
    """Whether its time counts, and was measured with the attention of today."""
    attention = "attention" in earlier_kernels(measured)
    return not measured["error"] and measured["step_seconds"] is not None and not attention


def _step(measured: Mapping[str, Any]) -> str:
    """Seconds of a step, in brackets if DeepSpeed's throughput timer was on."""
    seconds = f"{measured['step_seconds']:.3f}"
    return f"({seconds})" if with_timer(measured) else seconds


def machines(comparisons: Sequence[Comparison]) -> str:
    rows = [row for c in comparisons if not (row := measured_rows()[c["id"]])["error"]]
    dates = sorted(row["date"][:10] for row in rows)
    day = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    gpus = sorted({row["row"]["gpus"] for row in rows})
    versions = {f"{name} {number}" for row in rows for name, number in row["versions"].items()}
    named = ("torch", "deepspeed", "transformers", "peft", "triton", "liger-kernel", "python")
    shown = [v for name in named for v in sorted(versions) if v.rsplit(" ", 1)[0] == name]
    where = {
        f"{row['gpu']} ({row['power_limit'].split('.')[0]} W, driver {row['driver']}, allocator "
        f"`{row['allocator']}`)"
        for row in rows
    }
    return (
        f"{len(rows)} rows, {day}, on {', '.join(map(str, gpus))} GPUs of one node: "
        f"{'; '.join(sorted(where))}; {', '.join(shown)}."
    )


def peers(comparisons: Sequence[Comparison]) -> str:
    estimates = json.loads(PEERS.read_text(encoding="utf-8"))
    measured = {c["id"]: c["measured"]["reserved"] for c in comparisons if c["measured"]}
    ours = {c["id"]: c["differences"]["reserved"] for c in comparisons if c["measured"]}
    held = {c["id"]: ours[c["id"]] for c in comparisons if c["measured"] and c["set"] != "fit"}
    lines = [_peer("**shardwise plan**", ours, ours)]
    lines += [_peer("**shardwise plan**, rows held out", held, ours)] if held else []
    for tool, name in TOOLS.items():
        numbers = {row: estimates.get(row, {}).get(f"{tool}_bytes") for row in measured}
        theirs = {row: n / measured[row] - 1 for row, n in numbers.items() if n is not None}
        lines.append(_peer(name, theirs, ours))
    versions = next(iter(estimates.values()))["versions"]
    caption = (
        f"accelerate {versions['accelerate']}, deepspeed {versions['deepspeed']}, "
        f"cookbook at {versions['cookbook'][:7]}."
    )
    head = ["", "rows with a number", "mean difference", "median", "worst", "too low"]
    head += ["shardwise on these rows: mean", "worst"]
    return f"{table(head, lines)}\n\n{caption}"


def _peer(name: str, theirs: Mapping[str, float], ours: Mapping[str, float]) -> list[str]:
    summary = summary_of(theirs)
    own = summary_of({row: ours[row] for row in theirs})
    assert summary is not None
    count, mean, worst = cells(summary)
    median = percent(summary.median, sign=True)
    covered = f"{count} of {len(ours)}"
    return [name, covered, mean, median, worst, f"{summary.too_low} of {count}", *cells(own)[1:]]


def families(comparisons: Sequence[Comparison]) -> str:
    lines = []
    for family in dict.fromkeys(sorted((c["family"] for c in comparisons), key=_family_order)):
        members = [c for c in comparisons if c["family"] == family]
        numbers = [cells(summarize(members, quantity)) for quantity in ("reserved", "step", "joules")]
        lines.append([family, numbers[0][0], *(cell for n in numbers for cell in n[1:])])
    head = ["strategy", "rows", "reserved memory: mean", "worst", "step time: mean", "worst"]
    return table([*head, "energy: mean", "worst"], lines)


def _family_order(family: str) -> tuple[bool, int]:
    return " " in family, FAMILIES.index(family.split(maxsplit=1)[0])


def terms(comparisons: Sequence[Comparison]) -> str:
    lines = []
    for name, quantity in TERMS.items():
        summary = summarize(comparisons, quantity)
        middle = percent(summary.median, sign=True) if summary else ""
        lines.append([name, *cells(summary), middle])
    return table(["", "rows", "mean difference", "worst", "median"], lines)


def ledger(comparisons: Sequence[Comparison]) -> str:
    head = ["row", "set", "reserved, GiB", "predicted", "", "step, s", "predicted", ""]
    return table([*head, "energy, J", "predicted", ""], [_ledger_line(c) for c in comparisons])


def _ledger_line(c: Comparison) -> list[str]:
    line = [f"`{c['id']}`", c["set"]]
    for quantity, unit, digits in (("reserved", GIB, 2), ("step", 1, 3), ("joules", 1, 0)):
        found, difference = c["measured"].get(quantity), c["differences"][quantity]
        line.append("" if found is None else f"{found / unit:,.{digits}f}")
        line.append(f"{c['predicted'][quantity] / unit:,.{digits}f}")
        line.append("" if difference is None else percent(difference, sign=True))
    if c["oom"]:
        line[2], line[4] = "out of memory", "fits" if c["fits"] else "does not fit"
    return line


def _fastest(lines: Sequence[Sequence[object]]) -> str:
    head = ["job", "the plan's choice", "tokens/s/GPU", "the fastest measured", "tokens/s/GPU", "slower by"]
    return table(head, lines)


def mixed_documents(_: Sequence[Comparison]) -> str:
    """Rows on an H100 measured twice: with rows of one and of several documents, and with full rows."""
    path = HERE / "results" / "h100.jsonl"
    full, found, lines = measured_rows(path), repeats(path), []
    for row in load_rows(HERE / "h100.toml"):
        for measured in filter(mixed, found[row.id]):
            one = compare(row, measured)
            pair = [f"{each['peak_reserved_bytes'] / GIB:.2f}" for each in (measured, full[row.id])]
            off = (percent(one["differences"][key], sign=True) for key in ("reserved", "allocated", "step"))
            lines.append([f"`{row.id}`", *pair, *off])
    head = ["row", "reserved, GiB", "with full rows", "reserved memory", "allocated", "time"]
    return table(head, lines)


def rehearsals(_: Sequence[Comparison]) -> str:
    head = ["job", "the plan's choice", "measured", "others of the job"]
    return table(head, rehearsal_table())


BLOCKS = {
    "headline": headline,
    "machines": machines,
    "bound": bound,
    "missed": missed,
    "host": host,
    "waits": waits,
    "h100": lambda _: _elsewhere("h100"),
    "slow": lambda _: _elsewhere("slow", over_sockets),
    "nodes": lambda _: _elsewhere("two_nodes", two_nodes),
    "again": again,
    "apart": apart,
    "peers": peers,
    "families": families,
    "terms": terms,
    "fastest": lambda _: _fastest(fastest_table((*FASTEST, *CHANGED))),
    "fastest-h100": lambda _: _fastest(fastest_table(ON_H100)),
    "mixed": mixed_documents,
    "rehearsals": rehearsals,
    "ledger": ledger,
}


def filled(page: str, comparisons: Sequence[Comparison]) -> str:
    """The page with everything between its marks replaced."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n\n{BLOCKS[match[1]](comparisons)}\n\n<!-- end -->"

    return re.sub(rf"<!-- ({'|'.join(BLOCKS)}) -->.*?<!-- end -->", fill, page, flags=re.DOTALL)


def main() -> None:
    hash_alike()
    comparisons = compare_all()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), comparisons), encoding="utf-8")
    for name, text in pictures(comparisons).items():
        (PAGE.parent / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
