"""The tables of docs/published.md, from results/predictions.json.

    python benchmarks/published/published_page.py

The page's prose is written by hand; this script writes what is between `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from published import RESULTS, load_runs

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
LARGE = 0.15
"""A difference above this has its reason on the page."""

SPEED, MEMORY = ("tokens_per_second",), ("allocated_gib", "reserved_gib")
Result = Mapping[str, Any]


def difference(result: Result, quantities: Sequence[str]) -> float | None:
    """The row's difference in the first of `quantities` that was published."""
    values = (result["differences"][quantity] for quantity in quantities)
    return next((value for value in values if value is not None), None)


def wrong_fit(result: Result) -> bool:
    """Whether the prediction of fitting and the authors' report contradict each other."""
    if result["fits"] == "not compared" or result["ran"] == "no result":
        return False
    return bool((result["fits"] != "no") != (result["ran"] == "yes"))


def reason(result: Result, about: str, runs: Mapping[str, Any]) -> str | None:
    """Why a row's `about` (speed, memory, fits) is off, by runs.toml."""
    found = (one for one in runs["reason"] if one["about"] == about and re.search(one["rows"], result["id"]))
    return next((str(one["why"]) for one in found), None)


def needing_reason(results: Iterable[Result]) -> list[tuple[Result, str]]:
    """Rows whose difference is large, or whose fit is wrong, and what about them."""
    needs = []
    for result in results:
        for about, quantities in (("speed", SPEED), ("memory", MEMORY)):
            value = difference(result, quantities)
            if value is not None and abs(value) > LARGE:
                needs.append((result, about))
        if wrong_fit(result):
            needs.append((result, "fits"))
    return needs


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def _median(values: Sequence[float]) -> tuple[str, str, str]:
    if not values:
        return "", "", ""
    sizes = [abs(value) for value in values]
    within = sum(size <= LARGE for size in sizes) / len(sizes)
    return f"{100 * statistics.median(sizes):.1f} %", _percent(statistics.median(values)), f"{within:.0%}"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def headline(results: Sequence[Result]) -> str:
    """Medians by quantity, and by kind of GPU."""
    groups: dict[str, Callable[[Result], bool]] = {
        "all": lambda _: True,
        "full tuning": lambda r: r["setup"]["lora"] == 0,
        "LoRA": lambda r: r["setup"]["lora"] > 0 and r["setup"]["quantization"] == "none",
        "LoRA on NF4": lambda r: r["setup"]["quantization"] != "none",
        "up to 8 GPUs": lambda r: r["predicted"]["world_size"] <= 8,
        "16 to 1,024 GPUs": lambda r: r["predicted"]["world_size"] > 8,
        **{
            gpu: (lambda r, gpu=gpu: gpu in r["setup"]["gpus"])  # type: ignore[misc]
            for gpu in ("A100", "H100", "B200", "RTX3090", "RTX4090")
        },
    }
    rows = []
    for name, belongs in groups.items():
        for what, quantities in (("speed", SPEED), ("memory", MEMORY)):
            found = [difference(result, quantities) for result in results if belongs(result)]
            values = [value for value in found if value is not None]
            if values:
                rows.append([what, name, len(values), *_median(values)])
    rows.sort(key=lambda row: row[0] == "memory")
    return _table(["", "rows", "number", "median difference", "median, with sign", "within 15 %"], rows)


def fits(results: Sequence[Result]) -> str:
    """Who fits and who does not, predicted against reported."""
    said = [(result, result["fits"] != "no") for result in results if result["fits"] != "not compared"]
    names = {"yes": "ran", "no": "out of memory", "no result": "memory near the card's end, no speed"}
    rows = [
        [
            name,
            sum(fit for result, fit in said if result["ran"] == ran),
            sum(not fit for result, fit in said if result["ran"] == ran),
        ]
        for ran, name in names.items()
    ]
    return _table(["the authors report", "predicted to fit", "predicted not to fit"], rows)


def sources(results: Sequence[Result], runs: Mapping[str, Any]) -> str:
    """One table for each source."""
    by_table: dict[str, list[Result]] = {}
    for result in results:
        by_table.setdefault(result["table"], []).append(result)
    parts = [
        _source(table, by_table[table["id"]], runs) for table in runs["table"] if table["id"] in by_table
    ]
    return "\n\n".join(parts)


