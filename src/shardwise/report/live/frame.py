"""A sample of machine and run for a person: a frame of the live view, or one line."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.report.live.run import ACTIVE, RECENT_SECONDS
from shardwise.report.terminal import sparkline
from shardwise.units import GIB, JOULES_PER_KWH, count, duration, gib

WIDE = 100
"""Terminals of so many columns show more of each GPU."""

MOST_PROCESSES = 4
LOST_BYTES = GIB
"""Memory in use on a GPU for which the driver shows no process."""

Values = Mapping[str, Any]


def frame(sample: Values, *, width: int, note: str = "") -> RenderableType:
    """All of a sample, for a terminal of `width` columns; `note` follows the time."""
    when = datetime.fromtimestamp(sample["time"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    parts: list[RenderableType] = [Text.assemble(("shardwise monitor", "bold"), f"  {when}", note)]
    run, none = sample["run"], sample.get("run_unavailable")
    parts += [Text(""), *_machine(sample, wide=width >= WIDE), Text("")]
    parts += [Text(f"no run: {none}")] if run is None else _run(run, width=width)
    # last, what a low terminal may cut off
    parts += [Text(""), _host(sample["host"]), *_processes(sample["gpus"])]
    return Group(*parts)


def line(sample: Values) -> str:
    """One line, for logs."""
    parts = [datetime.fromtimestamp(sample["time"]).astimezone().strftime("%H:%M:%S")]
    gpus, run = sample["gpus"], sample["run"]
    if gpus:
        busy, held = _each(gpus, "utilization_fraction", 0.01), [gpu for gpu in gpus if gpu["clock_trouble"]]
        parts += [f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} {_watts(gpus)}"]
        parts += [f"{_each(gpus, 'memory_used_bytes', GIB)} GiB"]
        parts += [f"{_each(gpus, 'temperature_celsius')} °C", f"busy {busy}%"]
        parts += [f"GPU {gpu['index']}: {', '.join(gpu['clock_trouble'])}" for gpu in held]
    else:
        parts.append(f"no GPU, CPU {sample['host']['cpu_fraction']:.0%}")
    if run is not None:
        parts += [f"{run['name']} {run['status']}", f"step {_steps(run)}", f"loss {_loss(run)}"]
        parts += [f"{_count(run['tokens_per_second'])} tokens/s"]
        parts += [f"{run['joules_per_token']:.3g} J/token"] if run["joules_per_token"] is not None else []
        parts += [f"ETA {duration(round(run['eta_seconds']))}"] if run["eta_seconds"] is not None else []
        parts += run["problems"]
    return " | ".join(parts)


def _machine(sample: Values, *, wide: bool) -> Iterator[RenderableType]:
    gpus = sample["gpus"]
    if not gpus:
        yield Text(f"no GPU: {sample['gpus_unavailable']}")
        return
    driver = f", driver {sample['driver']}" if sample["driver"] else ""
    yield Text.assemble((_models(gpus), "bold"), f"{driver}, {_watts(gpus)}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("GPU", justify="right")
    for title, most in (("memory GiB", False), ("power W", False), ("°C", False), ("SM MHz", False),
                        ("memory MHz", True), ("limits W", True), ("busy", False)):  # fmt: skip
        if wide or not most:
            table.add_column(title, justify="right", no_wrap=True)
    table.add_column("clocks held by", overflow="fold")
    for gpu in gpus:
        table.add_row(*_row(gpu, wide=wide))
    yield table
    yield from map(Text, _remarks(gpus))


def _row(gpu: Values, *, wide: bool) -> Iterator[Text]:
    def pair(low: str, high: str, unit: float = 1.0, digits: int = 0) -> str:
        return f"{_number(gpu[low], unit, digits)} / {_number(gpu[high], unit, digits)}"

    yield Text(str(gpu["index"]))
    yield Text(pair("memory_used_bytes", "memory_bytes", GIB, 1))
    yield Text(pair("power_watts", "power_limit_watts"))
    yield Text(_number(gpu["temperature_celsius"]))
    yield Text(pair("sm_clock_mhz", "sm_clock_max_mhz"))
    if wide:
        yield Text(_number(gpu["memory_clock_mhz"]))
        yield Text(f"{_number(gpu['power_min_watts'])} to {_number(gpu['power_max_watts'])}")
    yield Text("-" if gpu["utilization_fraction"] is None else f"{gpu['utilization_fraction']:.0%}")
    held = gpu["clocks_held_by"]
    words = "-" if held is None else ", ".join(held) or "nothing"
    yield Text(words, style="bold red" if gpu["clock_trouble"] else "")


def _remarks(gpus: Sequence[Values]) -> Iterator[str]:
    """Limits that are not the default, and reasons of values that are missing, each with its GPUs."""
    found: dict[str, list[int]] = {}
    for gpu in gpus:
        limit, default = gpu["power_limit_watts"], gpu["power_default_watts"]
        if None not in (limit, default) and abs(limit - default) > 1:
            text = f"power limit {limit:.0f} W; the default is {default:.0f} W"
            found.setdefault(text, []).append(gpu["index"])
        by_reason: dict[str, list[str]] = {}
        for key, reason in gpu["unavailable"].items():
            by_reason.setdefault(reason, []).append(_WORDS.get(key, key))
        for reason, keys in by_reason.items():
            found.setdefault(f"no {', '.join(dict.fromkeys(keys))}: {reason}", []).append(gpu["index"])
    for text, indices in found.items():
        yield f"GPU {', '.join(map(str, indices))}: {text}"


_WORDS = {
    "memory_bytes": "memory size",
    "memory_used_bytes": "memory in use",
    "energy_joules": "energy",
    "power_watts": "power",
    "power_limit_watts": "power limit",
    **dict.fromkeys(("power_default_watts", "power_min_watts", "power_max_watts"), "range of limits"),
    "temperature_celsius": "temperature",
    **dict.fromkeys(("sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz"), "clocks"),
    "utilization_fraction": "utilisation",
    **dict.fromkeys(("clocks_held_by", "clock_trouble"), "reasons for clocks"),
    "processes": "processes",
}


def _processes(gpus: Sequence[Values]) -> Iterator[Text]:
    for gpu in gpus:
        found = sorted(gpu["processes"] or (), key=lambda one: -(one["memory_bytes"] or 0))
        texts = [f"{one['name'] or 'process'} ({one['pid']}) {_size(one['memory_bytes'])}" for one in found]
        more = [f"{len(texts) - MOST_PROCESSES} more"] if len(texts) > MOST_PROCESSES else []
        if texts:
            yield Text(f"GPU {gpu['index']} runs {', '.join(texts[:MOST_PROCESSES] + more)}")
        elif gpu["processes"] is not None and (gpu["memory_used_bytes"] or 0) > LOST_BYTES:
            yield Text(f"GPU {gpu['index']}: the driver lists no process here, as in a container")


def _host(host: Values) -> Text:
    text = f"host: CPU {host['cpu_fraction']:.0%} of {host['cpu_cores']} cores, memory "
    text += f"{_number(host['memory_used_bytes'], GIB, 1)} / {_number(host['memory_bytes'], GIB, 1)} GiB"
    if host["allowed_memory_bytes"] < host["memory_bytes"]:
        text += f" (this container: {gib(host['allowed_memory_bytes'])})"
    return Text(text)


def _run(run: Values, *, width: int) -> Iterator[RenderableType]:
    on = f", {run['strategy']} on {run['processes']}" if run["strategy"] else ""
    style = {"running": "green", "failed": "bold red", "interrupted": "bold red"}.get(run["status"], "")
    held = ", a process holds the folder" if run["in_use"] and run["status"] not in ACTIVE else ""
    rest = f"{held}{on}, {run['path']}"
    yield Text.assemble((str(run["name"]), "bold"), "  ", (run["status"], style), rest)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [("progress", _progress(run, width)), ("loss", f"{_loss(run)}  {sparkline(run['recent_losses'])}")]
    if run["eval_loss"] is not None:
        rows.append(("eval", f"{run['eval_loss']:.4f} after step {run['eval_step']}"))
    late = "" if run["status"] in ACTIVE else f", last {RECENT_SECONDS:.0f} s"  # `report` has all of a run
    rows += [(f"speed{late}", _speed(run)), (f"energy{late}", _energy(run)), ("memory", _memory(run))]
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    yield table
    for problem in run["problems"]:
        yield Text(f"warning: {problem}", style="yellow")


def _progress(run: Values, width: int) -> str:
    done, total = run["step"], run["total_steps"]
    if not total:
        return str(run["unavailable"]["total_steps"])
    full = max(10, min(40, width - 60))
    filled = round(full * min(1.0, done / total))
    text = f"{'━' * filled}{'╌' * (full - filled)} step {_steps(run)} ({done / total:.0%})"
    if run["eta_seconds"] is not None:
        text += f", ETA {duration(round(run['eta_seconds']))}"
    elif run["status"] == "running":
        text += f"; {run['unavailable']['eta_seconds']}"
    if run["resumed_step"] is not None:
        text += f"; resumed after step {run['resumed_step']}"
    return text


def _speed(run: Values) -> str:
    if run["tokens_per_second"] is None:
        return "-"
    text = f"{_count(run['tokens_per_second'])} tokens/s, {_count(run['tokens_per_second_per_gpu'])} each"
    text += _predicted(run, "tokens_per_second_per_gpu", count)
    text += f", step {duration(run['step_seconds'])}"
    return text if run["mfu"] is None else f"{text}, MFU {run['mfu']:.1%}"


def _energy(run: Values) -> str:
    if run["joules_per_token"] is None:
        return f"- ({run['unavailable']['joules_per_token']})"
    text = f"{run['joules_per_token']:.3g} J/token"
    text += _predicted(run, "joules_per_token", lambda value: f"{value:.3g}")
    done, without = run["steps_recorded"], run["steps_without_joules"]
    steps = f"{done - without}/{done}" if without else str(done)
    kwh = run["joules_in_steps"] / JOULES_PER_KWH
    return f"{text}, {run['run_watts']:.0f} W, {kwh:.3g} kWh in {steps} steps"


def _memory(run: Values) -> str:
    peak = run["peak_memory_reserved_bytes"]
    return "-" if peak is None else f"peak {gib(peak)}{_predicted(run, 'peak_memory_reserved_bytes', gib)}"


def _predicted(run: Values, key: str, write: Any) -> str:
    return f" (predicted {write(run['predicted'][key])})" if key in run["predicted"] else ""


def _steps(run: Values) -> str:
    return f"{run['step']}/{run['total_steps'] or '?'}"


def _loss(run: Values) -> str:
    return run["loss_not_finite"] or ("-" if run["loss"] is None else f"{run['loss']:.4f}")


def _models(gpus: Sequence[Values]) -> str:
    names = [gpu["name"] for gpu in gpus]
    if len(set(names)) == 1:
        return f"{len(names)} × {names[0]}" if len(names) > 1 else str(names[0])
    return ", ".join(f"{gpu['index']}: {gpu['name'].removeprefix('NVIDIA ')}" for gpu in gpus)


def _watts(gpus: Sequence[Values]) -> str:
    """Of all GPUs together; nothing where one is not known."""
    sums = []
    for key in ("power_watts", "power_limit_watts"):
        values = [gpu[key] for gpu in gpus]
        sums.append("-" if None in values else f"{sum(values):.0f}")
    return f"{sums[0]} / {sums[1]} W"


def _each(gpus: Sequence[Values], key: str, unit: float = 1.0) -> str:
    return " ".join(_number(gpu[key], unit) for gpu in gpus)


def _number(value: float | None, unit: float = 1.0, digits: int = 0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _size(size: float | None) -> str:
    return "-" if size is None else gib(size)


def _count(value: float | None) -> str:
    return "-" if value is None else count(value)
