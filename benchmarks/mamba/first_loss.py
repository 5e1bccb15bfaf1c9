"""The loss of Mamba before its first step, on random tokens on the CPU: one JSON object per shape.

python benchmarks/mamba/first_loss.py > benchmarks/mamba/results/first-loss.jsonl
"""

from __future__ import annotations

import json
import math

import torch

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.job.schema import Model
from shardwise.models.build import build_model
from shardwise.objective.causal_lm import CausalLM

TOKENS = 64
SHAPES = {"130m_mamba": 24, "1b_mamba": 34, "7b_mamba": 2}
"""Layers. The depth does not matter, because output projections are scaled by it; all 45 of 7B need 28 GB."""


def batch(vocabulary: int) -> MicroBatch:
    ids = torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORED
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(TOKENS).unsqueeze(0),
        cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32),
        max_seqlen=TOKENS,
    )


@torch.no_grad()
def main() -> None:
    for shape, layers in SHAPES.items():
        model = Model(source=shape, weights="random", config={"num_hidden_layers": layers})
        built = build_model(model, dtype=torch.float32, seed=0)
        built.weights.fill(built.model, torch.device("cpu"))
        vocabulary = built.config.vocab_size
        loss = float(CausalLM(built.model)(batch(vocabulary))) / (TOKENS - 1)
        row = {"shape": shape, "width": built.config.hidden_size, "layers": layers, "loss": round(loss, 4)}
        print(json.dumps({**row, "ln_vocabulary": round(math.log(vocabulary), 4)}), flush=True)
        del built


if __name__ == "__main__":
    main()
