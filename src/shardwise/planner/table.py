"""A plan as tables for the terminal: its strategies, with memory as stacked bars; and time against energy.

Readable without colour in 80 columns.
"""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.planner.plan import Option, Plan, in_words
from shardwise.planner.search import cost
from shardwise.planner.why import needs_of_host, terms
from shardwise.screen import as_text as to_text
from shardwise.screen import screen
from shardwise.simulate.power import energy_error, levels
from shardwise.simulate.prediction import Memory
from shardwise.strategy import Strategy
from shardwise.units import GIB, count, gib

PARTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("█", "blue", "weights", ("weights",)),
    ("▓", "magenta", "gradients, optimizer", ("gradients", "optimizer")),
    ("▒", "cyan", "activations, loss", ("activations", "output head and loss")),
    ("░", "yellow", "rest", ("engine buffers", "fragmentation", "CUDA and NCCL")),
)
"""Glyph, colour, name, and the terms of memory in it."""

FREE, LIMIT, BEYOND = "·", "│", "»"
ROOM = 0.75  # Share of a bar's width up to the limit, where something is drawn beyond it
UNSURE = {  # What the words of `fit_word` between yes and no mean
    "tight": "it fits, but leaves less than the spare memory free",
    "host?": "if the hosts have the memory; `+128GiB` behind the GPUs says how much",
    "tight?": "the same, but it leaves less than the spare memory free",
}


def room(width: int, *, all_fit: bool) -> int:
    """Cells before the limit in bars of `width` cells."""
    return width - 1 if all_fit else max(1, round(ROOM * (width - 1)))


def memory_bar(memory: Memory, width: int, before: int) -> Text:
    """`████▓▓▒▒▒▒░···│    `: the parts, what is free, the limit, what does not fit.

    Exactly `width` cells, `before` of them up to the limit. A bar crosses the limit only if the strategy does
    not fit; `»` ends a bar that is longer than the line.
    """
    cells = _cells(memory, before, width)
    if not memory.fits:
        cells += cells[-1:] * (before + 1 - len(cells))
    inside, outside = cells[:before], cells[before:]
    after = width - before - 1
    if len(outside) > after:
        outside = [*outside[: after - 1], (BEYOND, "red")]
    inside += [(FREE, "dim")] * (before - len(inside))
    outside += [(" ", "")] * (after - len(outside))
    limit = (LIMIT, "green" if memory.fits else "red")
    return Text.assemble(*inside, limit, *outside)


def plain_bar(share: float, width: int) -> Text:
    """A bar of one part; a share of 1 or more fills it."""
    filled = min(width, round(width * share))
    return Text.assemble(("█" * filled, "cyan"), (FREE * (width - filled), "dim"))


def legend() -> Text:
    """What the glyphs mean."""
    pieces: list[tuple[str, str] | str] = []
    for glyph, colour, name, _ in PARTS:
        pieces += [(glyph, colour), f" {name}  "]
    return Text.assemble(*pieces, LIMIT, " limit")


def _cells(memory: Memory, before: int, most: int) -> list[tuple[str, str]]:
    """One (glyph, colour) per cell, at most `most`; `before` cells stand for the capacity."""
    values = terms(memory)
    cells: list[tuple[str, str]] = []
    reached = 0
    for glyph, colour, _, names in PARTS:
        reached += sum(values[name] for name in names)
        end = min(most, round(before * reached / memory.capacity_bytes))
        cells += [(glyph, colour)] * (end - len(cells))
    return cells


ROWS = 12  # Rows shown, or more where there are more kinds of strategies
LONGEST_NAME = 15  # Of a strategy, in a narrow terminal
NARROW = 100  # Columns of a terminal below which the gaps are one cell, and the longest names take two lines
LEAST_BAR, MOST_BAR = 12, 40
BAR, TRAINED = 3, 6  # The bar's column; that of the training time, without the bar
_STYLES = {"fits": "green", "tight": "yellow", "no": "red"}


