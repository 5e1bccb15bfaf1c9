"""All checks of this machine, by its driver, its file system and probes in children; and their report."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.diagnosis import STATUSES, Check, Status, count, judge, machine
from shardwise.diagnosis import calibrate as calibration
from shardwise.diagnosis import gpus as gpu_checks
from shardwise.diagnosis.child import LIMIT_SECONDS, MODULE, Child, Children, Say, children
from shardwise.diagnosis.gpus import Gpus, size_of
from shardwise.hardware.calibration import Calibration
from shardwise.launch.local import worker_environment
from shardwise.screen import as_text, screen

CPU_RANKS = 2  # that try gloo where there is no GPU
HUB_SECONDS, COMPILE_SECONDS = 10.0, 600.0
MEASURE_SECONDS = 120.0  # for one measurement; the largest all-reduce over PCIe 3.0 takes 10


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks, and what they were made of."""

    checks: tuple[Check, ...]
    gpus: Gpus
    calibration: Calibration | None
    seconds: float

    def __repr__(self) -> str:
        return as_text(show, self)

    @property
    def ready(self) -> bool:
        found = count(self.checks)
        return found["problem"] == found["unclear"] == 0

    def to_json(self) -> dict[str, Any]:
        hardware = self.gpus.hardware
        return {
            "schema": 1,
            "ready": self.ready,
            "counts": count(self.checks),
            "checks": [check.to_json() for check in self.checks],
            "hardware": None if hardware is None else hardware.to_json(),
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "seconds": self.seconds,
        }


def examine(
    *,
    runs: Path,
    cache: Path,
    calibrate: bool = False,
    module: str = MODULE,
    limit_seconds: float = LIMIT_SECONDS,
    say: Say = lambda *_: None,
) -> Report:
    """Check everything; nothing is installed, set or left behind but a calibration that is asked for.

    `runs`, `cache`: folders that training will write. `module` answers the probes in child processes, each of
    which may be silent for `limit_seconds`; `say` hears of every answer.
    """
    start = time.perf_counter()
    gpus = gpu_checks.look()
    with children(module=module, limit_seconds=limit_seconds, say=say) as family:
        judged = _probe(family, gpus)
        local = [*gpu_checks.checks(gpus), *machine.checks(gpus=gpus.count, cache=cache, runs=runs)]
        family.wait()
        checks = [*local, *judged()]
        if calibrate and not count(checks)["problem"]:
            ranks = _ranks(family, gpus, "measure", MEASURE_SECONDS)
            family.wait()
            found, check = calibration.measured(gpus, [child.answers["measure"] for child in ranks])
            if find_spec("deepspeed"):  # compiling its optimizer takes a minute or two the first time
                child = family.ask("cpu_adam", environment=_environment(1), limit=COMPILE_SECONDS)
                family.wait()
                checks.append(judge.cpu_adam(child.answers["cpu_adam"]))
        else:
            found, check = calibration.kept(gpus, CPU_RANKS)
    seconds = round(time.perf_counter() - start, 3)
    return Report(checks=(*checks, check), gpus=gpus, calibration=found, seconds=seconds)


def _probe(family: Children, gpus: Gpus) -> Callable[[], Iterator[Check]]:
    """Start all probes at once; return what judges their answers after all children have ended."""
    environment = _environment(max(1, gpus.count))
    ranks = _ranks(family, gpus, "collective")
    liger = find_spec("liger_kernel") is not None
    ours, others = ["cross_entropy", "mamba"], ["attention", *(["liger"] if liger else [])]
    formats = ["torch", "formats", *(["bitsandbytes"] if find_spec("bitsandbytes") else [])]
    engine = ["deepspeed"] if find_spec("deepspeed") else []
    # compiling kernels takes a GPU machine's time, importing torch several times that of one without
    groups = [formats, ours, others, engine] if gpus.count else [[*formats, *ours, *others, *engine]]
    several = [family.ask(*names, environment=environment) for names in groups if names]
    hub = None if judge.offline() else family.ask("hub", limit=HUB_SECONDS)

    def judged() -> Iterator[Check]:
        answers = {name: answer for child in several for name, answer in child.answers.items()}
        yield judge.torch_build(answers["torch"], gpus)
        yield judge.collective([child.answers["collective"] for child in ranks])
        yield from judge.formats(answers["formats"])
        yield from judge.kernels(answers, liger=liger)
        yield from judge.deepspeed(answers.get("deepspeed"))
        yield judge.bitsandbytes(answers.get("bitsandbytes"))
        yield judge.hub(None if hub is None else hub.answers["hub"])

    return judged


