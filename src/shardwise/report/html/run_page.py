"""Runs as a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.record.read import RunRecord
from shardwise.report import bench as values
from shardwise.report.html import numbers, sections
from shardwise.report.html.markup import Child, h
from shardwise.report.html.page import page
from shardwise.report.html.sections import Row, ran, section
from shardwise.report.rows import rows_of
from shardwise.units import count, duration


def run_page(paths: Sequence[Path]) -> str:
    """The HTML document of one run or of several. JobError where a folder is no run folder."""
    both = rows_of(paths)
    rows, records = [row for row, _ in both], [record for _, record in both]
    first = records[0]
    model, data = (first.job.get(key) or {} for key in ("model", "data"))
    title = rows[0]["label"] if len(rows) == 1 else ", ".join(row["label"] for row in rows)
    trained = data.get("train")
    lead = f"{model.get('source')} on {', '.join(trained) if isinstance(trained, list) else trained}"
    if len(rows) == 1:
        summary = rows[0]["summary"]
        lead += (
            f" · {summary['strategy']} on {summary['processes']} · {summary['status']}, "
            f"{summary['steps']} of {summary['total_steps']} steps"
        )
    return page(
        title,
        eyebrow="shardwise report",
        lead=lead,
        made=", ".join(str(record.path) for record in records),
        body=[_facts(rows[0]) if len(rows) == 1 else None, *_parts(rows, records)],
    )


def _facts(row: Row) -> Child:
    summary, found = row["summary"], row["measured"]
    if found is None:
        return None
    fullest = f"of the fullest {sections.whose([row])}"
    each = numbers.plain(found["tokens_per_second_per_gpu"])
    entries = [
        ("Loss", numbers.loss(summary["last_loss"]), f"from {numbers.loss(summary['first_loss'])}"),
        (
            "Speed",
            f"{numbers.plain(summary['tokens_per_second'])} tok/s",
            f"{each} each, {numbers.seconds(found['step_seconds'])} a step",
        ),
        (
            "Memory at most",
            numbers.gib(values.needed(row)[1]),
            fullest,
        ),
        ("Took", duration(summary["wall_seconds"]), f"{count(summary['tokens'])} tokens"),
    ]
    evaluations = summary["evaluations"]
    if evaluations:
        began = numbers.loss(evaluations[0]["loss"])
        entries.insert(1, ("Held-out loss", numbers.loss(evaluations[-1]["loss"]), f"from {began}"))
    return sections.facts(entries)


def _parts(rows: Sequence[Row], records: Sequence[RunRecord]) -> list[Child]:
    measured = ran(rows)
    parts: list[Child] = [section("In numbers", None, sections.table(rows, verdicts=False))]
    if measured:
        energy = sections.pairs(rows, values.energy, numbers.plain, "J/token")
        foretold = any(row["predicted"] for row in rows)
        parts += [
            section(
                "Loss",
                "Training loss by step; evaluations on held-out data are dashed.",
                sections.overlay(
                    rows, "loss", label="loss by step", text=numbers.loss, zero=False, held_out=True
                ),
            ),
            section(
                "Memory",
                "Predicted term by term, and measured." if foretold else "The most that was needed.",
                sections.memory(rows),
            ),
            section(
                "Memory over the run",
                "After each step: allocated, and reserved (lighter), where a GPU counts both.",
                sections.over_steps(rows),
            ),
            section(
                "Throughput",
                "Tokens a second, of all GPUs, in each step.",
                sections.overlay(
                    _rates(rows),
                    "rates",
                    label="tokens a second by step",
                    text=numbers.plain,
                    zero=True,
                    alike=False,
                ),
            ),
            section("Energy", "Of all GPUs; the host is not in it.", energy) if energy else None,
        ]
    decision = [_decision(row, record) for row, record in zip(rows, records, strict=True)]
    machines = [sections.environment(record.environment) for record in _different(records)]
    return [
        *parts,
        section("Decision", None, decision),
        section("Environment", None, machines),
        section("Do it again", None, h("pre", None, "\n".join(_command(record) for record in records))),
    ]


def _rates(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows with tokens a second by step."""
    found = []
    for row in ran(rows):
        m = row["measured"]
        rates = [tokens / s for tokens, s in zip(m["tokens_all"], m["step_seconds_all"], strict=True)]
        found.append({**row, "measured": {**m, "rates": rates, "evaluations": []}})
    return found


def _decision(row: Row, record: RunRecord) -> Child:
    """Why this strategy, and what else was considered."""
    plan: dict[str, Any] = dict(record.plan)
    name = (row["strategy"] or {}).get("name", "the strategy")
    said: list[Child] = [[h("b", None, f"{row['label']}: {name}"), f", {sections.note(row)}"]]
    said += list(row["why"])
    for other in plan.get("alternatives", [])[:8]:
        strategy = other["strategy"]
        said.append(
            f"not {strategy['name']} with micro-batch {strategy['micro_batch']}: {'; '.join(other['why'])}"
        )
    refused = {one["strategy"]["name"]: one["reason"] for one in plan.get("refused", [])}
    said += [f"not allowed, {name}: {reason}" for name, reason in refused.items()]
    if row["predicted_unavailable"]:
        said.append(f"no prediction: {row['predicted_unavailable']}")
    return sections.card(sections.listed(said))


def _different(records: Sequence[RunRecord]) -> list[RunRecord]:
    """One record for each machine and set of versions."""
    keys = ("gpus", "driver", "cpu", "host", "versions", "python")
    seen = {str([record.environment.get(key) for key in keys]): record for record in reversed(records)}
    return list(reversed(seen.values()))


def _command(record: RunRecord) -> str:
    typed = record.environment.get("command")
    if typed:
        return shlex.join(typed)
    return f"shardwise train {shlex.quote(str(record.path / 'job.yaml'))}"