def show(plan: Plan, *, console: Console | None = None, everything: bool = False) -> None:
    """Print the workload, the table, and the reasons for the choice.

    Where nothing fits, the error `why.does_not_fit` says so.
    """
    console = console or screen()
    for line in heading(plan):
        console.print(line)
    console.print()
    shown = list(plan.options) if everything else excerpt(plan)
    console.print(_table(plan, shown, console.width, everything=everything))
    console.print(Padding(legend(), (1, 0, 0, 2), expand=False))
    left = _refused(plan) if everything else _left_out(plan, len(plan.options) - len(shown))
    words = {fit_word(option, plan).plain for option in shown}
    notes = (Text(f"{word}: {text}") for word, text in UNSURE.items() if word in words)
    for line in (*left, *notes, Text(plan.evidence.text(), style="dim")):
        console.print(Padding(line, (0, 0, 0, 2), expand=False))
    if plan.chosen is not None:
        console.print()
        console.print(bullets(plan.chosen.why, plan.chosen))


def as_text(plan: Plan) -> str:
    """The same as plain text."""
    return to_text(show, plan)


def excerpt(plan: Plan) -> list[Option]:
    """The best of each kind, then the best of the rest, in the plan's order."""
    options = plan.options
    best = {option.strategy.name: option for option in reversed(options)}
    kinds = {id(option) for option in best.values()}
    others = [option for option in options if id(option) not in kinds and option.fit != "no"]
    kept = kinds | {id(option) for option in others[: max(0, ROWS - len(kinds))]}
    return [option for option in options if id(option) in kept]


def heading(plan: Plan) -> Iterator[Text]:
    """The model, the hardware, and the order of the table."""
    job, hardware = plan.job, plan.hardware
    trained = "all trained"
    if job.lora_rank is not None:
        trained = f"LoRA of rank {job.lora_rank} trains {count(job.trainable_parameters)}"
    base = "" if job.quantization == "none" else f", base in {job.quantization}"
    size = f" · {count(job.parameters)} parameters, {trained}, {job.precision}{base}"
    yield Text.assemble((job.model, "bold"), size)
    number = f"{hardware.nodes} × " if hardware.nodes > 1 else ""
    rates = "" if hardware.gpu.assumed_from is None else f" (assumed as fast as {hardware.gpu.assumed_from})"
    links = (hardware.intra if hardware.gpus_per_node > 1 else None, hardware.inter)
    yield Text.assemble(
        (f"{number}{hardware.gpus_per_node} × {hardware.gpu.name}", "bold"),
        f"{rates}, {gib(plan.capacity_bytes)} to use of each",
        *(f" · {link.name}{' (measured)' if link.measured else ''}" for link in links if link is not None),
        " · copies from the host (measured)" if hardware.host_link.measured else "",
        f" · calls on the host x {hardware.host_pace:.2g} (measured)" if hardware.host_pace != 1.0 else "",
        "" if hardware.host_memory_bytes is None else f" · {gib(hardware.host_memory_bytes)} in each host",
        f" · GPUs' times differ by {hardware.spread:.1%}" if hardware.spread else "",
    )
    ranked = {"throughput": "fastest first", "memory": "leanest first", "energy": "least energy first"}
    order = ranked[plan.objective] if plan.chosen else "the nearest to fitting first"
    fitting = [cost(option, plan.objective) for option in plan.options if option.fit == "fits"]
    if plan.chosen and min(fitting, default=0.0) < cost(plan.chosen, plan.objective):
        order = f"▶ choice, then {order}"
    if plan.power is not None:
        order += f", at most {100 * plan.power.max_slowdown_fraction:.3g}% slower"
    yield Text(
        f"{job.global_batch} rows of {job.sequence_length} tokens a step · {order} · "
        f"{plan.margin:.0%} spare memory"
    )
    if job.assumed:
        yield Text(f"assumed: {', '.join(job.assumed)}", style="dim")
    yield from (Text(f"note: {note}", style="dim") for note in job.notes)


