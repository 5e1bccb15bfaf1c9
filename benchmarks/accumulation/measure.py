"""How far a gradient is off when a step's micro-batches are added up in bf16, and in fp32.

    python benchmarks/accumulation/measure.py TEXT >benchmarks/accumulation/results/cpu.jsonl

TEXT is any file; its bytes are the tokens. A Llama of 3 million random weights, then the same after 300
steps of AdamW. "Exact" is the gradient of fp32 passes over the same bf16 weights, summed in float64. A
micro-batch is a row of 256 bytes. `bf16` sums as ZeRO-0 and 1 do: each gradient is divided by the number of
micro-batches first, as DeepSpeed divides the loss. One JSON line for each state and number.
"""

import copy
import json
import platform
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

NUMBERS = (2, 4, 8, 16, 32, 64, 128)
LENGTH, STEPS, BATCH = 256, 300, 8

Gradients = list[torch.Tensor]


def rows(data: torch.Tensor, number: int) -> torch.Tensor:
    starts = torch.randint(0, len(data) - LENGTH, (number,)).tolist()
    return torch.stack([data[start : start + LENGTH] for start in starts])


def gradients(model: nn.Module, batch: torch.Tensor) -> Gradients:
    model.zero_grad(set_to_none=True)
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def train(model: nn.Module, data: torch.Tensor) -> float:
    optimizer, loss = torch.optim.AdamW(model.parameters(), 1e-3), torch.zeros(())
    for _ in range(STEPS):
        batch = rows(data, BATCH)
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
    return loss.item()


def zeros(like: Gradients, dtype: torch.dtype) -> Gradients:
    return [torch.zeros_like(one, dtype=dtype) for one in like]


def norm(values: Iterable[torch.Tensor]) -> float:
    return sum(float(one.double().square().sum()) for one in values) ** 0.5


def off(found: Gradients, exact: Gradients) -> float:
    """The norm of the difference, by the exact norm."""
    return norm(a.double() - b for a, b in zip(found, exact, strict=True)) / norm(exact)


def measured(model: nn.Module, data: torch.Tensor) -> Iterable[dict[str, float]]:
    low = copy.deepcopy(model).bfloat16()
    full = copy.deepcopy(low).float()
    weights = list(model.parameters())
    exact, fp32 = zeros(weights, torch.float64), zeros(weights, torch.float32)
    bf16 = {number: zeros(weights, torch.bfloat16) for number in NUMBERS}
    for count in range(1, max(NUMBERS) + 1):
        batch = rows(data, 1)
        for total, one in zip(exact, gradients(full, batch), strict=True):
            total.add_(one)
        found = gradients(low, batch)
        for total, one in zip(fp32, found, strict=True):
            total.add_(one)
        for number in (n for n in NUMBERS if n >= count):
            for total, one in zip(bf16[number], found, strict=True):
                total.add_(one / number)
        if count in bf16:
            of_fp32, of_exact = [one / count for one in fp32], [one / count for one in exact]
            yield {
                "micro_batches": count,
                "gradient_norm": norm(of_exact),
                "fp32_sum_off": off(of_fp32, of_exact),
                "bf16_sum_off": off(bf16[count], of_exact),
                "bf16_sum_from_fp32_sum": off(bf16[count], of_fp32),
            }


def main() -> None:
    data = torch.tensor(list(Path(sys.argv[1]).read_bytes()[:4_000_000]))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    where = {
        "text": Path(sys.argv[1]).name,
        "date": datetime.now(tz=UTC).date().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    for steps in (0, STEPS):
        loss = train(model, data) if steps else None
        for row in measured(model, data):
            print(json.dumps({"steps": steps, "loss": loss, **row, **where}), flush=True)


if __name__ == "__main__":
    main()
