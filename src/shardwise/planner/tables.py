"""Tables of predictions over models, GPUs and modes: typed rows, shown as text, CSV, Markdown, HTML, JSON."""

import csv
import html
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table as Grid

from shardwise.planner.plan import Option, Plan
from shardwise.planner.table import NARROW, batch, fit_word
from shardwise.space.auto import QUANTIZED_BYTES
from shardwise.units import GIB, JOULES_PER_KWH, SECONDS_PER_HOUR, count, gib

Kind = Literal["memory", "speed", "scaling", "batch"]
Format = Literal["text", "csv", "md", "html", "json"]
SCHEMA = 1
MOST_ROWS = 128
"""Largest micro-batch that the table `batch` tries."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model on some GPUs in one mode: what a plan chose, or what comes nearest to fitting."""

    model: str
    gpus: str
    mode: str = ""
    command: str = ""
    """`shardwise plan ...`, which answers the same question."""
    plan: Plan | None
    """None where a rule refuses all that was asked for."""
    problem: str = ""
    """Why the rule does so."""
    speedup: float | None = None
    """Of `scaling`: tokens/s of all GPUs, divided by those of the first row that fits."""
    efficiency: float | None = None
    """The same for tokens/s of one GPU."""
    price_per_gpu_hour: float | None = None
    """In the user's currency."""

    @property
    def option(self) -> Option | None:
        """What the numbers are of; it need not fit."""
        return None if self.plan is None else self.plan.options[0]

    @property
    def cost(self) -> float | None:
        """Of all GPUs for the job's tokens, energy not included."""
        if self.plan is None or self.option is None or self.price_per_gpu_hour is None:
            return None
        hours = self.option.seconds(self.plan.tokens) / SECONDS_PER_HOUR
        return self.price_per_gpu_hour * hours * self.plan.hardware.world_size

    @property
    def parameters(self) -> int | None:
        """Of the model, without adapters."""
        if self.plan is None:
            return None
        job = self.plan.job
        return job.parameters - (0 if job.lora_rank is None else job.trainable_parameters)

    @property
    def weights_bytes(self) -> float | None:
        """Of all of the model's weights in the mode's format: 2P, P in int8, 0.516P in NF4, 4P in fp32.

        Training stores more in int8 and NF4: embeddings, head and norms are not quantised.
        """
        if self.plan is None or self.parameters is None:
            return None
        return weights_bytes(self.parameters, self.plan.job.quantization, self.plan.job.precision)

    def to_json(self) -> dict[str, Any]:
        """One flat level: bytes, seconds, joules. Without the numbers where nothing was simulated."""
        values = {"model": self.model, "gpus": self.gpus, "mode": self.mode, "command": self.command}
        if self.plan is None or self.option is None:
            return values | {"problem": self.problem}
        job, strategy, tokens = self.plan.job, self.option.strategy, self.plan.tokens
        memory, time = self.option.prediction.memory, self.option.prediction.time
        return values | {
            "parameters": self.parameters,
            "trainable_parameters": job.trainable_parameters,
            "weights_bytes": self.weights_bytes,
            "sequence_length": job.sequence_length,
            "global_batch": job.global_batch,
            "world_size": time.world_size,
            "strategy": strategy.name,
            "micro_batch": strategy.micro_batch,
            "accumulation": strategy.accumulation,
            "checkpoint_every": strategy.checkpoint_every,
            "fits": fit_word(self.option, self.plan).plain,
            "needed_bytes": memory.needed_bytes,
            "capacity_bytes": memory.capacity_bytes,
            "host_bytes": memory.host_bytes,
            "tokens_per_second": time.tokens_per_second_per_gpu * time.world_size,
            "step_seconds": time.step_seconds,
            "speedup": self.speedup,
            "efficiency_fraction": self.efficiency,
            "tokens": tokens,
            "seconds": self.option.seconds(tokens),
            "cost": self.cost,
            "joules": self.option.prediction.energy.joules_per_token * tokens,
        }


def weights_bytes(parameters: int, quantization: str, precision: str = "bf16") -> float:
    """Bytes of so many weights in a format."""
    return parameters * QUANTIZED_BYTES.get(quantization, 4 if precision == "fp32" else 2)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows by model, then mode, then GPUs, in the order asked for; all numbers are predictions."""

    kind: Kind
    rows: tuple[Row, ...] = field(repr=False)

    def to(self, form: Format) -> str:
        """The table as text for the terminal's width, CSV, Markdown, a page of HTML, or JSON."""
        return _FORMS[form](self)

    def to_json(self) -> dict[str, Any]:
        """Every row has every key; a value that is not known is null."""
        rows = [row.to_json() for row in self.rows]
        names = dict.fromkeys([*(name for row in rows for name in row), "problem"])
        return {"schema": SCHEMA, "table": self.kind, "rows": [names | row for row in rows]}

    def __str__(self) -> str:
        return self.to("text")


