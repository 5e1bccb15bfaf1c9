"""Three steps of a tiny model with a user's DeepSpeed configuration, on the CPU."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


def run(stage: Callable[[str], None]) -> dict[str, Any]:
    """The loss of each step with the file $SHARDWISE_TINY; what DeepSpeed raises is the answer."""
    import deepspeed

    from shardwise.engines.deepspeed.runtime.patches import skip_shared_memory_transport

    skip_shared_memory_transport()  # else the first start compiles it, for minutes
    config = json.loads(Path(os.environ["SHARDWISE_TINY"]).read_text(encoding="utf-8"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 64))
    stage("deepspeed.initialize")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    words, losses = torch.arange(8), []
    for step in range(1, 4):
        stage(f"step {step}")
        for _ in range(engine.gradient_accumulation_steps()):
            loss = nn.functional.cross_entropy(engine(words).float(), words)
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
    return {"losses": losses}
