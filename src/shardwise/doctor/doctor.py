"""Looks at the whole machine: what the driver and the file system tell, and what child processes find out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.doctor import calibrate as calibration
from shardwise.doctor import gpus as gpu_checks
from shardwise.doctor import judge, judge_software, machine
from shardwise.doctor.check import Check, count, ready
from shardwise.doctor.child import LIMIT_SECONDS, MODULE, Child, Children, children
from shardwise.doctor.gpus import Gpus
from shardwise.hardware.calibration import Calibration
from shardwise.launch.local import worker_environment

CPU_RANKS = 2
"""Processes that try gloo where there is no GPU."""
HUB_SECONDS = 10.0
COMPILE_SECONDS = 600.0
MEASURE_SECONDS = 120.0
"""For one measurement; the largest all-reduce over PCIe 3.0 takes 10."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks, and what they were made of."""

    checks: tuple[Check, ...]
    gpus: Gpus
    calibration: Calibration | None
    seconds: float

    @property
    def ready(self) -> bool:
        """Whether training can run here."""
        return ready(self.checks)

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
) -> Report:
    """Looks at everything; nothing is installed, set or left behind but a calibration that is asked for.

    `runs`, `cache`: folders that training will write. `module` answers the probes in child processes, each of
    which may be silent for `limit_seconds`.
    """
    start = time.perf_counter()
    gpus = gpu_checks.look()
    with children(module=module, limit_seconds=limit_seconds) as family:
        asked = _Asked(family, gpus)
        local = [*gpu_checks.checks(gpus), *machine.checks(gpus=gpus.count, cache=cache, runs=runs)]
        family.wait()
        checks = [*local, *asked.checks()]
        if calibrate and ready(checks):
            found, check = _measure(family, gpus)
            checks += [check, *_built_cpu_adam(family)]
        else:
            found, check = calibration.kept(gpus, CPU_RANKS)
            checks.append(check)
    return Report(
        checks=tuple(checks), gpus=gpus, calibration=found, seconds=round(time.perf_counter() - start, 3)
    )


class _Asked:
    """The questions that run in children, begun all at once."""

    def __init__(self, family: Children, gpus: Gpus) -> None:
        self._gpus = gpus
        environment = _environment(max(1, gpus.count))
        self._ranks = _ranks(family, gpus, "collective")
        self._liger = find_spec("liger_kernel") is not None
        ours, others = ["cross_entropy", "mamba"], ["attention", *(["liger"] if self._liger else [])]
        low_bit = ["bitsandbytes"] if find_spec("bitsandbytes") else []
        engine = ["deepspeed"] if find_spec("deepspeed") else []
        # compiling kernels takes a GPU machine's time, importing torch several times that of one without
        groups = [["torch", "formats", *ours, *others, *engine, *low_bit]]
        if gpus.count:
            groups = [["torch", "formats", *low_bit], ours, others, engine, ["nvml"]]
        self._several = [family.ask(*names, environment=environment) for names in groups if names]
        self._hub: Child | None = None
        if not judge_software.offline():
            self._hub = family.ask("hub", limit_seconds=HUB_SECONDS)

    def checks(self) -> Iterator[Check]:
        """What was answered; after all children have ended."""
        answers = {name: answer for child in self._several for name, answer in child.answers.items()}
        yield judge.torch_build(answers["torch"], self._gpus)
        yield judge.collective([child.answers["collective"] for child in self._ranks])
        yield from judge.formats(answers["formats"])
        yield from judge.kernels(answers, liger=self._liger)
        yield from judge_software.deepspeed(answers.get("deepspeed"))
        yield judge.bitsandbytes(answers.get("bitsandbytes"))
        if "nvml" in answers:
            yield judge.energy(answers["nvml"])
        yield judge_software.hub(None if self._hub is None else self._hub.answers["hub"])


def _measure(family: Children, gpus: Gpus) -> tuple[Calibration | None, Check]:
    ranks = _ranks(family, gpus, "measure", limit_seconds=MEASURE_SECONDS)
    family.wait()
    return calibration.measured(gpus, [child.answers["measure"] for child in ranks])


def _built_cpu_adam(family: Children) -> Iterator[Check]:
    """Compiles DeepSpeed's optimizer for offload, which takes a minute or two the first time."""
    if not find_spec("deepspeed"):
        return
    child = family.ask("cpu_adam", environment=_environment(1), limit_seconds=COMPILE_SECONDS)
    family.wait()
    yield judge_software.cpu_adam(child.answers["cpu_adam"])


def _ranks(family: Children, gpus: Gpus, probe: str, *, limit_seconds: float | None = None) -> list[Child]:
    """A process for each GPU, or two where there is none, that can meet."""
    size = gpus.count or CPU_RANKS
    shared = dict(_environment(size))
    if not gpus.count:
        shared["CUDA_VISIBLE_DEVICES"] = ""  # torch may see what the launcher does not count
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return family.ask_together(probe, ranks, limit_seconds)


def _environment(processes: int) -> Mapping[str, str]:
    """What a worker of a run gets, so that what is tried is what will run."""
    return worker_environment(processes=processes, folder=Path(tempfile.gettempdir()))