def bullets(sentences: Iterable[str], chosen: Option | None = None) -> Table:
    """A list, below the choice if that is given."""
    lines = Table.grid(padding=(0, 1, 0, 0))
    if chosen is not None:
        lines.add_row(Text("▶", style="bold green"), Text(in_words(chosen.strategy), style="bold"))
    for sentence in sentences:
        lines.add_row(Text("·", style="dim"), Text(sentence))
    return lines


def unit_of_time(seconds: float) -> tuple[str, float]:
    """The unit for times of this size, and its seconds."""
    units = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0))
    return next((unit for unit in reversed(units) if seconds >= 2 * unit[1]), units[0])


def _table(plan: Plan, shown: Sequence[Option], width: int, *, everything: bool) -> Table:
    gap = 1 if width < NARROW else 2
    unit, seconds = unit_of_time(min(option.seconds(plan.tokens) for option in shown))
    rows = [_row(option, plan, width, seconds) for option in shown]
    trained = f"{'trained' if plan.job.total_tokens else '1B tok.'}\nin {unit}"
    header: list[Text | str] = ["\n  strategy", "micro ×\naccum.", "ckpt\n", "\nGiB", "\nfits"]
    header += ["tokens/s\nper GPU", trained, "J per\ntoken"]
    header += [] if plan.power is None else ["limit\nW"]
    header += ["host\nGiB"] if plan.chosen is None and plan.hardware.host_memory_bytes else []
    others = _width([header, *rows], gap)
    if others + LEAST_BAR > width:  # numbers would be cut
        for cells in (header, *rows):
            del cells[TRAINED]
        others = _width([header, *rows], gap)
    bar = max(LEAST_BAR, min(MOST_BAR, width - others))
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", highlight=False)
    before = room(bar, all_fit=all(option.prediction.memory.fits for option in shown))
    header.insert(BAR, f"memory\n{gib(plan.capacity_bytes):>{before}}{LIMIT}")
    for index, name in enumerate(header):
        left = index in (0, BAR, BAR + 2)
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for option, cells in zip(shown, rows, strict=True):
        cells.insert(BAR, memory_bar(option.prediction.memory, bar, before))
        style = "bold" if option is plan.chosen else "dim" if option.fit == "no" else ""
        table.add_row(*cells, style=style)
    for skipped in plan.skipped if everything else ():
        name = _name(skipped.strategy, width)
        table.add_row(name, *batch(skipped.strategy), Text("not simulated"), "", "no", style="dim")
    return table


def _width(rows: Sequence[Sequence[Text | str]], gap: int) -> int:
    """Cells that the columns take, with a gap after each."""
    columns = zip(*rows, strict=True)
    return sum(
        gap + max(len(line) for cell in column for line in str(cell).split("\n")) for column in columns
    )


def _row(option: Option, plan: Plan, width: int, unit_seconds: float) -> list[Text | str]:
    """All cells but the bar; times in units of `unit_seconds`."""
    memory = option.prediction.memory
    name, host = _name(option.strategy, width), f"{memory.host_bytes / GIB:.1f}"
    if option is plan.chosen:
        name = Text.assemble(("▶", "green"), name[1:])
    long = option.seconds(plan.tokens) / unit_seconds
    return [
        name,
        *batch(option.strategy),
        f"{memory.needed_bytes / GIB:.1f}",
        fit_word(option, plan),
        f"{option.prediction.time.tokens_per_second_per_gpu:,.0f}",
        f"{long:.1f}" if long < 100 else f"{long:,.0f}",
        joules(option),
        *([] if plan.power is None else [limit(option, plan)]),
        *([host] if plan.chosen is None and plan.hardware.host_memory_bytes else []),
    ]


def joules(option: Option) -> str:
    """Energy per token."""
    return f"{option.prediction.energy.joules_per_token:#.3g}".removesuffix(".")