def _source(table: Mapping[str, Any], results: Sequence[Result], runs: Mapping[str, Any]) -> str:
    about = [f"### {table['id']}. {table['title']}", ""]
    about.append(f"<{table['source']}> ({table['date']}). {table.get('note', '')}.".replace("..", "."))
    if "counted" in table:
        about.append(f"Memory: {table['counted']}.")
    about += [f"Not stated: {table['not_stated']}.", ""]
    reasons: dict[str, int] = {}
    rows = [_row(result, runs, reasons) for result in results]
    header = ["row", "model", "GPUs", "strategy", "length", "batch", "ckpt", "adapter"]
    header += ["tokens/s/GPU", "predicted", "difference", "GiB", "predicted", "difference", "why"]
    empty = {column for column in range(len(header)) if all(row[column] == "" for row in rows)}
    kept = [column for column in range(len(header)) if column not in empty]
    lines = _table([header[column] for column in kept], ([row[column] for column in kept] for row in rows))
    notes = [f"{number}. {why}" for why, number in reasons.items()]
    return "\n".join([*about, lines, *([""] if notes else []), *notes])


def _row(result: Result, runs: Mapping[str, Any], reasons: dict[str, int]) -> list[str]:
    setup = result["setup"]
    accumulation = f" x {setup['accumulation']}" if setup["accumulation"] > 1 else ""
    quantity = next((q for q in MEMORY if result["published"][q] is not None), None)
    speed, memory = difference(result, SPEED), difference(result, MEMORY)
    whys = []
    for about, large in (
        ("speed", speed is not None and abs(speed) > LARGE),
        ("memory", memory is not None and abs(memory) > LARGE),
        ("fits", wrong_fit(result)),
    ):
        why = reason(result, about, runs) if large else None
        if why is not None:
            whys.append(str(reasons.setdefault(why, len(reasons) + 1)))
    published = result["published"]["tokens_per_second"]
    said = "yes" if result["fits"] != "no" else "no"
    ran = {"no": "out of memory", "no result": "no result"}.get(result["ran"], "fits")
    verdict = [f"{published:,.0f}" if published else "", "", ""]
    if published:
        verdict[1:] = [f"{result['predicted']['tokens_per_second']:,.0f}", _percent(speed)]
    elif quantity is None:
        verdict = [ran, "fits" if said == "yes" else "does not fit", ""]
    held = ["", "", ""]
    if quantity is not None:
        held = [
            f"{result['published'][quantity]:.2f}",
            f"{result['predicted'][quantity]:.2f}",
            _percent(memory),
        ]
    base = {"none": "", "nf4": " on NF4"}[setup["quantization"]]
    adapter = f"LoRA {setup['lora']}{base}" if setup["lora"] else ""
    named = [result["id"], setup["model"], setup["gpus"], setup["strategy"], str(setup["sequence"])]
    batch = f"{setup['micro']}{accumulation}"
    return [*named, batch, str(setup["checkpointing"]), adapter, *verdict, *held, ", ".join(whys)]


def left_out(runs: Mapping[str, Any]) -> str:
    """The rows that are no job here, and why."""
    rows = [[one["table"], one["rows"], one["why"]] for one in runs["left_out"]]
    total = sum(one["rows"] for one in runs["left_out"])
    return f"{total} rows:\n\n" + _table(["table", "rows", "why"], rows)


def filled(text: str, parts: Mapping[str, str]) -> str:
    """`text` with each part between its marks."""
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the page has no place for {name}")
        text = pattern.sub(lambda found, part=part: f"{found[1]}\n{part}\n\n{found[2]}", text, count=1)  # type: ignore[misc]
    return text


def main() -> None:
    runs = load_runs()
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    missing = [f"{r['id']} ({about})" for r, about in needing_reason(results) if not reason(r, about, runs)]
    if missing:
        raise SystemExit(f"runs.toml has no reason for {', '.join(missing)}")
    parts = {
        "headline": headline(results),
        "fits": fits(results),
        "sources": sources(results, runs),
        "left-out": left_out(runs),
    }
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()
