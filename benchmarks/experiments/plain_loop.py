"""The loop that a tutorial would write: transformers, torch's AdamW, autocast. No engine, no fused loss.

    python plain_loop.py JOB.json --steps 8 --warmup 2

The rows are those of shardwise's loader, so that losses can be compared step by step; all else is plain.
Trained weights are fp32 and computed with in bf16 (autocast), as in shardwise; weights below LoRA are bf16.
The last line of stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from shardwise import Job


def rows_of(job: Job) -> Any:
    """The batches of each optimizer step."""
    from shardwise.training.ready import get_ready, make_streams

    return make_streams(get_ready(job, processes=1), None)[0]


def build(job: Job, device: torch.device) -> torch.nn.Module:
    """The job's model from its folder, with adapters where it has some."""
    from transformers import AutoModelForCausalLM

    frozen = job.model.lora is not None and job.train.precision == "bf16"
    dtype = torch.bfloat16 if frozen else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model.source, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device)
    if job.train.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if job.model.lora is not None:
        from peft import LoraConfig, get_peft_model

        lora = job.model.lora
        adapters = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear")
        model.enable_input_require_grads()
        model = get_peft_model(model, adapters)  # adapters are fp32
    return model.train()


def train(job: Job, steps: int) -> dict[str, list[Any]]:
    """Run the steps; for each its loss, gradient norm, seconds, tokens, and bytes of memory after it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batches = build(job, device), rows_of(job)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = job.optimizer
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=job.train.precision == "bf16")
    found: dict[str, list[Any]] = {name: [] for name in ("loss", "grad_norm", "step_seconds_all", "tokens")}
    memory: dict[str, list[int]] = {"allocated_by_step_bytes": [], "reserved_by_step_bytes": []}
    for _ in range(steps):
        began, step = time.perf_counter(), next(batches)
        total = torch.zeros((), device=device)
        for batch in step.micro_batches:
            ids = batch.input_ids.to(device)
            with autocast:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(step.micro_batches)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        values = (total.item(), norm.item())  # and so the GPU has finished
        found["step_seconds_all"].append(round(time.perf_counter() - began, 5))
        found["loss"].append(values[0])
        found["grad_norm"].append(values[1])
        found["tokens"].append(step.tokens)
        for name, value in memory_now(device).items():
            memory[name].append(value)
    batches.close()
    return found | memory


def memory_now(device: torch.device) -> dict[str, int]:
    """Bytes of the GPU that torch has; without a GPU the resident set of this process."""
    if device.type == "cpu":
        resident = psutil.Process().memory_info().rss
        return {"allocated_by_step_bytes": resident, "reserved_by_step_bytes": resident}
    return {
        "allocated_by_step_bytes": torch.cuda.memory_allocated(),
        "reserved_by_step_bytes": torch.cuda.memory_reserved(),
    }


def peaks(found: dict[str, list[Any]]) -> dict[str, int]:
    if not torch.cuda.is_available():
        peak = max(found["allocated_by_step_bytes"])
        return {"peak_allocated_bytes": peak, "peak_reserved_bytes": peak}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", type=Path, help="a job as JSON")
    parser.add_argument("--steps", type=int, default=8, help="steps that count")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    arguments = parser.parse_args()
    job = Job.model_validate_json(arguments.job.read_text(encoding="utf-8"))
    found = train(job, arguments.warmup + arguments.steps)
    print(json.dumps({**found, **peaks(found)}), flush=True)


if __name__ == "__main__":
    main()
