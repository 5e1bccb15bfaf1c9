"""`plan --explain`: where the choice's memory and time go, and what would make a better one fit."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.hardware.catalog import gpus
from shardwise.planner.changes import larger_gpus
from shardwise.planner.plan import Option, Plan, PowerChoice, in_words
from shardwise.planner.simulate import capacity_bytes
from shardwise.planner.table import bullets, plain_bar
from shardwise.planner.why import better_with_memory, gain, terms
from shardwise.screen import screen
from shardwise.simulate.prediction import Memory, Moment, Time
from shardwise.units import gib

LINES_OF_BLOCKS = 4  # Lines that show the blocks of one pass
LEAST_BAR, MOST_BAR = 16, 60
NOTHING = 0.0005  # a share of the step that is not worth a line
_OTHER_COLUMNS = 28  # Width of a line without its name and its bar
_BLOCK = re.compile(r"block (\d+) (.+)")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A name, a share drawn as a bar, and a value."""

    name: str
    share: float
    text: str
    remark: str = ""
    bold: bool = False


def show_explanation(plan: Plan, *, console: Console | None = None) -> None:
    """Print where memory and time of the choice go; without a choice, of what is nearest to fitting."""
    console = console or screen()
    option = plan.options[0]
    memory, time = option.prediction.memory, option.prediction.time
    overlapping = {
        "communication": time.communication_seconds,
        "copies to and from the host": time.copy_seconds,
        "the optimizer, its kernels too": time.optimizer_seconds,
        "the host issuing kernels": time.launch_seconds,
    }
    sections = {
        f"memory in tensors over a step: {in_words(option.strategy)}": list(_timeline(memory)),
        "memory where it is largest": list(_terms(memory)),
        "time of a step": list(_seconds(_consecutive(option), time)),
        "what goes on in it, partly at the same time": list(_seconds(overlapping, time)),
    }
    outside = f"plus {gib(memory.terms.fragmentation_bytes)} of fragmentation and "
    outside += f"{gib(memory.outside_allocator_bytes)} of CUDA and NCCL: {gib(memory.needed_bytes)} in all"
    remarks = {0: outside, 3: _links(plan)}
    if plan.power is not None:
        sections["energy of the choice by power limit"] = list(_curve(plan.power, option))
    widest = max(len(line.name) for lines in sections.values() for line in lines)
    bar = max(LEAST_BAR, min(MOST_BAR, console.width - widest - _OTHER_COLUMNS))
    for place, (title, lines) in enumerate(sections.items()):
        if lines:
            console.print(Text(title, style="bold"))
            console.print(_bars(lines, widest, bar))
            if place in remarks:
                console.print(Padding(Text(remarks[place], style="dim"), (0, 0, 0, 2), expand=False))
            console.print()
    if plan.chosen is not None:
        console.print(Text("with more memory", style="bold"))
        console.print(bullets(next_better(plan, plan.chosen)))


def next_better(plan: Plan, chosen: Option) -> Iterator[str]:
    """What must change for something better to fit, the smallest change first."""
    better = better_with_memory(plan)
    goal = {"throughput": "the tokens/s", "energy": "the tokens a joule", "memory": ""}[plan.objective]
    larger = sum(skipped.strategy.name == chosen.strategy.name for skipped in plan.skipped)
    if not better and larger and plan.objective != "memory":
        variants = f"{larger} larger variants of {chosen.strategy.name} were not"
        yield f"nothing that was simulated would be better; {variants}, because smaller ones do not fit"
    elif not better:
        yield "nothing that was simulated would be better: memory does not hold the choice back"
    for option in better:
        factor = gain(option, chosen, plan.objective)
        yield f"{factor:.2f}x {goal} {_needs(option, plan)}: {in_words(option.strategy)}"


