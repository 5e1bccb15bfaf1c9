"""The tables of the lessons: predictions of `shardwise.plan`, and committed measurements. Needs no GPU.

python docs/lessons/show.py predict llama-2-7b 4xH200 zero1 zero2 zero3 --set train.micro_batch=2
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Option

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "accuracy"))
GIB = 2**30


def options(model: str, gpus: str, changes: Sequence[str]) -> Sequence[Option]:
    """Everything that a plan has simulated, best first."""
    with contextlib.redirect_stderr(io.StringIO()):  # progress
        return shardwise.plan(model=model, gpus=gpus, changes=changes).options


def named(name: str, model: str, gpus: str, changes: Sequence[str], known: Sequence[Option]) -> Option:
    """The fastest simulated option of that name; what a search leaves out is planned by itself."""
    found = [option for option in known if option.strategy.name == name]
    return found[0] if found else options(model, gpus, [*changes, f"strategy={name}"])[0]


def parts(name: str, option: Option) -> dict[str, str]:
    """GiB of the fullest GPU at the moment when most is allocated, and what is reserved beyond that."""
    memory = option.prediction.memory
    terms = memory.terms
    shown = {
        "weights": terms.weights_bytes,
        "gradients": terms.gradients_bytes,
        "optimizer": terms.optimizer_bytes,
        "activations": terms.activations_bytes,
        "loss": terms.loss_bytes,
        "buffers": terms.engine_buffers_bytes,
        "gaps": terms.fragmentation_bytes,
        "torch": memory.peak_reserved_bytes,
        "CUDA": memory.outside_allocator_bytes,
        "GiB": memory.needed_bytes,
    }
    return {"predicted": name, **{key: f"{value / GIB:.1f}" for key, value in shown.items()}, **fits(option)}


def speed(name: str, option: Option) -> dict[str, str]:
    """What an option needs, and how fast it is."""
    time, memory = option.prediction.time, option.prediction.memory
    copies = time.exposed_to_copies_seconds / time.step_seconds
    return {
        "predicted": name,
        "GiB": f"{memory.needed_bytes / GIB:.1f}",
        **fits(option),
        "host GiB": f"{memory.host_bytes / GIB:.0f}",
        "step, s": f"{time.step_seconds:.3g}",
        "tokens/s/GPU": f"{time.tokens_per_second_per_gpu:,.0f}",
        "waits: network": f"{time.exposed_communication_fraction:.0%}",
        "copies": f"{copies:.0%}",
        "J/token": f"{option.prediction.energy.joules_per_token:.3f}",
    }


def fits(option: Option) -> dict[str, str]:
    """What a process may use of a GPU, in GiB, and whether the option fits."""
    return {"of": f"{option.prediction.memory.capacity_bytes / GIB:.1f}", "fits": option.fit}


def predict(asked: argparse.Namespace) -> Iterable[dict[str, str]]:
    """One row for each strategy."""
    known = options(asked.model, asked.gpus, asked.set) if len(asked.strategies) > 1 else ()
    row = parts if asked.parts else speed
    for name in asked.strategies:
        yield row(name, named(name, asked.model, asked.gpus, asked.set, known))


def states(asked: argparse.Namespace) -> Iterable[dict[str, str]]:
    """Weights and gradients in 2 bytes; fp32 weights, momentum and variance of AdamW: 12. In GiB."""
    with contextlib.redirect_stderr(io.StringIO()):
        plan = shardwise.plan(model=asked.model, gpus="1xH200", changes=["strategy=single"])
    parameters = plan.job.parameters
    for name, held in {
        "replicated": (1, 1, 1),
        "ZeRO-1": (1, 1, 0),
        "ZeRO-2": (1, 0, 0),
        "ZeRO-3": (0, 0, 0),
    }.items():
        shares = [
            part * parameters / GIB / (1 if all_of else asked.gpus)
            for part, all_of in zip((2, 2, 12), held, strict=True)
        ]
        yield dict(
            zip(
                ("GiB on a GPU", "weights", "gradients", "optimizer", "sum"),
                (name, *(f"{share:.1f}" for share in (*shares, sum(shares)))),
                strict=True,
            )
        )


def ladder(asked: argparse.Namespace) -> Iterable[dict[str, str]]:
    """Each step keeps the changes of the steps before it; a step is `LABEL: KEY=VALUE KEY=VALUE`."""
    changes, before = list(asked.set), None
    for step in asked.steps:
        label, _, more = step.partition(": ")
        changes += more.split()
        (option, *_) = options(asked.model, asked.gpus, changes)
        now = option.prediction.memory.needed_bytes / GIB
        full = speed(label, option)
        saved = "" if before is None else f"{before - now:+.1f}"
        yield {"step": label, "GiB": full["GiB"], "saved": saved} | {
            key: full[key] for key in ("fits", "host GiB", "tokens/s/GPU")
        }
        before = now


def choose(asked: argparse.Namespace) -> Iterable[dict[str, str]]:
    """What a plan chooses, for each model and machine; `MODEL+KEY=VALUE` changes the job (LoRA)."""
    for model in asked.models:
        name, *changes = model.split("+")
        for gpus in asked.gpus:
            with contextlib.redirect_stderr(io.StringIO()):
                plan = shardwise.plan(model=name, gpus=gpus, changes=[*asked.set, *changes])
            row = {"model": name + " LoRA" * bool(changes), "GPUs": gpus}
            if plan.chosen is None:
                yield row | {"choice": "nothing fits", "GiB": "", "of": "", "tokens/s/GPU": ""}
                continue
            shown = speed("", plan.chosen)
            yield (
                row
                | {"choice": plan.chosen.strategy.name}
                | {key: shown[key] for key in ("GiB", "of", "tokens/s/GPU")}
            )


def ledger() -> dict[str, dict[str, Any]]:
    """The latest measurement of each row of the accuracy ledger, all on H200."""
    path = ROOT / "benchmarks" / "accuracy" / "results" / "measured.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row for row in rows}


def measured(asked: argparse.Namespace) -> Iterable[dict[str, str]]:
    """Rows of the accuracy ledger, each with what is predicted for exactly that row.

    Both GiB are what torch reserves on the fullest GPU: without CUDA and NCCL, which `predict` counts.
    """
    import predict as accuracy
    from rows import load_rows

    rows, found = {row.id: row for row in load_rows(accuracy.HERE / "rows.toml")}, ledger()
    for name in asked.rows:
        row = found[name]
        memory = accuracy.predict(rows[name], earlier=accuracy.earlier_kernels(row)).memory
        shown = {"on H200": name, "GiB predicted": f"{memory.peak_reserved_bytes / GIB:.1f}"}
        if row["oom"]:
            shown |= {"GiB predicted": "does not fit" if not memory.fits else "fits"}
            cap = f"{row['row']['memory_cap_gib']:.0f} GiB"
            yield (
                shown
                | {"measured": f"out of memory ({cap})"}
                | dict.fromkeys(("host GiB", "step, s", "tokens/s/GPU", "J/token"), "")
            )
            continue
        gpus = row["row"]["gpus"]
        yield shown | {
            "measured": f"{row['peak_reserved_bytes'] / GIB:.1f}",
            "host GiB": f"{sum(row['host_memory_bytes_by_rank']) / GIB:.0f}",
            "step, s": f"{row['step_seconds']:.3g}",
            "tokens/s/GPU": f"{row['tokens_per_step'] / row['step_seconds'] / gpus:,.0f}",
            "J/token": f"{row['joules_per_step'] / row['tokens_per_step']:.3f}"
            if row["joules_per_step"]
            else "",
        }


def throughput(asked: argparse.Namespace) -> Iterable[dict[str, str]]:
    """Rows of benchmarks/peers/results."""
    path = ROOT / "benchmarks" / "peers" / "results" / asked.file
    found = {row["row"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    first = found[asked.rows[0]]["tokens_per_second_per_gpu"]
    for name in asked.rows:
        row = found[name]
        yield {
            f"measured on {row['gpus']} H200": name,
            "rows": str(row["micro_batch"]),
            "tokens": str(row["sequence_length"]),
            "GiB": f"{row['peak_reserved_gib']:.1f}",
            "step, s": f"{row['step_seconds_median']:.3g}",
            "tokens/s/GPU": f"{row['tokens_per_second_per_gpu']:,.0f}",
            "of the first": f"{row['tokens_per_second_per_gpu'] / first:.2f}",
        }


def limits(asked: argparse.Namespace) -> Iterable[dict[str, str]]:
    """A recorded sweep of power limits: ratios to the highest limit, measured and predicted."""
    path = ROOT / "benchmarks" / "power_limits_predicted" / "results" / "zeus.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    row = {row["name"]: row for row in reversed(rows)}[asked.sweep]  # the first of the name
    highest = {"limit_watts": row["highest_watts"], "time": (1, 1), "energy": (1, 1)}
    for level in (highest, *row["levels"]):
        yield {"limit, W": f"{level['limit_watts']:.0f}"} | {
            f"{key}, {how}": f"{level[key][place]:.2f}"
            for key in ("time", "energy")
            for place, how in enumerate(("measured", "predicted"))
        }


def printed(rows: Iterable[dict[str, str]]) -> str:
    """Columns under their names: the first to the left, the others to the right."""
    lines = list(rows)
    cells = [list(lines[0]), *(list(line.values()) for line in lines)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def parser() -> argparse.ArgumentParser:
    """One verb for each table."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(required=True)

    def verb(function: Any, *arguments: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(function.__name__)
        added.set_defaults(function=function)
        for name in arguments:
            added.add_argument(name)
        return added

    one = verb(predict, "model", "gpus")
    one.add_argument("strategies", nargs="+")
    one.add_argument("--parts", action="store_true", help="where the memory goes, instead of the speed")
    two = verb(states, "model")
    two.add_argument("gpus", type=int)
    three = verb(ladder, "model", "gpus")
    three.add_argument("steps", nargs="+")
    four = verb(choose)
    four.add_argument("--models", nargs="+", required=True)
    four.add_argument("--gpus", nargs="+", required=True)
    for planned in (one, three, four):
        planned.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    verb(measured).add_argument("rows", nargs="+")
    verb(throughput, "file").add_argument("rows", nargs="+")
    verb(limits, "sweep")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 2 for a name that is unknown, which one line says."""
    asked = parser().parse_args(arguments)
    try:
        print(printed(asked.function(asked)))
    except ShardwiseError as error:
        return refuse("; ".join(filter(None, (error.problems[0].what, error.problems[0].fix))))
    except FileNotFoundError as error:
        return refuse(f"there is no file {error.filename}")
    except KeyError as error:
        return refuse(f"there is no row {error.args[0]!r}")
    return 0


def refuse(what: str) -> int:
    """Say it in one line; returns the exit code."""
    print(f"show.py: error: {' '.join(what.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
