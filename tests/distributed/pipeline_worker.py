"""What the pipeline tests run inside the processes: packed rows through stages, and one float64 process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import engine_worker as w
import torch
import torch.distributed as dist
from engine_scenarios import STEPS, largest_difference, same, snapshot, worst
from torch import nn

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.runtime.protocol import Engine, StepResult, World
from shardwise.job.schema import Lora
from shardwise.models.adapters import add_lora
from shardwise.models.structure import checkpoint_blocks, find_blocks
from shardwise.objective.causal_lm import CausalLM
from shardwise.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is spread."""

    kind: str = "llama"
    blocks: int = 3  # of different numbers on two stages
    tied: bool = False
    lora: tuple[str, ...] = ()
    schedule: Any = "1f1b"
    pipeline: int = 2
    tensor_parallel: int = 1
    precision: Any = "fp32"
    checkpointing: bool = False

    @property
    def name(self) -> str:
        default = asdict(Case())
        return " ".join(f"{k}={v}" for k, v in asdict(self).items() if v != default[k]) or "plain"


def build(case: Case, dtype: torch.dtype) -> tuple[nn.Module, list[nn.Module]]:
    """The loss module and its blocks, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": w.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": case.blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": case.tied,
    }
    if case.kind == "gpt2":
        shape = {"vocab_size": w.VOCABULARY, "n_embd": 32, "n_layer": case.blocks, "n_head": 4}
        shape |= {"n_positions": w.SEQUENCE, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.kind, **shape)).to(dtype)
    model.config.use_cache = False
    blocks = find_blocks(model)
    if case.lora:
        add_lora(model, Lora(rank=4, alpha=8.0, targets=list(case.lora)), source="", revision=None)
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = p.data.to(dtype)
    return w._on_meta(CausalLM(model)), blocks


def rows(step: int) -> MicroBatch:
    """The global batch of a step: rows of two samples, whose borders differ, with answers of any length."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(w.VOCABULARY, (w.GLOBAL_BATCH, w.SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    positions = torch.arange(w.SEQUENCE).repeat(w.GLOBAL_BATCH, 1)
    for row in range(w.GLOBAL_BATCH):
        labels[row, : int(torch.randint(1, w.SEQUENCE, (), generator=generator))] = IGNORED
        border = int(torch.randint(1, w.SEQUENCE - 1, (), generator=generator))
        positions[row, border:] -= border
        labels[row, border - 1] = IGNORED
    return packed(tokens[:, :-1].contiguous(), labels, positions)


