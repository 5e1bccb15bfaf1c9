"""One of several ranks that train on fake GPUs, under Zeus' optimizer or under shardwise's.

A step is a sleep, as long as the clock of the rank's fake card allows, and a barrier. All that Zeus asks
NVML goes to the fake. Three calls of torch that need CUDA are replaced: `Tensor.cuda`, `cuda.synchronize` and
`cuda.is_available`.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shardwise.device.fake import FakeNvml

STEP_SECONDS = 0.1
WAIT, WARMUP, PROFILE, STRIDE = 1, 2, 30, 100
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def step(fake: FakeNvml) -> float:
    """Seconds of one step of all ranks."""
    began = time.perf_counter()
    time.sleep(STEP_SECONDS / fake.clock_ratio(f"GPU-fake-{RANK}"))
    dist.barrier()
    return time.perf_counter() - began


def counters(fake: FakeNvml) -> float:
    """Joules of all cards, as they count them."""
    return sum(map(fake.joules, fake.state()["gpus"]))


def zeus(fake: FakeNvml, form: str) -> dict[str, Any]:
    """The documented form: each rank's monitor has its own GPU; the seed's: each has all GPUs."""
    fake._nvmlGetFunctionPointer = None  # by this name Zeus knows the official package
    sys.modules["pynvml"] = fake  # type: ignore[assignment]
    from zeus.monitor import ZeusMonitor  # type: ignore[import-not-found]
    from zeus.optimizer.power_limit import (  # type: ignore[import-not-found]
        Done,
        GlobalPowerLimitOptimizer,
    )

    torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True
    indices = [RANK] if form == "documented" else list(range(SIZE))
    monitor = ZeusMonitor(gpu_indices=indices, cpu_indices=[])
    optimizer = GlobalPowerLimitOptimizer(
        monitor, wait_steps=WAIT, warmup_steps=WARMUP, profile_steps=PROFILE, pl_step=STRIDE
    )
    own: list[float] = []
    steps = 0
    while not isinstance(optimizer.state, Done):
        before, steps = type(optimizer.state).__name__, steps + 1
        dist.barrier()
        if RANK == 0 and before == "Profiling" and optimizer.state.steps == 1:
            own.append(counters(fake))
        optimizer.on_step_begin()
        if RANK == 0 and before == "Warmup" and type(optimizer.state).__name__ == "Profiling":
            own.append(counters(fake))
        step(fake)
    return {
        "steps": steps,
        "cost_world_size": optimizer.optimum_selector.world_size,
        "eta": optimizer.optimum_selector.eta_knob,
        "chosen_watts": optimizer.state.optimal_power_limit // 1000,
        "windows": [
            {
                "watts": one.power_limit,
                "steps": PROFILE,
                "joules": one.energy,
                "seconds": one.time,
                "cards_joules": end - start,
            }
            for one, start, end in zip(optimizer.measurements, own[::2], own[1::2], strict=False)
        ],
    }


def shardwise(fake: FakeNvml, folder: Path) -> dict[str, Any]:
    """Rank 0's observer with the counters of all ranks, as in a run."""
    from shardwise.device.find import find
    from shardwise.job.schema import Energy
    from shardwise.record.read import read_events
    from shardwise.record.schema import RunEvent
    from shardwise.record.write import RunFolder
    from shardwise.training import meter
    from shardwise.training.loop import StepReport
    from shardwise.training.observe import Quiet, Recorder, Speed
    from shardwise.training.power import PowerTuner

    cpu, group = torch.device("cpu"), SimpleNamespace(size=SIZE)

    def gathered(value: Any) -> list[Any]:
        found: list[Any] = [None] * group.size
        dist.all_gather_object(found, value)
        return found

    cards, first = gathered(meter.card_of(cpu)), gathered(meter.millijoules(cpu))
    observer: Any = Quiet()
    if RANK == 0:
        head = RunEvent(
            name="a",
            strategy="-",
            processes=SIZE,
            total_steps=1,
            global_batch=1,
            sequence_length=1,
            parameters=1,
            trainable_parameters=1,
        )
        run = RunFolder.create(folder / "run", job_yaml="name: a\n", plan={}, environment={})
        recorder = Recorder(
            run,
            job={"tracking": []},
            header=head,
            cards=cards,
            first=first,
            resumed_step=None,
            speed=Speed(gpus=SIZE, flops_per_token=1.0, peak_flops=None, why_no_peak="-"),
        )
        energy = Energy(objective="eta", eta=0.5, power_limits=[700, 600, 500, 400, 300, 200])
        observer = PowerTuner(
            recorder, energy=energy, device=find(), cards=cards, key={}, folder=folder / "run"
        )
    steps, own = 0, dict[int, float]()
    with observer:
        while not any(gathered(getattr(observer, "_chosen", None) is not None)):
            seconds, steps = step(fake), steps + 1
            unknown = dict.fromkeys(meter.MEMORY_FIELDS, [0] * SIZE)
            own[steps] = counters(fake)
            now = [int(one) for one in gathered(meter.millijoules(cpu))]
            report = StepReport(
                step=steps,
                epoch=0,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=1.0,
                tokens=1,
                target_tokens=1,
                seconds=seconds,
                skipped=False,
                loss_scale=None,
                memory={**unknown, "energy_millijoules": now},
            )
            observer.on_step(report)
        observer.finish(step=steps, status="finished")
    if RANK:
        return {}
    events = [one for one in read_events(folder / "run" / "events.jsonl") if one["kind"] == "power"]
    return {
        "steps": steps,
        "cost_world_size": len(set(cards)),
        "eta": 0.5,
        "chosen_watts": next(one["watts"] for one in events if one["what"] == "choice"),
        "windows": [
            {
                "watts": one["watts"],
                "steps": one["steps"],
                "joules": one["joules"],
                "seconds": one["seconds"],
                "cards_joules": own[one["step"]] - own[one["step"] - one["steps"]],
            }
            for one in events
            if one["what"] == "window"
        ],
    }


def main() -> None:
    form, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    fake = FakeNvml(folder / "gpus.json")
    fake.change(f"GPU-fake-{RANK}", load=0.9)
    dist.barrier()
    found = shardwise(fake, folder) if form == "shardwise" else zeus(fake, form)
    if RANK == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
