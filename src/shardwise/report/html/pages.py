"""HTML pages of a bench and of runs: the values of each, and the policy that lets a page load nothing."""

import base64
import hashlib
import shlex
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardwise.errors import printable
from shardwise.record.bench import BenchRecord
from shardwise.record.read import RunRecord
from shardwise.report.bench import NEEDED, Row, by_speed, device, pair, ran, reasons, recommended
from shardwise.report.compare import about, row_of
from shardwise.report.html import numbers, views
from shardwise.report.html.energy import energies, phases
from shardwise.units import count, duration, steps

FOLDER = Path(__file__).parent
Fact = tuple[str, str, str]  # a large figure: its name, its value, a remark


@cache
def templates(*more: Path) -> Environment:
    """The templates here and in `more` folders; values are escaped, a name that is missing is an error."""
    made = Environment(
        loader=FileSystemLoader([*more, FOLDER]),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {name: getattr(numbers, name) for name in ("gib", "plain", "share", "loss", "attribute")}
    made.filters |= {"quote": shlex.quote, "command": shlex.join, "steps": steps}
    made.globals |= {"numbers": numbers, "views": views, "pair": pair, "version": version("shardwise")}
    return made


def policy(style: str) -> str:
    """Content-Security-Policy: nothing but this style sheet, which is named by its hash."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    allowed = f"style-src 'sha256-{digest}'; img-src data:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def page(template: str, *more: Path, on_board: bool = False, **context: Any) -> str:
    """A document that needs nothing else; or, `on_board`, one that links to what the board serves."""
    style = (FOLDER / "static" / "style.css").read_text(encoding="utf-8")
    made = templates(*more).get_template(template)
    return made.render(style=style, policy=policy(style), on_board=on_board, **context)


def bench_page(bench: BenchRecord, *, on_board: bool = False) -> str:
    """The HTML document of a bench's folder."""
    head, rows = bench.head, by_speed(bench.rows)
    job, measured = head["job"], ran(rows)
    sizes = {row["measured"].get("parameters") for row in measured} - {None}
    size = f", {count(min(sizes))} parameters" if sizes else ""
    shape = f"{job['train']['global_batch']} rows of {job['data']['sequence_length']} tokens a step"
    machine = f"{head['processes']} × {device(head)}"
    dates = sorted(f"{row['date'][:10]} {row['date'][11:16]} UTC" for row in rows)
    losses = [loss[-1] for row in measured if (loss := row["measured"]["loss"])[-1] is not None]
    guesses = [row for row in rows if row.get("fit") in ("fits", "tight") and not _flushes(row)]
    return page(
        "bench.html.j2",
        on_board=on_board,
        title=str(head["name"]),
        lead=f"{about(job)[0]}{size} · {shape}, {job['train']['precision']} · {machine}",
        made=f"measured {dates[0]} to {dates[-1]}" if dates else "nothing is measured yet",
        facts=_bench_facts(measured),
        path=bench.path,
        command=head["environment"].get("command") or ["shardwise", "bench"],
        head=head,
        rows=rows,
        measured=measured,
        predicted=any(row["predicted"] for row in rows),
        apart=max(losses) / min(losses) - 1 if len(losses) > 1 else None,
        guess=max(guesses, key=lambda row: pair(row, "tokens_per_second_per_gpu")[0] or 0, default=None),
        advice=recommended(rows),
        reasons=reasons(rows),
        failures={row["label"]: _failure(row) for row in rows if row["measured"] is None},
    )


def _flushes(row: Row) -> int:
    """Predicted times a step that the allocator gives its cache back; the time of it is not predicted."""
    return int(((row["predicted"] or {}).get("memory") or {}).get("cache_flushes", 0))


def _bench_facts(rows: Sequence[Row]) -> list[Fact]:
    """The best of each kind, and the mean errors of the predictions."""
    facts = []
    speeds = [(pair(row, "tokens_per_second_per_gpu")[1], row["label"]) for row in rows]
    fast = sorted(((speed, label) for speed, label in speeds if speed), key=lambda one: -one[0])
    if fast:
        speed, label = fast[0]
        ahead = f", {speed / fast[1][0]:.2f} times {fast[1][1]}" if len(fast) > 1 else ""
        facts.append(("Fastest", f"{numbers.plain(speed)} tok/s", f"per {views.per(rows)}, {label}{ahead}"))
    lean = min(rows, key=lambda row: pair(row, NEEDED)[1] or 0, default=None)
    if lean is not None:
        facts.append(("Least memory", numbers.gib(pair(lean, NEEDED)[1] or 0), lean["label"]))
    joules = [(used, row["label"]) for row in rows if (used := pair(row, "joules_per_token")[1]) is not None]
    if joules:
        used, label = min(joules, key=lambda one: one[0])
        facts.append(("Least energy", f"{numbers.plain(used)} J/token", label))
    memory, speed_error = (_mean_error(rows, name) for name in (NEEDED, "tokens_per_second_per_gpu"))
    if memory is not None and speed_error is not None:
        remark = f"in memory, {numbers.share(speed_error)} in speed, on average"
        facts.append(("Predictions off by", numbers.share(memory), remark))
    return facts


def _mean_error(rows: Sequence[Row], quantity: str) -> float | None:
    both = [pair(row, quantity) for row in rows]
    errors = [abs(guess / found - 1) for guess, found in both if guess is not None and found]
    return fmean(errors) if errors else None


def _failure(row: Row) -> tuple[str, str]:
    """Why a row has no measurements, and the end of its log, which may be empty."""
    first, _, rest = str(row["error"]).partition("\n")
    what = rest.partition("\n")[0].removeprefix("error: ") if rest.startswith("error: ") else ""
    return f"{row['status']}, {first}{f': {what}' if what else ''}", rest


def run_page(paths: Sequence[Path], *, on_board: bool = False) -> str:
    """The HTML document of one run or of several. JobError where a folder is no run folder."""
    both = [row_of(Path(path)) for path in paths]
    rows, records = [row for row, _ in both], [record for _, record in both]
    subjects = list(dict.fromkeys(row["about"] for row in rows))
    lead = subjects[0] if len(subjects) == 1 else f"{len(rows)} runs of different models or data"
    if len(subjects) > 1:
        rows = [{**row, "remark": row["about"]} for row in rows]
    if len(rows) == 1:
        run = rows[0]["summary"]
        progress = f"{run['status']}, {run['steps']} of {run['total_steps']} steps"
        lead += f" · {run['strategy']} on {run['processes']} · {progress}"
    return page(
        "run.html.j2",
        on_board=on_board,
        title=", ".join(row["label"] for row in rows),
        lead=lead,
        made=", ".join(str(record.path) for record in records),
        facts=_run_facts(rows[0]) if len(rows) == 1 and ran(rows) else [],
        rows=rows,
        decisions=[_decision(row, record) for row, record in zip(rows, records, strict=True)],
        commands=[_command(record) for record in records],
        measured=ran(rows),
        energies=energies(both),
        phases=phases(rows),
        predicted=any(row["predicted"] for row in rows),
        machines=_different(records),
    )


def _run_facts(row: Row) -> list[Fact]:
    run, found = row["summary"], row["measured"]
    each = numbers.plain(found["tokens_per_second_per_gpu"])
    speed = f"{each} each, {numbers.seconds(found['step_seconds'])} a step"
    memory = numbers.gib(pair(row, NEEDED)[1])
    facts = [
        ("Loss", numbers.loss(run["last_loss"]), f"from {numbers.loss(run['first_loss'])}"),
        ("Speed", f"{numbers.plain(run['tokens_per_second'])} tok/s", speed),
        ("Memory at most", memory, f"of the fullest {views.per([row])}"),
        ("Took", duration(run["wall_seconds"]), f"{count(run['tokens'])} tokens"),
    ]
    if (supervised := run["supervised"]) is not None and supervised["ettr"] is not None:
        facts.append(("ETTR", numbers.share(supervised["ettr"]), f"{len(supervised['failures'])} failures"))
    if run["evaluations"]:
        first, last = (numbers.loss(run["evaluations"][place]["loss"]) for place in (0, -1))
        facts.insert(1, ("Held-out loss", last, f"from {first}"))
    return facts


def _decision(row: Row, record: RunRecord) -> tuple[Row, str, list[Any], dict[str, str]]:
    """A run's row, its strategy's name, the strategies that its plan ranked below, and the refused ones."""
    refused = {one["strategy"]["name"]: one["reason"] for one in record.plan.get("refused", [])}
    name = (row["strategy"] or {}).get("name", "the strategy")
    return row, name, record.plan.get("alternatives", [])[:8], refused


def _command(record: RunRecord) -> str:
    typed = record.environment.get("command")
    return shlex.join(typed or ["shardwise", "train", str(record.path / "job.yaml")])


def _different(records: Sequence[RunRecord]) -> list[RunRecord]:
    """One record for each machine and set of versions."""
    keys = ("gpus", "driver", "cpu", "host", "versions", "python")
    seen = {str([record.environment.get(key) for key in keys]): record for record in reversed(records)}
    return list(reversed(seen.values()))