def folded(timeline: Sequence[Moment]) -> list[Moment]:
    """The timeline with neighbouring blocks merged; a merged line shows their maximum."""
    lines: list[Moment] = []
    for phase, moments in groupby(timeline, key=_phase):
        blocks = list(moments)
        size = -(-len(blocks) // LINES_OF_BLOCKS)
        if phase is None:
            lines += blocks
            continue
        for start in range(0, len(blocks), size):
            part = blocks[start : start + size]
            first, last = (_BLOCK.sub(r"\1", moment.where) for moment in (part[0], part[-1]))
            name = f"block {first} {phase}" if first == last else f"blocks {first}–{last} {phase}"
            lines.append(Moment(where=name, allocated_bytes=max(m.allocated_bytes for m in part)))
    return lines


def _needs(option: Option, plan: Plan) -> str:
    """What it needs, with the margin, and the smallest GPU that has it."""
    memory, gpu = option.prediction.memory, plan.hardware.gpu
    wanted = memory.needed_bytes / (1 - plan.margin)
    if wanted <= memory.capacity_bytes or (option.fit == "no" and memory.fits):
        return f"with {gib(round(memory.host_bytes / (1 - plan.margin)))} of memory in each host"
    said = f"with {gib(round(wanted))} of a GPU to use"
    if plan.memory_cap_bytes is not None and plan.memory_cap_bytes < wanted:
        said += " and a higher --memory-cap"
        if capacity_bytes(gpu) >= wanted:
            return said
    sold = (one for one in gpus() if one.sold_as_gb == gpu.sold_as_gb and one.compute_capability is not None)
    alike = () if gpu in gpus() else sold  # known by its memory alone, of which the least is assumed
    enough = [other for other in (*alike, *larger_gpus(gpu)) if capacity_bytes(other) >= wanted]
    if not enough:
        return f"{said} (no GPU of the catalog has that)"
    size = f"{enough[0].sold_as_gb}GB"
    name = enough[0].name if size in enough[0].name else f"{enough[0].name} ({size})"
    return f"{said}, as {name} has"


def _phase(moment: Moment) -> str | None:
    match = _BLOCK.fullmatch(moment.where)
    return match[2] if match else None


def _timeline(memory: Memory) -> Iterator[Line]:
    lines = folded(memory.timeline)
    peak = max((line.allocated_bytes for line in lines), default=0)
    for line in lines:
        yield Line(
            name="before the first step" if line.where == "model" else line.where,  # no optimizer states yet
            share=line.allocated_bytes / memory.capacity_bytes,
            text=gib(line.allocated_bytes),
            remark="◀ most" if line.allocated_bytes == peak else "",
        )


def _terms(memory: Memory) -> Iterator[Line]:
    for name, value in terms(memory).items():
        remark = f"{value / memory.needed_bytes:.0%}"
        yield Line(name=name, share=value / memory.capacity_bytes, text=gib(value), remark=remark)
    yield Line(
        name="together",
        share=memory.needed_bytes / memory.capacity_bytes,
        text=gib(memory.needed_bytes),
        remark=f"of {gib(memory.capacity_bytes).removesuffix(' GiB')}",
        bold=True,
    )


def _consecutive(option: Option) -> dict[str, float]:
    """Parts that sum to the step."""
    time = option.prediction.time
    at_limit = option.prediction.energy.at_power_limit
    rest = "lower clock (power limit), waits" if at_limit else "host, slower during NCCL"
    return {
        "computing, at full clock": time.compute_seconds,
        "waiting for communication": time.exposed_communication_seconds,
        "waiting for copies": time.exposed_to_copies_seconds,
        "waiting for other stages": time.bubble_seconds,
        rest: time.rest_seconds,
        "the step": time.step_seconds,
    }


def _seconds(parts: dict[str, float], time: Time) -> Iterator[Line]:
    for name, seconds in parts.items():
        share = seconds / time.step_seconds
        if share > NOTHING:
            bold = name == "the step"
            yield Line(name=name, share=share, text=f"{seconds:.3g} s", remark=f"{share:.0%}", bold=bold)


def _curve(power: PowerChoice, option: Option) -> Iterator[Line]:
    """Energy and time of the chosen strategy at each limit that binds."""
    for one in power.curve:
        yield Line(
            name=f"{one.limit_watts} W",
            share=one.energy_ratio,
            text=f"{one.energy_ratio - 1:+.1%}",
            remark=f"time {one.time_ratio - 1:+.1%}",
            bold=one.limit_watts == (option.power_limit_watts or power.curve[0].limit_watts),
        )


def _links(plan: Plan) -> str:
    """The links that were assumed, and the flag that changes them."""
    hardware = plan.hardware
    links = {"host and GPU": hardware.host_link}
    if hardware.gpus_per_node > 1:
        links = {"GPUs": hardware.intra, **links}
    if hardware.inter is not None:
        links["nodes"] = hardware.inter
    lines = [
        f"{link.name} between {ends}, {link.bytes_per_second / 1e9:.3g} GB/s{' (measured)' * link.measured}"
        for ends, link in links.items()
    ]
    said = next((flag for flag in plan.job.assumed if flag.startswith("--gpus ")), None)
    if said is not None:
        lines.append(f"assumed slots: {said}; boards with several cards often have x8 or x4")
    return "links: " + "; ".join(lines)


def _bars(lines: Sequence[Line], widest: int, bar: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, width=widest + 2)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for line in lines:
        style = "bold" if line.bold else ""
        table.add_row(f"  {line.name}", plain_bar(line.share, bar), line.text, line.remark, style=style)
    return table
