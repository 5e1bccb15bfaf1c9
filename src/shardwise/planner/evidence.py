"""How far predictions like this one were off: measured runs of the same kind of strategy.

The numbers are the accuracy ledger's; `benchmarks/accuracy/evidence.py` writes evidence.toml.
"""

from dataclasses import asdict, dataclass
from typing import Any

from shardwise.folders import packaged
from shardwise.hardware.hardware import Hardware
from shardwise.job.strategies import ENGINES
from shardwise.simulate.prediction import Prediction
from shardwise.strategy import Strategy

HOST_BOUND = 0.5
"""Share of a predicted step that the host needs to issue it, from which on time is predicted less well."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Absolute differences of predictions from measurements, as shares of what was measured."""

    runs: int
    mean: float
    worst: float

    def text(self, what: str, of: str = "") -> str:
        mean, worst = (f"{x:.1%}" if x >= 0.0005 else "less than 0.1%" for x in (self.mean, self.worst))
        more = "; ".join(filter(None, [f"worst {worst}" * (self.runs > 1), of]))
        return f"{mean} in {what}" + f" ({more})" * bool(more)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured of strategies like one of a plan."""

    kind: str
    gpus: tuple[str, ...]  # That they ran on; empty where nothing was measured
    same_gpu: bool
    memory: Errors | None
    time: Errors | None
    """Of runs that wait for the host as much as this one; None where nothing like it was measured."""

    def text(self) -> str:
        if self.memory is None:
            return f"error not known: no run of {self.kind} was measured"
        count = self.memory.runs
        ran = f"{count} measured run{'s' * (count > 1)} of {self.kind} on {', '.join(self.gpus)}"
        time = "not known in time: they wait for the host far more, or far less"
        if self.time is not None:
            alike = f"the {self.time.runs} that wait for the host as much" * (self.time.runs < count)
            time = self.time.text("time", alike)
        elsewhere = "" if self.same_gpu else "; none ran on this GPU"
        return f"error of the prediction in {ran}: {self.memory.text('memory')}, {time}{elsewhere}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"gpus": list(self.gpus)}


def evidence_of(strategy: Strategy, prediction: Prediction, hardware: Hardware) -> Evidence:
    """The measured runs most like a strategy on `hardware`."""
    kind, time = kind_of(strategy), prediction.time
    found = dict(packaged("planner/evidence.toml").get(kind, {}))
    gpus = tuple(found.pop("gpus", ()))
    waits = "time_host_bound" if time.launch_seconds >= HOST_BOUND * time.step_seconds else "time"
    errors = {name: Errors(**value) for name, value in found.items()}
    return Evidence(
        kind=kind,
        gpus=gpus,
        same_gpu=hardware.gpu.name in gpus,
        memory=errors.get("memory"),
        time=errors.get(waits),
    )


def kind_of(strategy: Strategy) -> str:
    """Engine and stage, and what changes memory and time most: `zero3 offload`, `zero1 tensor-parallel`."""
    name = ENGINES[strategy.engine].base.format(stage=strategy.stage)
    if strategy.pipeline > 1:
        name += " pipeline"
    if strategy.tensor_parallel > 1:
        name += " tensor-parallel"
    if strategy.offloads:
        name += " offload"
    return name