def packed(ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> MicroBatch:
    starts = (positions.flatten() == 0).nonzero().flatten().tolist()
    borders = torch.tensor([*starts, positions.numel()], dtype=torch.int32)
    longest = int(borders.diff().max())
    return MicroBatch(
        input_ids=ids, labels=labels, position_ids=positions, cu_seqlens=borders, max_seqlen=longest
    )


def share(batch: MicroBatch, strategy: Strategy, world: World) -> list[MicroBatch]:
    mine = list(range(world.data_rank, w.GLOBAL_BATCH, world.data_size))
    tensors = (batch.input_ids, batch.labels, batch.position_ids)
    starts = range(0, len(mine), strategy.micro_batch)
    return [packed(*(t[mine[s : s + strategy.micro_batch]] for t in tensors)) for s in starts]


def strategy_of(case: Case, world: World) -> tuple[Strategy, World]:
    each = case.pipeline * case.tensor_parallel
    ranks = world.size // each
    at = world.rank % (world.size // case.pipeline) // case.tensor_parallel
    strategy = Strategy(
        engine="pipeline",
        pipeline=case.pipeline,
        pipeline_schedule=case.schedule,
        tensor_parallel=case.tensor_parallel,
        data_parallel=ranks,
        micro_batch=w.GLOBAL_BATCH // ranks // 4,
        accumulation=4,
        precision=case.precision,
        clip_norm=w.OPTIMIZER.clip_norm,
    )
    return strategy, replace(world, data_rank=at, data_size=ranks)


def engine_for(case: Case, world: World) -> tuple[Engine, Strategy]:
    from shardwise.engines.runtime.protocol import build_engine

    strategy, world = strategy_of(case, world)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision]
    module, blocks = build(case, dtype)
    checkpoint_blocks(blocks, every=int(case.checkpointing))
    return build_engine(strategy, module, blocks, w.make_fill(module), w.OPTIMIZER, world), strategy


def train(engine: Engine, strategy: Strategy, steps: range) -> list[StepResult]:
    results = []
    for step in steps:
        batch = rows(step)
        mine = share(batch, strategy, engine.world)
        rate = w.OPTIMIZER.learning_rate
        results.append(engine.step(mine, target_tokens=w.targets(batch), learning_rate=rate))
    return results


def reference(case: Case, steps: range) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """As `engine_worker.reference`, on packed rows."""
    original, w.rows = w.rows, rows
    try:
        return w.reference(steps, model=lambda dtype: build(case, dtype))
    finally:
        w.rows = original


def parity(case: Case, folder: Path, world: World) -> dict[str, Any]:
    """Errors of losses, norms, weights and an evaluation; whether a resumed run has the same bits."""
    losses, norms, weights = reference(case, STEPS)
    engine, strategy = engine_for(case, world)
    steps = train(engine, strategy, STEPS)
    found = snapshot(engine)
    assert found.keys() == weights.keys()
    total = sum(engine.evaluate(part).double() for part in share(rows(77), strategy, engine.world))
    assert isinstance(total, torch.Tensor)
    by_rows: list[Any] = [None] * world.size
    dist.all_gather_object(by_rows, (engine.world.data_rank, total.item()))
    place = folder / case.name
    place.mkdir(exist_ok=True)
    dist.barrier()
    engine.save(place)
    train(engine, strategy, range(4, 5))
    other, _ = engine_for(case, world)
    train(other, strategy, range(9, 10))  # what is loaded has to replace this
    other.load(place)
    train(other, strategy, range(4, 5))
    return {
        "loss_error": worst([step.loss.item() for step in steps], losses),
        "norm_error": worst([float(step.grad_norm) for step in steps], norms),
        "weight_error": largest_difference(found, weights) if world.rank == 0 else 0.0,
        "skipped": [step.skipped.item() for step in steps],
        "evaluation_error": abs(sum(dict(by_rows).values()) / evaluation(case, weights) - 1),
        "resumed": same(snapshot(engine), snapshot(other)),
        "tied": tied_are_equal(engine, world),
        "blocks": engine.config()["blocks_of_stages"],
    }


@torch.no_grad()
def evaluation(case: Case, weights: dict[str, torch.Tensor]) -> float:
    """Summed loss of a batch in float64, with the reference's weights."""
    module, _ = build(case, torch.float64)
    w.make_fill(module)(module, torch.device("cpu"))
    for name, p in module.named_parameters():
        if name.removeprefix("model.") in weights:
            p.copy_(weights[name.removeprefix("model.")])
    return float(module.eval()(rows(77)))


def tied_are_equal(engine: Any, world: World) -> bool:
    """Whether all ranks that hold a tied weight hold the same bits."""
    mine = [p.detach() for n, p in engine.module.named_parameters() if n in engine._tied]
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, mine)
    held = [one[0] for one in found if one]
    return all(torch.equal(one, held[0]) for one in held)


def after_a_nan(case: Case, folder: Path, world: World) -> dict[str, Any]:
    """The last stage computes NaN once, on one rank: what all ranks report, and keep."""
    engine, strategy = engine_for(case, world)
    train(engine, strategy, range(2))
    before = snapshot(engine)
    with poisoned(engine, world):
        (bad,) = train(engine, strategy, range(2, 3))
    (later,) = train(engine, strategy, range(3, 4))
    mine = (bad.skipped.item(), later.skipped.item(), bool(torch.isfinite(bad.loss + bad.grad_norm)))
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, mine)
    return {"agreed": sorted(set(found)), "untouched": same(before, snapshot(engine))}


@contextmanager
def poisoned(engine: Any, world: World) -> Iterator[None]:
    nan = float("nan") if world.rank == world.size - 1 else 1.0
    handle = engine.module.model.get_output_embeddings().register_forward_hook(lambda _, __, out: out * nan)
    try:
        yield
    finally:
        handle.remove()


def main(place: str, scenario: str, cases: str) -> None:
    """In each of the processes."""
    torch.set_num_threads(1)
    folder, world = Path(place), w.join()
    chosen = [Case(**{**one, "lora": tuple(one["lora"])}) for one in json.loads(cases)]
    results = {case.name: globals()[scenario](case, folder, world) for case in chosen}
    if world.rank == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
