"""What the table of pairs and its tests run in the processes: save under one strategy, load under another.

A layout is a strategy and a number of processes, `zero2@4`. Each is saved once, and loaded by every other.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_worker as w
import quantized_worker as q
import torch
import torch.distributed as dist
from torch import nn

from shardwise.engines.runtime.protocol import Engine, World, build_engine
from shardwise.engines.runtime.state import GUARD, KINDS, Part, SavedState, check_pickles
from shardwise.job.schema import Lora
from shardwise.models.adapters import add_lora
from shardwise.models.structure import find_blocks
from shardwise.objective.causal_lm import CausalLM
from shardwise.strategy import Strategy

LAYOUTS = {
    "single": Strategy(engine="single"),
    "ddp": Strategy(engine="ddp"),
    "ddp-zero1": Strategy(engine="ddp-zero1"),
    "fsdp2": Strategy(engine="fsdp2"),
    "fsdp2-offload": Strategy(engine="fsdp2", offload_optimizer="cpu", offload_parameters="cpu"),
    "fsdp2-hsdp2": Strategy(engine="fsdp2", shard_group=2),
    "zero0": Strategy(engine="deepspeed", stage=0),
    "zero1": Strategy(engine="deepspeed", stage=1),
    "zero2": Strategy(engine="deepspeed", stage=2),
    "zero2-offload": Strategy(engine="deepspeed", stage=2, offload_optimizer="cpu"),
    "zero3": Strategy(engine="deepspeed", stage=3),
    "zero3-offload": Strategy(engine="deepspeed", stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
    "zero3-hpz2": Strategy(engine="deepspeed", stage=3, shard_group=2),
    "autotp2-zero1": Strategy(engine="deepspeed", stage=1, tensor_parallel=2),
    "autotp2-zero2": Strategy(engine="deepspeed", stage=2, tensor_parallel=2),
    "pp2-zero1": Strategy(engine="pipeline", pipeline=2),
    "pp2-tp2-zero1": Strategy(engine="pipeline", pipeline=2, tensor_parallel=2),
}
PRECISIONS = {"mamba": "bf16", "fp16": "fp16"}
SAVED_AFTER = 3  # In the middle of an epoch: rows are a function of the step
RATE = 1e-3


def build(kind: str, dtype: torch.dtype, folder: Path) -> tuple[nn.Module, list[nn.Module], Any]:
    """The loss module on the meta device, its blocks, and what fills it. No size divides by four but one."""
    if kind == "nf4":
        built = q.build(folder, "nf4", {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype])
        return CausalLM(built.model), built.blocks, built.weights.fill
    if kind == "mamba":
        module, blocks = w.mamba(dtype)
        return module, blocks, w.make_fill(module)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67,
        hidden_size=40,
        intermediate_size=54,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=kind == "tied",
    )
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config).to(dtype)
    blocks = find_blocks(model)
    if kind == "lora":
        add_lora(model, Lora(rank=4, alpha=8.0), source="", revision=None)
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = p.data.to(dtype)
    module = w._on_meta(CausalLM(model))
    return module, blocks, w.make_fill(module)


def engine_for(name: str, kind: str, folder: Path, world: World) -> tuple[Engine, Strategy]:
    bare = replace(LAYOUTS[name], precision=PRECISIONS.get(kind, "fp32"))
    stages, parts = bare.pipeline, bare.tensor_parallel
    rank, size = world.rank % (world.size // stages) // parts, world.size // stages // parts
    world = replace(world, data_rank=rank, data_size=size)
    strategy = w.fitted(bare, world, 2 if stages == 1 else 4 // size)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[strategy.precision]
    module, blocks, fill = build(kind, dtype, folder)
    return build_engine(strategy, module, blocks, fill, w.OPTIMIZER, world), strategy


def losses(engine: Engine, strategy: Strategy, steps: range) -> list[float]:
    found = []
    for step in steps:
        batch = w.rows(step)
        mine = w.share(batch, strategy, engine.world)
        result = engine.step(mine, target_tokens=w.targets(batch), learning_rate=RATE)
        found.append(result.loss.item())
    return found


def place(folder: Path, name: str, world: World) -> Path:
    return folder / f"{name}@{world.size}"


def save(folder: Path, world: World, kind: str, names: list[str], steps: range) -> dict[str, Any]:
    """Save each layout after three steps; the losses of the steps that follow, had it not stopped."""
    results = {}
    for name in names:
        engine, strategy = engine_for(name, kind, folder, world)
        losses(engine, strategy, range(SAVED_AFTER))
        saved = _save(engine, place(folder, name, world))
        results[saved.name] = losses(engine, strategy, steps)
    return results


def _save(engine: Engine, saved: Path) -> Path:
    saved.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    engine.save(saved)
    dist.barrier()
    return saved


def load(
    folder: Path, world: World, kind: str, names: list[str], steps: range, sources: list[str]
) -> dict[str, Any]:
    """For each layout and each that was saved: the state that differs after loading, and the losses then."""
    results: dict[str, Any] = {}
    for name in names:
        engine, strategy = engine_for(name, kind, folder, world)
        losses(engine, strategy, range(90, 91))  # what is loaded has to replace this
        for source in sources:
            engine.load(folder / source)
            again = _save(engine, folder / f"again-{source}-{name}@{world.size}")
            differs = differing(folder / source, again) if world.rank == 0 else []
            found = losses(engine, strategy, steps)
            results[f"{source} -> {name}@{world.size}"] = {"differs": differs, "losses": found}
            for file in again.iterdir() if world.rank == 0 else ():
                file.unlink()
    return results


def pickled(folder: Path, world: World, kind: str, names: list[str], steps: range) -> dict[str, Any]:
    """DeepSpeed's own files, as before this format: whether they pass the check, and load to the bit."""
    results: dict[str, Any] = {}
    for name in names:
        engine, strategy = engine_for(name, kind, folder, world)
        named, engine._named = engine._named, None  # type: ignore[attr-defined]
        losses(engine, strategy, range(SAVED_AFTER))
        saved = _save(engine, folder / f"own-{name}")
        check_pickles(saved)
        engine._named = named  # type: ignore[attr-defined]
        before = _save(engine, folder / f"before-{name}")
        losses(engine, strategy, steps)
        engine.load(saved)
        results[name] = differing(before, _save(engine, folder / f"after-{name}"))
    return results


def differing(one: Path, other: Path) -> list[str]:
    """Names of fp32 weights, moments and step counts that are not equal to the bit."""
    old, new = SavedState(one), SavedState(other)
    wrong = sorted(old.shapes.keys() ^ new.shapes.keys())
    for name in old.shapes.keys() & new.shapes.keys():
        for kind in KINDS:
            mine, theirs = (torch.empty(old.shapes[name]) for _ in range(2))
            old.copy(f"{kind}/{name}", Part(old.shapes[name]), mine)
            new.copy(f"{kind}/{name}", Part(old.shapes[name]), theirs)
            wrong += [] if mine.equal(theirs) else [f"{kind}/{name}"]
        step = f"step/{name}"
        wrong += [] if old.number(step).equal(new.number(step)) else [step]
    return wrong + [key for key in GUARD if not old.number(key).equal(new.number(key))]


def main(path: str, what: str) -> None:
    """In each of the processes; `what`: JSON of the phase, the kind of model, the layouts and the steps."""
    torch.set_num_threads(1)
    folder, world, asked = Path(path), w.join(), json.loads(what)
    steps = range(SAVED_AFTER, SAVED_AFTER + asked.pop("count"))
    result = globals()[asked.pop("phase")](folder, world, steps=steps, **asked)
    if world.rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