def limit(option: Option, plan: Plan) -> str:
    """Its power limit, watts."""
    return str(option.power_limit_watts or plan.hardware.gpu.power_watts)


def fit_word(option: Option, plan: Plan) -> Text:
    """Whether it fits; with a question mark where host memory decides and is not known."""
    if option.fit == "no" and option.prediction.memory.fits:
        return Text("no host", style=_STYLES["no"])
    if option.fit != "no" and needs_of_host(option, plan.hardware, plan.margin) is not None:
        return Text("tight?" if option.fit == "tight" else "host?", style=_STYLES["tight"])
    return Text(option.fit, style=_STYLES[option.fit])


def _name(strategy: Strategy, width: int) -> Text:
    name = strategy.name
    if width < NARROW:
        name = name.replace("-offload-", "-offload\n    -")
        *before, last = name.split("-")
        if len(name.splitlines()[-1]) > LONGEST_NAME:
            name = f"{'-'.join(before)}\n    -{last}"
    return Text(f"  {name}")


def batch(strategy: Strategy) -> tuple[str, str]:
    """Micro-batch and accumulation; which blocks are checkpointed."""
    every = strategy.checkpoint_every
    checkpointing = {0: "none", 1: "all"}.get(every, f"1/{every}")
    return f"{strategy.micro_batch} × {strategy.accumulation}", checkpointing


def _left_out(plan: Plan, more: int) -> Iterator[Text]:
    """One line on what the table leaves out."""
    refused = len({one.strategy for one in plan.refused})
    parts = {
        f"{more} more": more,
        f"{len(plan.skipped)} not simulated because smaller ones fail": len(plan.skipped),
        f"{refused} refused": refused,
    }
    shown = ", ".join(text for text, number in parts.items() if number)
    if shown:
        yield Text(f"--all shows {shown}", style="dim")


def _refused(plan: Plan) -> Iterator[Text]:
    """Each rule that refused something, with the strategies."""
    names: dict[str, dict[str, None]] = {}
    for one in plan.refused:
        names.setdefault(one.reason, {})[one.strategy.name] = None
    for reason, refused in names.items():
        yield Text.assemble("refused: ", ", ".join(refused), (f": {reason}", "dim"))


def show_pareto(plan: Plan, *, console: Console | None = None) -> None:
    """Print what nothing else beats in both, the fastest first; at most 80 columns."""
    console = console or screen()
    first = plan.pareto[0]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", highlight=False)
    names = ("\n  strategy", "micro ×\naccum.", "ckpt\n", "limit\nW", "tokens/s\nper GPU", "time\n%")
    for name in (*names, "J per\ntoken", "energy\n%"):
        table.add_column(name, justify="left" if "strategy" in name else "right", no_wrap=True)
    for option in plan.pareto:
        shares = [100 * (cost(option, by) / cost(first, by) - 1) for by in ("throughput", "energy")]
        table.add_row(
            f"  {option.strategy.name}",
            *batch(option.strategy),
            limit(option, plan),
            f"{option.prediction.time.tokens_per_second_per_gpu:,.0f}",
            f"{shares[0]:+.1f}",
            joules(option),
            f"{shares[1]:+.1f}",
        )
    console.print()
    console.print(Text("time against energy: what nothing else beats in both", style="bold"))
    console.print(table)
    console.print(Padding(Text(certainty(plan), style="dim"), (0, 0, 0, 2), expand=False))


def certainty(plan: Plan) -> str:
    """How certain the energy under a lower limit is."""
    gpu = plan.hardware.gpu
    if not levels(gpu):
        return f"only {gpu.power_watts} W: the range of power limits of {gpu.name} is not known"
    error, swept = energy_error(gpu)
    source = "recorded sweeps of this card" if swept else "no sweep of this card was measured"
    return f"energy under a lower limit ±{error:.0%}: {source}"
