"""Tables of predictions over models, GPUs and modes: typed rows, shown as text, CSV, Markdown, HTML, JSON."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from markdown_it import MarkdownIt
from rich.console import Console
from rich.table import Table as Grid

from shardwise.planner.plan import Option, Plan
from shardwise.planner.table import NARROW, UNSURE, fit_word, unit_of_time
from shardwise.screen import as_text
from shardwise.space.auto import QUANTIZED_BYTES
from shardwise.units import GIB, JOULES_PER_KWH, SECONDS_PER_HOUR, count, gib

Kind = Literal["memory", "speed", "scaling", "batch"]
Format = Literal["text", "csv", "md", "html", "json"]
SCHEMA = 1
MOST_ROWS = 128  # Largest micro-batch that the table `batch` tries


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

    @property
    def option(self) -> Option | None:
        """What the numbers are of; it need not fit."""
        return None if self.plan is None else self.plan.options[0]

    def to_json(self) -> dict[str, Any]:
        """One flat level: bytes, seconds, joules. Without the numbers where nothing was simulated.

        `weights_bytes`: of all of the model's weights in the mode's format: 2P, P in int8, 0.516P in NF4, 4P
        in fp32. Training stores more in int8 and NF4: embeddings, head and norms are not quantised.
        """
        values = {"model": self.model, "gpus": self.gpus, "mode": self.mode, "command": self.command}
        if self.plan is None or self.option is None:
            return values | {"problem": self.problem}
        job, strategy, tokens = self.plan.job, self.option.strategy, self.plan.tokens
        memory, time = self.option.prediction.memory, self.option.prediction.time
        parameters = job.parameters - (0 if job.lora_rank is None else job.trainable_parameters)
        each = QUANTIZED_BYTES.get(job.quantization, 4 if job.precision == "fp32" else 2)
        seconds, price = self.option.seconds(tokens), job.price_per_gpu_hour
        return values | {
            "parameters": parameters,
            "weights_bytes": round(parameters * each),
            "trainable_parameters": job.trainable_parameters,
            "sequence_length": job.sequence_length,
            "global_batch": job.global_batch,
            "world_size": time.world_size,
            "strategy": strategy.name,
            **{name: getattr(strategy, name) for name in ("micro_batch", "accumulation", "checkpoint_every")},
            "fits": fit_word(self.option, self.plan).plain,
            **{name: getattr(memory, name) for name in ("needed_bytes", "capacity_bytes", "host_bytes")},
            "tokens_per_second": time.tokens_per_second_per_gpu * time.world_size,
            "step_seconds": time.step_seconds,
            "speedup": self.speedup,
            "efficiency_fraction": self.efficiency,
            "tokens": tokens,
            "seconds": seconds,
            "cost": None if price is None else price * time.world_size * seconds / SECONDS_PER_HOUR,
            "joules": self.option.prediction.energy.joules_per_token * tokens,
        }


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows by model, then mode, then GPUs, in the order asked for; all numbers are predictions."""

    kind: Kind
    rows: tuple[Row, ...] = field(repr=False)

    def to(self, form: Format) -> str:
        """The table as text for the terminal's width, CSV, Markdown, a page of HTML, or JSON."""
        forms = {"text": _text, "csv": _csv, "md": _markdown, "html": _html}
        return forms[form](self) if form in forms else json.dumps(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Every row has every key; a value that is not known is null."""
        rows = [row.to_json() for row in self.rows]
        names = dict.fromkeys([*(name for row in rows for name in row), "problem"])
        return {"schema": SCHEMA, "table": self.kind, "rows": [names | row for row in rows]}

    def __str__(self) -> str:
        return self.to("text")


Part = tuple[list[str], list[str], list[list[str]], list[str]]  # What is shown: lines, columns, rows, notes


def parts(table: Table) -> list[Part]:
    """What is shown: what all rows have in common stands above the columns instead of in one."""
    memory, rows = table.kind == "memory", table.to_json()["rows"]
    unit, unit_seconds = unit_of_time(max(row["seconds"] for row in rows if row["strategy"]))
    rows = [row | {"long": (row["seconds"] or 0) / unit_seconds} for row in rows]
    named = [*_NAMED, *(() if memory else _CHOSEN)]
    if all(row["strategy"] in (None, *row["mode"].split("+")) for row in rows):
        named = [name for name in named if name != "strategy"]
    cells = {name: [_cell(name, row) for row in rows] for name in (*named, *_COLUMNS[table.kind])}
    if table.kind == "batch":  # no speed where nothing fits
        pairs = zip(rows, cells[_PER_GPU[2]], strict=True)
        cells[_PER_GPU[2]] = [cell if _most(row) != "0" else "" for row, cell in pairs]
    same = [name for name in named if len(set(cells[name])) == 1]
    above = [f"{_SAID.get(name, '')}{cells[name][0]}" for name in same if cells[name][0]]
    for key, say in list(_COMMON.items())[: 3 if memory else 1]:
        values = {row[key] for row in rows if row["strategy"]}
        above += [say(*values)] if len(values) == 1 else []
    above.append(_lengths(rows))
    title = _TITLES[table.kind].format(rows=next(row["global_batch"] for row in rows if row["strategy"]))
    line, left = " · ".join(above), [name for name in named if name not in same]
    if memory:
        left = [name for name in left if name != "mode"]
        return [_weights(rows), _memory(table, rows, [title, line], left)]
    columns = [*left, *(name for name in _COLUMNS[table.kind] if any(cells[name]))]
    body = [list(row) for row in zip(*(cells[name] for name in columns), strict=True)]
    header = [{"d": "days", "h": "hours"}.get(unit, unit) if name == "days" else name for name in columns]
    return [([title, line], header, body, list(_notes(table)))]


def _lengths(rows: Sequence[dict[str, Any]]) -> str:
    """`rows of 2048 tokens (gpt2-xl: 1024), 64 rows a step`."""
    models = {row["model"]: row["sequence_length"] for row in rows if row["strategy"]}
    (usual, _), *others = Counter(models.values()).most_common()
    apart = [f"{', '.join(m for m in models if models[m] == tokens)}: {tokens}" for tokens, _ in others]
    batches = {row["global_batch"] for row in rows if row["strategy"]}
    each_step = f", {batches.pop()} rows a step" if len(batches) == 1 else ""
    return f"rows of {usual} tokens{' (' * bool(apart)}{'; '.join(apart)}{')' * bool(apart)}{each_step}"


_TITLES: dict[Kind, str] = {
    "memory": "GiB that one GPU needs to train; a column for each mode",
    "speed": "How fast training is: a row for each model, mode and kind of GPUs",
    "scaling": "A step of {rows} rows on more GPUs, compared with the first row that fits",
    "batch": "The largest micro-batch that fits (0: not even 1), with two of them a step",
}
_SAID = {"mode": "mode ", "strategy": "strategy ", "ckpt": "checkpointing "}


_COMMON: dict[str, Callable[[Any], str]] = {
    "capacity_bytes": lambda value: f"{gib(value)} to use of each GPU",
    "strategy": lambda value: f"strategy {value}",
    "micro_batch": lambda value: f"micro-batch {value}",
}


def _notes(table: Table) -> Iterator[str]:
    """What the words in the cells mean, where they occur; what was assumed; why something is refused."""
    plans = {row.gpus: row.plan for row in table.rows if row.plan is not None}
    words = {fit_word(row.option, row.plan).plain for row in table.rows if row.option and row.plan}
    margin = next(iter(plans.values())).margin
    chosen = any(len({o.strategy.name for o in row.plan.options}) > 1 for row in table.rows if row.plan)
    batch = table.kind == "batch"
    if batch or table.kind == "memory":
        yield "where the mode says nothing: ckpt, each block recomputed; single on one GPU, zero2 on several"
    elif chosen:
        yield "`shardwise plan` chooses each strategy that is not named"
    meaning = {
        "fits": f"with {margin:.0%} of the memory to spare",
        "no": "it needs more than the GPU has, in that mode; `shardwise plan` tries all strategies",
        "no host": "it needs more host memory than there is",
        **UNSURE,
    }
    meaning["tight"] += " and does not count" * batch
    if table.kind == "memory":
        yield f"GiB: tensors, gaps, CUDA and NCCL; without a word: it fits, {meaning.pop('fits')}"
    yield from (f"{word}: {text}" for word, text in meaning.items() if word in words)
    if chosen and any((row.efficiency or 0) > 1.0005 for row in table.rows):
        yield "above 100%: another strategy, micro-batch or checkpointing than in the first row"
    for gpus, plan in plans.items():
        if plan.hardware.gpu.assumed_from is not None:
            yield f"{gpus}: assumed as fast as {plan.hardware.gpu.assumed_from}"
    inter = {plan.hardware.inter.name for plan in plans.values() if plan.hardware.inter}
    yield from (f"between nodes: {name}; `+eth100` behind the GPUs names another network" for name in inter)
    if table.kind in ("speed", "scaling"):
        tokens = {f"{count(plan.tokens)} tokens" for plan in plans.values()}
        assumed = "an assumed " if any(plan.job.total_tokens is None for plan in plans.values()) else ""
        yield f"time: for {assumed}{tokens.pop() if len(tokens) == 1 else 'the tokens of the job'}"
    for row in table.rows:
        if row.problem:
            yield f"refused: {' '.join(filter(None, (row.model, row.mode, row.gpus)))}: {row.problem}"


def _weights(rows: Sequence[dict[str, Any]]) -> Part:
    known = {row["model"]: row["parameters"] for row in rows if row["strategy"]}
    each = {"bf16": 2.0, "int8": QUANTIZED_BYTES["int8"], "NF4": QUANTIZED_BYTES["nf4"]}
    body = [
        [model, count(number), *(f"{number * one / GIB:.2f}" for one in each.values())]
        for model, number in known.items()
    ]
    line = "The weights alone, GiB, if all of them were in the format of the column"
    return [line], ["model", "parameters", *each], body, []


def _memory(table: Table, rows: Sequence[dict[str, Any]], above: list[str], down: list[str]) -> Part:
    """Models and GPUs down, modes across."""
    down, modes = down or ["model"], list(dict.fromkeys(row["mode"] for row in rows))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        names = tuple(_cell(name, row) for name in down)
        shown = " ".join(_cell(name, row) for name in _PER_GPU[:2]).removesuffix(" fits")
        found.setdefault(names, {})[row["mode"]] = shown.strip() or "refused"
    body = [[*names, *(cells[mode] for mode in modes)] for names, cells in found.items()]
    return above, [*down, *modes], body, list(_notes(table))


def _cell(name: str, row: dict[str, Any]) -> str:
    """Empty where nothing was simulated."""
    return _SHOWN[name](row) if row["strategy"] or name in _NAMED else ""


def _most(row: dict[str, Any]) -> str:
    """The largest micro-batch; nothing larger than MOST_ROWS is tried."""
    rows = row["micro_batch"] if row["fits"] in ("fits", "host?") else 0
    return f"{rows}{' or more' if rows == MOST_ROWS else ''}"


def _known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda row: row["model"],
    "GPUs": lambda row: row["gpus"],
    "mode": lambda row: row["mode"],
    "strategy": lambda row: row["strategy"],
    "ckpt": lambda row: {0: "none", 1: "all"}.get(e := row["checkpoint_every"], f"1/{e}"),
    "micro ×\naccum.": lambda row: f"{row['micro_batch']} × {row['accumulation']}",
    "largest\nmicro-batch": _most,
    "GiB\na GPU": lambda row: f"{row['needed_bytes'] / GIB:.1f}",
    "fits": lambda row: row["fits"],
    "tokens/s\nper GPU": lambda row: f"{row['tokens_per_second'] / row['world_size']:,.0f}",
    "steps/s": lambda row: f"{1 / row['step_seconds']:.3g}",
    "speed-\nup": lambda row: _known(row["speedup"], ".2f"),
    "effi-\nciency": lambda row: _known(row["efficiency_fraction"], ".1%"),
    "days": lambda row: f"{row['long']:,.3g}",
    "cost": lambda row: _known(row["cost"], ",.0f"),
    "energy\nkWh": lambda row: f"{row['joules'] / JOULES_PER_KWH:,.3g}",
}
_NAMED, _CHOSEN = ("model", "GPUs", "mode"), ("strategy", "ckpt")
_PER_GPU = ("GiB\na GPU", "fits", "tokens/s\nper GPU")
_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "memory": (),
    "speed": ("micro ×\naccum.", *_PER_GPU, "steps/s", "days"),
    "scaling": ("micro ×\naccum.", *_PER_GPU, "speed-\nup", "effi-\nciency", "days", "cost", "energy\nkWh"),
    "batch": ("largest\nmicro-batch", *_PER_GPU),
}
_WORDS = {*_NAMED, *_CHOSEN, "fits"}  # the other columns hold numbers
_BREAK = re.compile(r"(?<=[+/-])(?=[A-Za-z]{2})| (?=[a-z]{2})")  # not `tokens/s`, `2 × 32`


def _text(table: Table) -> str:
    return as_text(_show, table, 80)


def _show(table: Table, *, console: Console) -> None:
    for lines, header, rows, notes in parts(table):
        console.print(*lines, sep="\n", highlight=False, markup=False)
        gap = 1 if console.width < NARROW else 2
        grid = Grid(box=None, padding=(0, gap, 0, 0), pad_edge=False)
        names, *body = zip(*_within(header, rows, console.width, gap), strict=True)
        deepest = max(name.count("\n") for name in names)
        for name, cut in zip(header, names, strict=True):
            justify: Literal["left", "right"] = "left" if name in _WORDS else "right"
            grid.add_column("\n" * (deepest - cut.count("\n")) + cut, justify=justify, overflow="fold")
        for cells in body:
            grid.add_row(*cells)
        console.print(grid, *notes, "", sep="\n", highlight=False, markup=False)


def _within(header: Sequence[str], body: Sequence[Sequence[str]], width: int, gap: int) -> list[list[str]]:
    """The columns; where they are too wide, models lose their organisation, and the widest are cut."""
    columns = [list(column) for column in zip(header, *body, strict=True)]
    room = width - gap * (len(columns) - 1)

    def wide(column: list[str]) -> int:
        return max(len(line) for cell in column for line in cell.split("\n"))

    if header[0] == "model" and sum(map(wide, columns)) > room:
        columns[0] = [name.rpartition("/")[2] for name in columns[0]]
    for place in sorted(range(len(columns)), key=lambda n: -wide(columns[n])):
        if sum(map(wide, columns)) > room:
            columns[place] = [_BREAK.sub("\n", cell) for cell in columns[place]]
    return columns


def _markdown(table: Table) -> str:
    blocks = []
    for lines, header, body, notes in parts(table):
        flat = [name.replace("-\n", "").replace("\n", " ") for name in header]
        aligned = ["---" if name in _WORDS else "---:" for name in header]
        rows = [f"| {' | '.join(cells)} |" for cells in (flat, aligned, *body)]
        blocks += [*lines, "\n".join(rows), "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(filter(None, blocks))


def _html(table: Table) -> str:
    """A page without scripts or other files."""
    style = "body{font:15px system-ui;margin:2em}td,th{padding:.2em .8em;border-bottom:1px solid #ddd}"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><style>{style}</style>'
    return f"{head}\n{MarkdownIt().enable('table').render(_markdown(table)).rstrip()}"


def _csv(table: Table) -> str:
    rows, file = table.to_json()["rows"], io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().rstrip()
