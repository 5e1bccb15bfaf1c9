"""What `shardwise plan --objective energy --max-slowdown` chooses for four jobs, and predicts to save.

    python benchmarks/power_limits_predicted/jobs.py --out benchmarks/power_limits_predicted/results/jobs.json

Needs no GPU. Rows are those that `shardwise plan --model` assumes.
"""

import argparse
import datetime as dt
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import shardwise
from shardwise.planner.plan import in_words
from shardwise.simulate.power import under_limit

JOBS = (
    ("llama-3.1-8b", "1xH200", ("model.lora.rank=16",), "5%"),
    ("llama-3.1-8b", "8xH100", ("model.lora=null",), "5%"),
    ("qwen2.5-1.5b", "4xRTX4090", ("model.lora=null",), "5%"),
    (
        "gpt2",
        "4xRTX4090",
        ("model.lora=null", "data.sequence_length=128", "train.global_batch=32"),
        "30%",
    ),
)


SWEPT = ("EleutherAI/gpt-neo-2.7B", "4xRTX4080", ("model.lora.rank=16",), (320, 280, 240, 200, 160, 130, 100))


def row(model: str, gpus: str, changes: tuple[str, ...], max_slowdown: str) -> dict[str, Any]:
    """One job's choice."""
    plan = shardwise.plan(
        model=model, gpus=gpus, changes=changes, objective="energy", max_slowdown=max_slowdown, pareto=True
    )
    chosen, power = plan.chosen, plan.power
    assert chosen is not None
    assert power is not None
    time, energy = chosen.prediction.time, chosen.prediction.energy
    return {
        "model": model,
        "gpus": gpus,
        "changes": changes,
        "chosen_gpus": plan.hardware.world_size,
        "default": in_words(power.default),
        "chosen": in_words(chosen.strategy),
        "power_limit_watts": chosen.power_limit_watts,
        "own_limit_watts": plan.hardware.gpu.power_watts,
        "joules_per_token": energy.joules_per_token,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "watts": energy.joules_per_step / time.step_seconds / time.world_size,
        **{name: value for name, value in asdict(power).items() if name not in ("default", "curve")},
        "curve": [asdict(one) for one in power.curve],
        "pareto": [
            {
                "strategy": in_words(one.strategy),
                "power_limit_watts": one.power_limit_watts,
                "tokens_per_second_per_gpu": one.prediction.time.tokens_per_second_per_gpu,
                "joules_per_token": one.prediction.energy.joules_per_token,
            }
            for one in plan.pareto
        ],
    }


def swept(model: str, gpus: str, changes: tuple[str, ...], limits: tuple[int, ...]) -> dict[str, Any]:
    """One job's fastest strategy at limits that somebody names, whether or not the card accepts them."""
    plan = shardwise.plan(model=model, gpus=gpus, changes=changes)
    chosen, gpu = plan.chosen, plan.hardware.gpu
    assert chosen is not None
    own = chosen.prediction
    levels = []
    for watts in limits:
        made = under_limit(own, gpu, watts)
        levels.append(
            {
                "limit_watts": watts,
                "time": made.time.step_seconds / own.time.step_seconds,
                "energy": made.energy.joules_per_token / own.energy.joules_per_token,
            }
        )
    return {"model": model, "gpus": gpus, "strategy": in_words(chosen.strategy), "levels": levels}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a plan with power limits chooses for four jobs")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    result = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": f"python benchmarks/power_limits_predicted/jobs.py --out {asked.out}",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "jobs": [row(*job) for job in JOBS],
        "swept": swept(*SWEPT),
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