class Part(NamedTuple):
    """What is shown to a person: lines, then columns and cells."""

    lines: list[str]
    header: list[str]
    body: list[list[str]]


Columns = dict[str, Callable[[Row], str]]


def parts(table: Table) -> list[Part]:
    """What is shown: what all rows have in common stands above the columns instead of in one."""
    named = {**_NAMED, **({} if table.kind == "memory" else _CHOSEN)}
    if all(row.option is None or row.option.strategy.name in row.mode.split("+") for row in table.rows):
        named.pop("strategy", None)
    cells = {name: list(map(cell, table.rows)) for name, cell in named.items()}
    same = {name: column[0] for name, column in cells.items() if len(set(column)) == 1}
    line = " · ".join([f"ckpt {text}" if name == "ckpt" else text for name, text in same.items() if text])
    line = " · ".join([line, *_common(table)])
    columns = {name: cell for name, cell in named.items() if name not in same}
    if table.kind == "memory":
        return [_weights(table), _memory(table, line, columns)]
    columns |= {name: cell for name, cell in _COLUMNS[table.kind].items() if any(map(cell, table.rows))}
    body = [[cell(row) for cell in columns.values()] for row in table.rows]
    return [Part([line, *_notes(table)], list(columns), body)]


def _common(table: Table) -> Iterator[str]:
    """The workload, as far as all rows share it."""
    plans = [row.plan for row in table.rows if row.plan is not None]

    def shared(values: set[str]) -> Iterator[str]:
        return iter(values if len(values) == 1 else ())

    yield from shared({f"{gib(plan.capacity_bytes)} to use of each GPU" for plan in plans})
    if table.kind != "batch":
        yield from shared({f"{plan.job.global_batch} rows a step" for plan in plans})
    yield from shared({f"rows of {plan.job.sequence_length} tokens" for plan in plans})
    if table.kind == "memory":
        yield from shared({plan.options[0].strategy.name for plan in plans})
        yield from shared({f"micro-batch {plan.options[0].strategy.micro_batch}" for plan in plans})


def _notes(table: Table) -> Iterator[str]:
    """What the words in the cells mean, where they occur; what was assumed; why something is refused."""
    plans = {row.gpus: row.plan for row in table.rows if row.plan is not None}
    words = {fit_word(row.option, row.plan).plain for row in table.rows if row.option and row.plan}
    margin = next(iter(plans.values())).margin
    meaning = {
        "no": "it needs more than the GPU has",
        "no host": "it needs more host memory than there is",
        "tight": f"it leaves less than {margin:.0%} of the memory free",
        "host?": "it fits if the hosts have the memory; `+128GiB` behind the GPUs says how much",
        "tight?": "both",
    }
    for word, text in meaning.items():
        if word in words:
            yield f"{word}: {text}"
    for gpus, plan in plans.items():
        if plan.hardware.gpu.assumed_from is not None:
            yield f"{gpus}: assumed as fast as {plan.hardware.gpu.assumed_from}"
    if table.kind in ("speed", "scaling"):
        tokens = {f"{count(plan.tokens)} tokens" for plan in plans.values()}
        assumed = "an assumed " if any(plan.job.total_tokens is None for plan in plans.values()) else ""
        yield f"days: for {assumed}{tokens.pop() if len(tokens) == 1 else 'the tokens of the job'}"
    for row in table.rows:
        if row.problem:
            yield f"refused: {' '.join(filter(None, (row.model, row.mode, row.gpus)))}: {row.problem}"


def _weights(table: Table) -> Part:
    known = {row.model: row.parameters for row in table.rows if row.parameters is not None}
    formats = {"bf16": "none", "int8": "int8", "NF4": "nf4"}
    body = [
        [model, count(number), *(f"{weights_bytes(number, one) / GIB:.2f}" for one in formats.values())]
        for model, number in known.items()
    ]
    line = "the weights alone, GiB, if all of them were in the format"
    return Part([line], ["model", "parameters", *formats], body)


def _memory(table: Table, line: str, named: Columns) -> Part:
    """Models and GPUs down, modes across."""
    modes = list(dict.fromkeys(row.mode for row in table.rows))
    down = {name: cell for name, cell in named.items() if name != "mode"} or {"model": _NAMED["model"]}
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in table.rows:
        found.setdefault(tuple(cell(row) for cell in down.values()), {})[row.mode] = row
    body = [[*names, *(_need(cells[mode]) or "refused" for mode in modes)] for names, cells in found.items()]
    return Part([f"GPU memory needed, GiB · {line}", *_notes(table)], [*down, *modes], body)


