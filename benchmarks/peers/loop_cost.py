"""The cost of the training loop compared with a bare DeepSpeed loop of the same step, on one GPU.

    python loop_cost.py --assets assets/1b

Blocks of steps alternate between two loops. One is `for batch: engine(batch); engine.backward(loss);
engine.step()` on batches that are already on the GPU. The other is the real loop: data from the stream, the
learning rate, the loss and the norm read back, events.jsonl written, the display. Process, engine and rows
are the same. All rows come from one stream, so the loss falls through both kinds of block.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import emit, peak_memory

from shardwise.job.schema import Job
from shardwise.launch.spec import LaunchSpec
from shardwise.training.loop import Loop, Progress, StepReport
from shardwise.training.observe import Recorder
from shardwise.training.process import Ranks, StopSignal, join
from shardwise.training.ready import get_ready, make_streams
from shardwise.training.run import make_engine, make_observer


def job(arguments: argparse.Namespace, output: Path) -> Job:
    rows = arguments.micro_batch
    return Job.model_validate(
        {
            "name": "loop-cost",
            "output": str(output),
            "model": {"source": str(arguments.assets / "model"), "weights": "random"},
            "data": {
                "train": str(arguments.assets / "text.jsonl"),
                "format": "text",
                "sequence_length": arguments.sequence,
                "eval_fraction": 0.0,
            },
            "optimizer": {"learning_rate": 1e-4, "schedule": "constant", "warmup_steps": 0},
            "train": {
                "steps": 100_000,
                "global_batch": rows,
                "micro_batch": rows,
                "checkpointing": "none",
                "eval_every": 0,
                "save_every": 0,
                "worst_case_first": False,
            },
            "strategy": "zero2",
        }
    )


def timed(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    since = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - since


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--block", type=int, default=25, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked = job(arguments, Path(folder))
        ready = get_ready(asked, processes=1)
        world = join()
        engine = make_engine(ready, world)
        stream, _ = make_streams(ready, world)
        spec = LaunchSpec(job=asked.model_dump(mode="json"), run_dir=f"{folder}/run", processes=1)
        recorder = make_observer(ready, spec, engine, Progress())
        reports: list[StepReport] = []

        class Observer(Recorder):
            """The real observer, which also keeps its reports."""

            def on_step(self, report: StepReport) -> None:
                reports.append(report)
                super().on_step(report)

        recorder.__class__ = Observer
        progress = Progress()
        loop = Loop(
            job=asked,
            engine=engine,
            stream=stream,
            evaluation=None,
            ranks=Ranks(world),
            stop=StopSignal(),
            observer=recorder,
            save_state=lambda _: 0,
            progress=progress,
            total_steps=100_000,
        )

        def bare() -> None:
            deepspeed = engine._engine
            for batch, targets in ahead:
                loss = deepspeed(batch)
                deepspeed.backward(loss * (1 / targets), scale_wrt_gas=False)
                deepspeed.step()

        seconds: dict[str, list[float]] = {"bare": [], "loop": []}
        with recorder:
            loop.run(10)  # kernels compile, the allocator settles
            for _ in range(arguments.blocks):
                steps = [next(stream) for _ in range(arguments.block)]
                ahead = [(step.micro_batches[0].to(world.device), step.target_tokens) for step in steps]
                seconds["bare"].append(timed(bare) / arguments.block)
                last = progress.step + arguments.block
                seconds["loop"].append(timed(lambda last=last: loop.run(last)) / arguments.block)
    cost = statistics.median(seconds["loop"]) / statistics.median(seconds["bare"]) - 1
    emit(
        {
            "row": "loop over bare deepspeed zero2",
            "cost_fraction": round(cost, 5),
            "step_seconds": {name: [round(value, 5) for value in values] for name, values in seconds.items()},
            "parameters": ready.built.total,
            "micro_batch": arguments.micro_batch,
            "sequence_length": arguments.sequence,
            **peak_memory(),
            "loss": [report.loss for report in reports[:: arguments.block]],
            "grad_norm": [report.grad_norm for report in reports[:: arguments.block]],
        }
    )


if __name__ == "__main__":
    main()