def _ranks(family: Children, gpus: Gpus, probe: str, limit: float = 0.0) -> list[Child]:
    """A process for each GPU, or two where there is none, that can meet."""
    size = gpus.count or CPU_RANKS
    shared = _environment(size)
    if not gpus.count:
        shared["CUDA_VISIBLE_DEVICES"] = ""  # torch may see what the launcher does not count
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return family.ask_together(probe, ranks, limit)


def _environment(processes: int) -> dict[str, str]:
    """A worker's environment: the probes then meet what a run will meet."""
    return worker_environment(processes=processes, folder=Path(tempfile.gettempdir()))


SIGNS: dict[Status, tuple[str, str]] = {"problem": ("✗", "bold red"), "warning": ("!", "yellow")}
SIGNS |= {"unclear": ("?", "bold yellow"), "ok": ("✓", "green"), "skipped": ("·", "dim")}
BAD = ("problem", "unclear", "warning")


def show(report: Report, *, console: Console | None = None) -> None:
    """Print the machine, the checks, and whether training can run."""
    console = console or screen()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False, highlight=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in sorted(report.checks, key=lambda one: STATUSES.index(one.status)):
        sign, style = SIGNS[check.status]
        name = Text(check.name, style="bold" if check.status == "problem" else "")
        table.add_row(Text(sign, style=style), name, Text("\n").join(_lines(check)))
    for part in (_heading(report), "", Padding(table, (0, 0, 0, 2), expand=False), "", _verdict(report)):
        console.print(part)


def _heading(report: Report) -> Text:
    gpus = report.gpus
    if not gpus.cards:
        what = f"{gpus.count} parts of GPUs" if gpus.count else "no GPU to train on"
        return Text.assemble(("this machine", "bold"), f": {what}")
    first = gpus.cards[0]
    name = first.name.removeprefix("NVIDIA ") if gpus.hardware is None else gpus.hardware.gpu.name
    link = "" if gpus.hardware is None or len(gpus.cards) == 1 else f" · {gpus.hardware.intra.name}"
    facts = f"{size_of(first)}{link} · driver {gpus.driver}"
    return Text.assemble((f"{len(gpus.cards)} × {name}", "bold"), facts)


def _verdict(report: Report) -> Text:
    bad = [(n, status) for status, n in count(report.checks).items() if status in BAD and n]
    plural = {"unclear": ""}
    counted = ", ".join(f"{n} {status}{'' if n == 1 else plural.get(status, 's')}" for n, status in bad)
    tail = f"{' · ' if counted else ''}{counted} · {report.seconds:.0f} s"
    if count(report.checks)["unclear"] and not count(report.checks)["problem"]:
        what = "this machine is too busy to say whether training can run"
        return Text.assemble(("? could not tell", "bold yellow"), f": {what}{tail}")
    if not report.ready:
        return Text.assemble(("✗ not ready", "bold red"), f": training cannot run here as it is{tail}")
    number = report.gpus.count
    where = "the CPU" if number == 0 else "1 GPU" if number == 1 else f"{number} GPUs"
    return Text.assemble(("▶ ready", "bold green"), f": training can run on {where}{tail}")


def _lines(check: Check) -> Iterator[Text]:
    yield Text(check.finding, style="dim" if check.status == "skipped" else "")
    if check.fix and check.status in BAD:
        yield Text.assemble(("fix: ", "bold"), check.fix)
    elif check.fix and check.status == "skipped":
        yield Text(check.fix, style="dim")
