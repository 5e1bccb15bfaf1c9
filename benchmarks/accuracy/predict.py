"""Compare predictions with the measured rows.

    python benchmarks/accuracy/predict.py [--set fit] [--match REGEX] [--out FILE] [--h100 FILE]

No GPU is needed. A difference is (predicted - measured) / measured; memory is the worst rank's.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from earlier import earlier_kernels, kernels_of, mixed, with_timer
from hosts import paced
from rows import SETS, Row, load_rows

from shardwise.engines import descriptor
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware
from shardwise.kernels.target import HOPPER
from shardwise.objective import objective_of
from shardwise.planner.evidence import kind_of
from shardwise.planner.simulate import simulate
from shardwise.simulate.prediction import Prediction, Time
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.step import predict_time
from shardwise.trace.trace import Tracer

HERE = Path(__file__).parent
MEASURED = HERE / "results" / "measured.jsonl"
RESULTS = {"rows": MEASURED, "h100": HERE / "results" / "h100.jsonl"}
"""What was measured of the rows of a file."""

BOUNDS = {"reserved": (0.02, 0.05), "step": (0.10, 0.20)}
"""Largest difference of a set's mean, and of one row (decision 0037)."""

NOT_TRACED = frozenset(
    {"passes", "codes", "gathers", "waits", "hooks", "norms", "sums", "groups", "parts", "kept"}
    | {"adamw", "marked", "buckets", "searched", "handed", "stayed"}
)
"""Of `earlier_kernels`, those that no trace depends on."""

ENERGY_SECONDS = 1.0
"""Timed steps of a row whose energy counts: NVML's counter is updated up to ten times a second."""

QUANTITIES = ("reserved", "allocated", "outside", "needed", "fragmentation", "step", "joules", "host")


