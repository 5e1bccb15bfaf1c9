"""Shows model, data, strategy and one rendered sample before the first step."""

import json
import math

import torch
from rich.table import Table
from rich.text import Text

from shardwise.errors import printable
from shardwise.hardware.catalog import peak_flops
from shardwise.models.flops import train_flops_per_token
from shardwise.planner.table import show
from shardwise.record.schema import RunEvent
from shardwise.screen import screen
from shardwise.training.observe import Speed
from shardwise.training.ready import Ready
from shardwise.units import count, processes

SAMPLE_CHARACTERS = 900
SHOWN_SETS = 6  # of data.weights, in the line of the data
WORTH_A_WARNING = 0.01  # of the conversations' tokens lost


def announce(ready: Ready, *, total_steps: int, json_plan: bool) -> None:
    """Show what will run on stderr; with `json_plan` also as one JSON object on stdout."""
    console = screen(stderr=True)
    job, strategy, built = ready.job, ready.strategy, ready.built
    share = "" if built.trainable == built.total else f", {count(built.trainable)} trained"
    base = "" if job.model.quantization == "none" else f", base in {job.model.quantization}"
    weights = f"{job.model.weights} weights, {count(built.total)} parameters{share}{base}"
    lines = {
        "model": f"{job.model.source}, {weights}",
        "data": _data_line(ready),
        "steps": str(total_steps),
        "strategy": f"{strategy.name} on {processes(strategy.world_size)}, {job.train.precision}; "
        f"{job.train.global_batch} rows of {job.data.sequence_length} tokens a step = micro-batch "
        f"{strategy.micro_batch} x {strategy.accumulation} x {strategy.data_parallel} ranks",
    }
    block = [(name, printable(text), "default") for name, text in lines.items()]
    block += [("", reason, "dim") for reason in (*built.notes, *ready.why)]
    if found := _cut_line(ready):
        lost, cut = found
        block.append(("warning", cut, "yellow") if lost >= WORTH_A_WARNING else ("cut", cut, "default"))
    if unknown := ready.data.summary.get("unknown_markers"):
        missing = f"the tokenizer has no {', '.join(unknown)}, which data.chat_template writes: each becomes "
        missing += "several tokens. Name the template that the model knows, or leave it out"
        block.append(("warning", missing, "yellow"))
    for name, text, style in block:
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(Text(f"{name:>9}", f"bold {style}"), Text(text, style))
        plain = Text.assemble((f"{name:>9}  ", f"bold {style}"), (text, style))
        console.print(line if console.is_terminal else plain, soft_wrap=not console.is_terminal)
    if ready.plan is not None:
        show(ready.plan, console=console)
    console.print(_sample(ready, styled=console.color_system is not None))
    if json_plan:
        print(json.dumps({"job": job.model_dump(mode="json"), **ready.to_json(), "total_steps": total_steps}))


def header(ready: Ready, *, total_steps: int) -> RunEvent:
    """The first line of events.jsonl."""
    return RunEvent(
        name=ready.job.name,
        strategy=ready.strategy.name,
        processes=ready.strategy.world_size,
        total_steps=total_steps,
        global_batch=ready.job.train.global_batch,
        sequence_length=ready.job.data.sequence_length,
        parameters=ready.built.total,
        trainable_parameters=ready.built.trainable,
    )


def speed(ready: Ready) -> Speed:
    """FLOPs of a token, and the peak of this GPU where it is known."""
    flops = train_flops_per_token(ready.built, sequence_length=ready.job.data.sequence_length)
    peak, why = None, "no GPU"
    if torch.cuda.is_available():
        name, precision = torch.cuda.get_device_name(), ready.job.train.precision
        peak = peak_flops(name, precision)
        why = f"the peak of {name} in {precision} is not in the catalog"
    gpus = ready.strategy.world_size
    return Speed(gpus=gpus, flops_per_token=flops, peak_flops=peak, why_no_peak=None if peak else why)


def _data_line(ready: Ready) -> str:
    summary = ready.data.summary
    parts = [
        f"{summary['format']}: {summary['read']} read, {summary['train_samples']} samples to train on",
        f"{count(summary['tokens'])} tokens, {count(summary['target_tokens'])} of them targets",
        f"the longest has {summary['longest_tokens']}",
    ]
    if drawn := summary.get("drawn"):
        each = [f"{number} of {name}" for name, number in drawn[:SHOWN_SETS]]
        more = [f"and of {len(drawn) - SHOWN_SETS} more"] if len(drawn) > SHOWN_SETS else []
        parts.append(f"an epoch draws {', '.join([*each, *more])}")
    if "fill" in summary:
        parts.append(f"rows {summary['fill']:.0%} full")
    if "eval_samples" in summary:
        parts.append(f"{summary['eval_samples']} held out")
    losses = {"bad": "cannot be read", "split": "became several samples"}
    if "lost_tokens" not in summary:  # otherwise a warning says why
        losses["without_target"] = "left out: nothing in them is trained"
    parts += [f"{summary[name]} {what}" for name, what in losses.items() if name in summary]
    return ", ".join(parts)


def _cut_line(ready: Ready) -> tuple[float, str] | None:
    """What `data.sequence_length` costs conversations: the share, and how long rows keep 95 % of it."""
    summary, data = ready.data.summary, ready.job.data
    if "lost_tokens" not in summary:
        return None
    held_out = ready.data.eval if data.eval is None else None
    kept = sum(int(part.lengths.sum(dtype="int64")) for part in (ready.data.train, held_out) if part)
    share = summary["lost_tokens"] / (kept + summary["lost_tokens"])
    what = [f"{share:.1%} of the conversations' tokens are lost"]
    read = f" of {summary['read']} conversations"
    losses = {"truncated": "cut at the end", "too_long": "left out"}
    losses["without_target"] = "left out, because all of the answer was cut off"
    for name, how in losses.items():
        if number := summary.get(name):
            what.append(f"{number}{read} {'is' if number == 1 else 'are'} {how}")
            read = ""
    text = f"{'; '.join(what)}: they are longer than data.sequence_length {data.sequence_length}"
    most = getattr(ready.built.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if summary["longer_row"] <= most:
        part = summary["longer_row_keeps"]
        text += f". {summary['longer_row']} would keep {'all' if part == 1 else f'{100 * part:g} %'}"
    elif data.sequence_length < most:
        text += f". {most}, the model's positions, would keep more"
    return share, text


def _sample(ready: Ready, *, styled: bool) -> Text:
    """The first sample as the model sees it; trained tokens stand out, without colours between » and «."""
    how, marks = ("is green and underlined", "{}") if styled else ("stands between » and «", "»{}«")
    text = Text(f"\na sample (what is trained on {how}):\n", style="dim")
    room = SAMPLE_CHARACTERS
    for part, trained in ready.data.sample.runs:
        style = "green underline" if trained else "default"
        text.append((marks if trained else "{}").format(printable(part[:room])), style=style)
        room -= len(part)
        if room <= 0:
            text.append(" ...", style="dim")
            break
    return text
