"""Shared parts of the engine tests: a tiny Llama, its batches, and processes that run a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import run_set
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.runtime.protocol import Engine, StepResult, World, build_engine
from shardwise.job.schema import Optimizer
from shardwise.strategy import Strategy

GLOBAL_BATCH = 8
SEQUENCE = 16
VOCABULARY = 64
OPTIMIZER = Optimizer(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)


class SummedLoss(nn.Module):
    """Summed cross entropy of a causal language model, as an fp32 (or wider) scalar."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logits = self.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )


def llama(dtype: torch.dtype, *, tied: bool = False, lora: bool = False) -> tuple[nn.Module, list[nn.Module]]:
    """The loss module and its blocks, parameters on the meta device."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        mlp_bias=True,
    )
    model: nn.Module = LlamaForCausalLM(config).to(dtype)
    blocks = list(model.model.layers)
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", bias="none")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return _on_meta(SummedLoss(model)), blocks


def mamba(dtype: torch.dtype, *, lora: bool = False, few: bool = False) -> tuple[nn.Module, list[nn.Module]]:
    """A tiny Mamba as it is trained: A_log, D and dt's bias in fp32 beside bf16.

    `few`: they and one norm are all that is trained, so that they are half of the gradient's norm.
    """
    from transformers import MambaConfig, MambaForCausalLM

    from shardwise.job.schema import Lora
    from shardwise.models.adapters import add_lora
    from shardwise.models.mamba import prepare
    from shardwise.objective.causal_lm import CausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = MambaForCausalLM(config).to(dtype)
    prepare(model)
    if lora:
        add_lora(model, Lora(rank=4, alpha=8.0), source="", revision=None)
    for name, p in model.named_parameters():
        if few and not name.endswith(("A_log", ".D", "dt_proj.bias", "layers.0.norm.weight")):
            p.requires_grad_(False)
    return _on_meta(CausalLM(model)), list(model.backbone.layers)


def decoder(dtype: torch.dtype, *, kind: str, **changes: Any) -> tuple[nn.Module, list[nn.Module]]:
    """A tiny model of a family, with the loss that is trained with: kernels of our own, packed rows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardwise.objective.causal_lm import CausalLM

    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        **changes,
    }
    if kind == "gpt_neox":
        del values["num_key_value_heads"], values["head_dim"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).to(dtype)
    return _on_meta(CausalLM(model)), list(model.base_model.layers)


def _on_meta(module: nn.Module) -> nn.Module:
    _replace(
        module,
        {
            p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in module.parameters()
            if not p.is_meta
        },
    )
    return module


def _replace(root: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    """Parameters by others with the same attributes, tied ones everywhere."""
    for old, parameter in new.items():
        parameter.__dict__.update(old.__dict__)
    for owner in root.modules():
        for name, p in owner._parameters.items():
            if p in new:
                owner._parameters[name] = new[p]


def make_fill(module: nn.Module) -> Callable[[nn.Module, torch.device], None]:
    """Fills parameters with values that depend on their names only, rounded to bf16."""
    names = dict(module.named_parameters())

    def fill(part: nn.Module, device: torch.device) -> None:
        inside = {id(p) for p in part.parameters() if p.is_meta}
        _replace(
            module,
            {
                p: nn.Parameter(value(name, p.shape).to(device, p.dtype), requires_grad=p.requires_grad)
                for name, p in names.items()
                if id(p) in inside
            },
        )

    return fill


def value(name: str, shape: torch.Size) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return (0.2 * torch.randn(shape, generator=generator)).bfloat16().float()


def rows(step: int) -> MicroBatch:
    """The global batch of a step: rows with answers of different lengths."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(GLOBAL_BATCH):
        labels[row, : int(torch.randint(1, SEQUENCE, (), generator=generator))] = IGNORED
    return micro_batch(tokens[:, :-1].contiguous(), labels)


def micro_batch(input_ids: torch.Tensor, labels: torch.Tensor) -> MicroBatch:
    count, length = input_ids.shape
    return MicroBatch(
        input_ids=input_ids,
        labels=labels,
        position_ids=torch.arange(length).expand(count, length).contiguous(),
        cu_seqlens=torch.arange(0, (count + 1) * length, length, dtype=torch.int32),
        max_seqlen=length,
    )


def share(batch: MicroBatch, strategy: Strategy, world: World) -> list[MicroBatch]:
    """This rank's micro-batches of the global batch."""
    mine = range(world.data_rank, GLOBAL_BATCH, world.data_size)
    starts = range(0, len(mine), strategy.micro_batch)
    return [
        micro_batch(batch.input_ids[chosen], batch.labels[chosen])
        for chosen in (list(mine)[start : start + strategy.micro_batch] for start in starts)
    ]


def targets(batch: MicroBatch) -> int:
    return int((batch.labels != IGNORED).sum())


def in_pairs(world: World) -> World:
    """The same process where two ranks after each other see the same rows."""
    return replace(world, data_rank=world.rank // 2, data_size=world.size // 2)


def world_here() -> World:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return World(
        rank=rank, size=size, local_rank=rank, device=torch.device("cpu"), data_rank=rank, data_size=size
    )


def fitted(strategy: Strategy, world: World, accumulation: int = 1) -> Strategy:
    micro = GLOBAL_BATCH // world.data_size // accumulation
    return replace(
        strategy,
        data_parallel=world.data_size,
        micro_batch=micro,
        accumulation=accumulation,
        clip_norm=OPTIMIZER.clip_norm,
    )


def engine_for(strategy: Strategy, world: World, *, model: Any = llama, **options: bool) -> Engine:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[strategy.precision]
    module, blocks = model(dtype, **options)
    return build_engine(strategy, module, blocks, make_fill(module), OPTIMIZER, world)


def train(engine: Engine, strategy: Strategy, steps: range) -> list[StepResult]:
    results = []
    for step in steps:
        batch = rows(step)
        results.append(
            engine.step(
                share(batch, strategy, engine.world),
                target_tokens=targets(batch),
                learning_rate=OPTIMIZER.learning_rate,
            )
        )
    return results


def reference(
    steps: range, *, model: Any = llama, **options: bool
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights in float64: one process, one batch, plain torch."""
    module, _ = model(torch.float64, **options)
    make_fill(module)(module, torch.device("cpu"))
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    decaying = {name for name, p in parameters.items() if p.ndim >= 2 and not name.endswith("A_log")}
    groups = [
        {"params": [parameters[name] for name in decaying], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for name, p in parameters.items() if name not in decaying], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
    )
    losses, norms = [], []
    for step in steps:
        batch = rows(step)
        loss = module(batch) / targets(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER.clip_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    weights = {name.removeprefix("model."): p.detach() for name, p in parameters.items()}
    return losses, norms, weights


def run_in_processes(name: str, *, processes: int, folder: Path, timeout: float = 300.0) -> Any:
    """Calls `SCENARIOS[name](folder)` in that many gloo processes; returns what rank 0 returned (as JSON)."""
    run_set("engine_scenarios:main", name, str(folder), processes=processes, folder=folder, timeout=timeout)
    return json.loads((folder / "result.json").read_text())


def join() -> World:
    world = world_here()
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size, timeout=timedelta(seconds=120))
    return world