@cache
def measured_rows(path: Path = MEASURED) -> dict[str, dict[str, Any]]:
    """The measurements of a file by row id: for each row the one with the median step time.

    For an even number it is the slower of the two in the middle, so that no measurement is picked by hand.
    Only those count that differ least from how a step runs today: DeepSpeed's throughput timer, mixed
    documents and each of `earlier_kernels` are one difference.
    """
    by_id = {}
    for name, rows in repeats(path).items():
        found = [with_timer(row) + mixed(row) + len(earlier_kernels(row)) for row in rows]
        by_id[name] = [row for row, count in zip(rows, found, strict=True) if count == min(found)]
    return {name: sorted(rows, key=_seconds)[len(rows) // 2] for name, rows in by_id.items()}


@cache
def repeats(path: Path = MEASURED) -> dict[str, list[dict[str, Any]]]:
    """All measurements of each row, oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        found.setdefault(row["id"], []).append(row)
    return {name: sorted(rows, key=lambda row: str(row["date"])) for name, rows in found.items()}


def _seconds(row: Mapping[str, Any]) -> float:
    return float(row.get("step_seconds") or math.inf)  # a row that did not run is the slowest


@cache
def process_bytes() -> int:
    """Resident memory of a process that offloads nothing; predictions of host memory leave it out."""
    rows = [row for row in measured_rows().values() if not row["error"] and not _offloads(row["strategy"])]
    return int(statistics.median(row["host_memory_bytes"] for row in rows))


def predict(
    row: Row,
    *,
    earlier: frozenset[str] = frozenset(),
    hardware: Hardware | None = None,
    in_part: bool = False,
) -> Prediction:
    """The prediction of a row, on H200 if no hardware is given; `earlier` as in `earlier_kernels`.

    `in_part`: rows of one and of several documents in a micro-batch, as `shardwise plan` assumes.
    """
    trace = _traced(row, earlier=earlier, in_part=in_part)
    hardware = hardware or parse_hardware(f"{row.gpus}xH200")
    with kernels_of(earlier & NOT_TRACED):
        return simulate(trace, row.resolved(), hardware, memory_cap_bytes=row.memory_cap_bytes)


def predict_step(row: Row, *, earlier: frozenset[str], hardware: Hardware, in_part: bool) -> Time:
    """The time alone: memory, most of a prediction's work, is the same at each pace of the host."""
    trace, strategy = _traced(row, earlier=earlier, in_part=in_part), row.resolved()
    with kernels_of(earlier & NOT_TRACED):
        played = descriptor(strategy).play(trace, strategy, hardware)
        return predict_time(trace, strategy, hardware, played)


def _traced(row: Row, *, earlier: frozenset[str], in_part: bool) -> StepTrace:
    strategy, kernels = row.resolved(), earlier - NOT_TRACED
    tracer = kernels, row.model, row.layers, row.lora, row.variants, row.quantization, row.sequence_length
    trace = _trace(
        *tracer,
        row.precision,
        row.attention,
        micro_batch=row.micro_batch,
        checkpoint_every=strategy.checkpoint_every,
        tensor_parallel=strategy.tensor_parallel,
        single_segment_rows=max(1, row.micro_batch - 1) if in_part else None,
    )
    return replace(trace, one_shape=False) if "passes" in earlier else trace


@cache
def _tracer(
    earlier: frozenset[str],
    model: str,
    layers: int,
    lora: int,
    variants: str,
    quantization: str,
    sequence_length: int,
    precision: str,
    attention: str,
) -> Tracer:
    row = Row(
        model=model,
        layers=layers,
        lora=lora,
        variants=variants,
        quantization=quantization,
        sequence_length=sequence_length,
        precision=precision,
    )
    job = row.job(source=model, text="text.txt", output="runs")
    with kernels_of(earlier):
        return Tracer(
            job.model,
            precision=precision,
            sequence_length=sequence_length,
            objective=objective_of(job),
            target=replace(HOPPER, flash4=attention == "flash4"),
        )


@cache
def _trace(
    *tracer: Any,
    micro_batch: int,
    checkpoint_every: int,
    tensor_parallel: int,
    single_segment_rows: int | None,
) -> StepTrace:
    made, earlier = _tracer(*tracer), tracer[0]
    with kernels_of(earlier):
        return made.trace(
            rows=micro_batch,
            checkpoint_every=checkpoint_every,
            tensor_parallel=tensor_parallel,
            single_segment_rows=single_segment_rows,
        )


def compare(row: Row, measured: Mapping[str, Any], *, hardware: Hardware | None = None) -> dict[str, Any]:
    """A row's `predicted` and `measured` values and their `differences`, by QUANTITIES.

    `hardware`: what it is predicted on; if not given, the kind of GPU that it was measured on. In both cases
    with the pace of that machine's host, as `doctor --calibrate` finds it; `uncalibrated` is without it.

    Values are bytes, seconds and joules; a difference is None if nothing was measured. `fits` is predicted,
    `oom` is whether the row ran out of memory. `fragmentation` is reserved minus allocated memory at the
    peaks; its difference is a share of the reserved memory, because it may be 0. `host` is the memory of all
    processes, minus what a process takes anyway, for rows that offload. `host_share` is the part of the
    predicted step that the host needs to issue it.
    """
    gpu = "H100" if "H100" in measured.get("gpu", "") else "H200"
    hardware = hardware or parse_hardware(f"{row.gpus}x{gpu}")
    how: dict[str, Any] = {"earlier": earlier_kernels(measured), "in_part": mixed(measured)}
    prediction = predict(row, hardware=paced(hardware, measured), **how)
    usual = predict_step(row, hardware=hardware, **how)
    memory = prediction.memory
    predicted = _values(
        reserved=memory.peak_reserved_bytes,
        allocated=memory.peak_allocated_bytes,
        outside=memory.outside_allocator_bytes,
        step=prediction.time.step_seconds,
        joules=prediction.energy.joules_per_step,
        host=memory.host_bytes,
    )
    found = {} if measured["error"] else found_in(measured)
    differences = {key: _difference(key, predicted, found) for key in QUANTITIES}
    return {
        "id": row.id,
        "set": row.set,
        "family": family(row),
        "gpus": row.gpus,
        "fits": memory.fits,
        "oom": bool(measured["oom"]),
        "host_share": _host_share(prediction.time),
        "predicted": predicted,
        "measured": found,
        "differences": differences,
        "uncalibrated": {
            "host_share": _host_share(usual),
            "step": _difference("step", {"step": usual.step_seconds}, found),
        },
    }


def _host_share(time: Time) -> float:
    return time.launch_seconds / time.step_seconds


def family(row: Row) -> str:
    """Engine and stage of a row, and whether it offloads: `zero3`, `fsdp2 offload`."""
    return kind_of(row.resolved()).replace(" tensor-parallel", "")


def _offloads(strategy: Mapping[str, Any]) -> bool:
    return {strategy["offload_optimizer"], strategy["offload_parameters"]} != {"none"}


def found_in(measured: Mapping[str, Any]) -> dict[str, float | None]:
    own = process_bytes() * len(measured["host_memory_bytes_by_rank"])
    timed = sum(measured["step_seconds_all"][measured["warmup_steps"] :])
    return _values(
        reserved=measured["peak_reserved_bytes"],
        allocated=measured["peak_allocated_bytes"],
        outside=measured["outside_allocator_bytes"],
        step=measured["step_seconds"],
        joules=measured["joules_per_step"] if timed >= ENERGY_SECONDS else None,
        host=sum(measured["host_memory_bytes_by_rank"]) - own if _offloads(measured["strategy"]) else None,
    )


def _values(**values: float | None) -> dict[str, float | None]:
    """The values and those that follow from them: `needed` decides whether a row fits."""
    reserved, allocated, outside = (values[key] for key in ("reserved", "allocated", "outside"))
    assert reserved is not None
    values["fragmentation"] = None if allocated is None else reserved - allocated
    values["needed"] = None if outside is None else reserved + outside
    return values


def _difference(
    key: str, predicted: Mapping[str, float | None], measured: Mapping[str, float | None]
) -> float | None:
    ours, found = predicted[key], measured.get(key)
    if ours is None or found is None:
        return None
    base = measured["reserved"] if key == "fragmentation" else found
    assert base is not None
    return (ours - found) / base


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Differences of a quantity's predictions from its measurements."""

    rows: int
    mean: float
    """Of the absolute differences."""
    median: float
    """With sign, so that a bias shows."""
    worst: float
    """With sign."""
    worst_row: str
    too_low: int
    """Rows predicted lower than measured, by more than 1 % of the measured."""


def summarize(comparisons: Iterable[Mapping[str, Any]], quantity: str) -> Summary | None:
    """Summary of the rows in which the quantity was measured; None if there are none."""
    return summary_of({c["id"]: c["differences"][quantity] for c in comparisons})


def summary_of(differences: Mapping[str, float | None]) -> Summary | None:
    """Summary of differences by row; None means not measured."""
    by_row = {row: difference for row, difference in differences.items() if difference is not None}
    if not by_row:
        return None
    worst_row = max(by_row, key=lambda row: abs(by_row[row]))
    return Summary(
        rows=len(by_row),
        mean=statistics.mean(map(abs, by_row.values())),
        median=statistics.median(by_row.values()),
        worst=by_row[worst_row],
        worst_row=worst_row,
        too_low=sum(difference < -0.01 for difference in by_row.values()),
    )


def compare_all(of: str = "rows", *, only: str | None = None, match: str = "") -> list[dict[str, Any]]:
    """All measured rows that are still in the file `of`, in its order. `only`: one set."""
    found = measured_rows(RESULTS[of])
    rows = [row for row in load_rows(HERE / f"{of}.toml") if row.id in found]
    rows = [row for row in rows if (only is None or row.set == only) and re.search(match, row.id)]
    return [compare(row, found[row.id]) for row in rows]


def _line(comparison: Mapping[str, Any]) -> str:
    cells = (
        f"{'' if difference is None else f'{100 * difference:+.2f}':>9}"
        for difference in comparison["differences"].values()
    )
    ended = "out of memory" if comparison["oom"] else "" if comparison["measured"] else "not measured"
    return (
        f"{comparison['id']:58}{''.join(cells)}  {'fits' if comparison['fits'] else 'does not fit'}  {ended}"
    )


def _print_summary(comparisons: Sequence[Mapping[str, Any]]) -> None:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for comparison in comparisons:
        for group in ("all", comparison["set"], comparison["family"]):
            groups.setdefault(group, []).append(comparison)
    print(f"\n{'%':16}{'':14}  rows  mean ||   median    worst")
    for group, members in groups.items():
        for quantity in QUANTITIES:
            s = summarize(members, quantity)
            if s is not None:
                numbers = f"{100 * s.mean:9.2f} {100 * s.median:+8.2f} {100 * s.worst:+8.2f}"
                print(f"{group:16}{quantity:14}  {s.rows:4} {numbers}  {s.worst_row}")


def hash_alike() -> None:
    """Restart the script with a fixed string hash.

    Gemma 3 in transformers iterates over a set of strings: its predicted memory would vary between runs.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})


def main() -> None:
    hash_alike()
    gc.disable()  # traces are made of millions of objects that last
    parser = argparse.ArgumentParser(description="Compare predictions with measurements, row by row")
    parser.add_argument("--set", choices=SETS, help="one set only")
    parser.add_argument("--match", default="", metavar="REGEX", help="rows whose id matches")
    parser.add_argument("--out", type=Path, help="write one comparison per line as JSON")
    parser.add_argument("--h100", type=Path, help="write the same of the rows on H100")
    arguments = parser.parse_args()
    comparisons = compare_all(only=arguments.set, match=arguments.match)
    print(f"{'differences, %':58}" + "".join(f"{quantity[:8]:>9}" for quantity in QUANTITIES))
    for comparison in comparisons:
        print(_line(comparison))
    _print_summary(comparisons)
    if arguments.out:
        _write(arguments.out, comparisons)
    if arguments.h100:  # in the same process: many of their traces are those of rows above
        _write(arguments.h100, compare_all("h100"))


def _write(path: Path, comparisons: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(comparison)}\n" for comparison in comparisons), encoding="utf-8")


if __name__ == "__main__":
    main()