def _of(show: Callable[[Option, Plan], str]) -> Callable[[Row], str]:
    """A cell that is empty where nothing was simulated."""
    return lambda row: "" if row.option is None or row.plan is None else show(row.option, row.plan)


def _in_gib(option: Option, plan: Plan) -> str:
    """`22.4`, `22.4 no`."""
    word = fit_word(option, plan).plain
    return f"{option.prediction.memory.needed_bytes / GIB:.1f}{'' if word == 'fits' else f' {word}'}"


def _most(option: Option, _: Plan) -> str:
    """The largest micro-batch; nothing larger than MOST_ROWS is tried."""
    rows = option.strategy.micro_batch if option.fit == "fits" else 0
    return f"{rows}{' or more' if rows == MOST_ROWS else ''}"


_need = _of(_in_gib)
_NAMED: Columns = {"model": lambda row: row.model, "GPUs": lambda row: row.gpus, "mode": lambda row: row.mode}
_CHOSEN: Columns = {
    "strategy": _of(lambda option, _: option.strategy.name),
    "ckpt": _of(lambda option, _: batch(option.strategy)[1]),
}
_BATCH: Columns = {"micro ×\naccum.": _of(lambda option, _: batch(option.strategy)[0])}
_PER_GPU: Columns = {
    "GiB": _need,
    "tokens/s\nper GPU": _of(lambda o, _: f"{o.prediction.time.tokens_per_second_per_gpu:,.0f}"),
}
_DAYS: Columns = {"days": _of(lambda o, plan: f"{o.seconds(plan.tokens) / 24 / SECONDS_PER_HOUR:,.3g}")}
_COLUMNS: dict[Kind, Columns] = {
    "speed": {
        **_BATCH,
        **_PER_GPU,
        "steps/s": _of(lambda option, _: f"{1 / option.prediction.time.step_seconds:.3g}"),
        **_DAYS,
    },
    "scaling": {
        **_BATCH,
        **_PER_GPU,
        "times": lambda row: "" if row.speedup is None else f"{row.speedup:.2f}",
        "effi-\nciency": lambda row: "" if row.efficiency is None else f"{row.efficiency:.1%}",
        **_DAYS,
        "cost": lambda row: "" if row.cost is None else f"{row.cost:,.0f}",
        "energy\nkWh": _of(
            lambda o, p: f"{o.prediction.energy.joules_per_token * p.tokens / JOULES_PER_KWH:,.3g}"
        ),
    },
    "batch": {"rows\nat once": _of(_most), **_PER_GPU},
}
_WORDS = {*_NAMED, *_CHOSEN}  # the other columns hold numbers


def _text(table: Table) -> str:
    """At the terminal's width; 80 columns where there is none."""
    width = shutil.get_terminal_size((80, 24)).columns
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        for part in parts(table):
            console.print(*part.lines, sep="\n", highlight=False, markup=False)
            gap = 1 if width < NARROW else 2
            grid = Grid(box=None, padding=(0, gap, 0, 0), pad_edge=False)
            for name in part.header:
                justify: Literal["left", "right"] = "left" if name in _WORDS else "right"
                grid.add_column(name.replace("+", "+\n"), justify=justify, overflow="fold", vertical="bottom")
            for cells in part.body:
                grid.add_row(*cells)
            console.print(grid, "")
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _flat(header: Sequence[str]) -> list[str]:
    return [name.replace("-\n", "").replace("\n", " ") for name in header]


def _markdown(table: Table) -> str:
    blocks = []
    for part in parts(table):
        aligned = ["---" if name in _WORDS else "---:" for name in part.header]
        rows = [f"| {' | '.join(cells)} |" for cells in (_flat(part.header), aligned, *part.body)]
        blocks.append("\n".join(["  \n".join(part.lines), "", *rows]))
    return "\n\n".join(blocks)


def _html(table: Table) -> str:
    """A page without scripts or other files."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    shown = [f"<title>shardwise tables {table.kind}</title>"]
    for part in parts(table):
        shown += [f"<p>{'<br>'.join(map(html.escape, part.lines))}</p>", "<table>"]
        shown += [row(_flat(part.header), "th"), *(row(cells, "td") for cells in part.body), "</table>"]
    style = "body{font:15px system-ui;margin:2em}td,th{padding:.2em .8em;text-align:right}"
    style += "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f3f3f3}"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><style>{style}</style>'
    return "\n".join([head, *shown])


def _csv(table: Table) -> str:
    rows, file = table.to_json()["rows"], io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().rstrip()


_FORMS: dict[Format, Callable[[Table], str]] = {
    "text": _text,
    "csv": _csv,
    "md": _markdown,
    "html": _html,
    "json": lambda table: json.dumps(table.to_json()),
}
