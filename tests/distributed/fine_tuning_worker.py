"""Engines with LoRA's variants, LoRA+, modules trained in full and 8-bit moments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_worker as w
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.engines.runtime.protocol import Engine, World, build_engine
from shardwise.job.schema import Lora, Optimizer
from shardwise.models.adapters import add_lora
from shardwise.strategy import Strategy

STEPS = range(3)
DORA = Lora(rank=4, variants=["dora", "rslora"], modules_to_save=["embed_tokens", "norm"])
PLUS = Optimizer(learning_rate=1e-3, clip_norm=0.5, lora_plus=8.0)
EIGHT_BIT = Optimizer(learning_rate=1e-3, weight_decay=0.1, clip_norm=0.5, name="adamw8bit")
ENGINES = {
    "dora": ("ddp", "ddp-zero1", "fsdp2", "zero1", "zero2", "zero3"),
    "8bit": ("ddp", "ddp-zero1", "fsdp2", "zero0", "zero1", "zero2", "zero3"),
}


def llama(dtype: torch.dtype, lora: Lora | None) -> tuple[nn.Module, list[nn.Module]]:
    """Half of each matrix has at least 4096 elements, which 8 bits need."""
    config = LlamaConfig(
        vocab_size=w.VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    if lora is not None:
        add_lora(model, lora, source="", revision=None)
    return w._on_meta(w.SummedLoss(model)), list(model.model.layers)


def engine_for(strategy: Strategy, world: World, optimizer: Optimizer, lora: Lora | None) -> Engine:
    module, blocks = llama(torch.float32, lora)
    return build_engine(strategy, module, blocks, w.make_fill(module), optimizer, world)


def reference(optimizer: Optimizer, lora: Lora | None) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, norms and weights in float64, with torch's AdamW and PEFT's layers."""
    module, _ = llama(torch.float64, lora)
    w.make_fill(module)(module, torch.device("cpu"))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    fast = {n for n, p in trained.items() if optimizer.lora_plus > 1 and (".lora_B." in n or p.ndim == 1)}
    rates = {name: optimizer.learning_rate * (optimizer.lora_plus if name in fast else 1) for name in trained}
    decay = {name: optimizer.weight_decay if p.ndim >= 2 else 0.0 for name, p in trained.items()}
    adamw = torch.optim.AdamW(
        [{"params": [p], "lr": rates[name], "weight_decay": decay[name]} for name, p in trained.items()],
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
    )
    losses, norms = [], []
    for step in STEPS:
        batch = w.rows(step)
        loss = module(batch) / w.targets(batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), optimizer.clip_norm).item())
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name.removeprefix("model."): p.detach() for name, p in trained.items()}


def train(engine: Engine, strategy: Strategy, steps: range, rate: float) -> list[Any]:
    return [
        engine.step(
            w.share(w.rows(step), strategy, engine.world),
            target_tokens=w.targets(w.rows(step)),
            learning_rate=rate,
        )
        for step in steps
    ]


def fine_tuning(folder: Path, world: World, engines: dict[str, Strategy]) -> dict[str, Any]:
    """How far each engine is from float64, and whether what it saves goes on the same."""
    results: dict[str, Any] = {}
    kinds = {"dora": (PLUS, DORA), "8bit": (EIGHT_BIT, None)}
    exact = {kind: reference(*parts) for kind, parts in kinds.items()}
    for name, bare in engines.items():
        for kind, (optimizer, lora) in kinds.items():
            if name not in ENGINES[kind]:
                continue
            strategy = replace(w.fitted(bare, world, 2), precision="fp32", optimizer=optimizer.name)
            engine = engine_for(strategy, world, optimizer, lora)
            steps = train(engine, strategy, STEPS, optimizer.learning_rate)
            losses, norms, weights = exact[kind]
            found = {n: t.clone() for n, t in engine.weights()}
            assert found.keys() == weights.keys()
            far = (
                [(found[n].double() - t).abs().max().item() for n, t in weights.items()]
                if world.rank == 0
                else [0]
            )
            results[f"{name}/{kind}"] = {
                "loss_error": max(abs(s.loss.item() / x - 1) for s, x in zip(steps, losses, strict=True)),
                "norm_error": max(abs(float(s.grad_norm) / x - 1) for s, x in zip(steps, norms, strict=True)),
                "weight_error": max(far),
                "resumed": resumes(engine, strategy, optimizer, lora, folder / f"{name}-{kind}"),
            }
    return results


def resumes(engine: Engine, strategy: Strategy, optimizer: Optimizer, lora: Lora | None, place: Path) -> bool:
    place.mkdir(exist_ok=True)
    dist.barrier()
    engine.save(place)
    train(engine, strategy, range(4, 5), optimizer.learning_rate)
    other = engine_for(strategy, engine.world, optimizer, lora)
    train(other, strategy, range(9, 10), optimizer.learning_rate)  # what is loaded has to replace this
    other.load(place)
    train(other, strategy, range(4, 5), optimizer.learning_rate)
    one, two = dict(engine.weights()), dict(other.weights())
    return all(torch.equal(one[name], two[name]) for name in one)
