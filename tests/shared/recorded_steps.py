"""Engines of a few layers with random weights, and their steps, recorded as CUDA graphs or usual."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from packed_rows import packed
from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.deepspeed.runtime.engine import DeepSpeedEngine
from shardwise.engines.runtime.base import TorchEngine
from shardwise.engines.runtime.protocol import Engine, World, build_engine
from shardwise.engines.runtime.recorded import RecordedPasses, forget
from shardwise.job.schema import Model, Optimizer
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.catalog import lookup
from shardwise.models.structure import checkpoint_blocks
from shardwise.objective.causal_lm import CausalLM
from shardwise.strategy import Strategy

_TO_RELEASE = "_PartitionedParameterCoordinator__params_to_release"
LENGTH = 512
LENGTHS = (512, 300, 212, 100, 90, 80, 70, 60, 50, 40)
ROWS = (((0,), (1, 2)), ((3, 4, 5, 6, 7, 8), (1, 2)), ((0,), (0,)))
"""Micro-batches of three kinds: one row of a single sample, none, both."""
LAYERS = {
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"n_layer": 2},
    "gpt2": {"n_layer": 2},
    "falcon": {"num_hidden_layers": 6},
    "olmoe": {"num_hidden_layers": 6},
}


def model_of(name: str, **settings: Any) -> Model:
    shape = lookup(name)
    assert shape is not None
    layers = LAYERS.get(shape.model_type, {"num_hidden_layers": 2})
    return Model(source=name, weights="random", config=layers, **settings)


def micro_batches(
    vocabulary: int, lengths: Sequence[int] = LENGTHS, rows: Sequence[tuple[tuple[int, ...], ...]] = ROWS
) -> list[MicroBatch]:
    """One of each entry of `rows`, whose numbers are those of samples of these lengths."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]
    pairs = [(ids, torch.cat([ids[1:], torch.tensor([IGNORED])])) for ids in drawn]
    return [packed(pairs, rows=one, length=LENGTH).to(torch.device("cuda")) for one in rows]


def engine_of(
    model: Model,
    *,
    checkpointed: bool,
    accumulation: int = len(ROWS),
    record: bool = True,
    rank: int = 0,
    ranks: int = 1,
    engine: str = "single",
    **options: Any,
) -> tuple[Engine, BuiltModel]:
    built = build_model(model, dtype=torch.bfloat16, seed=1, sequence_length=LENGTH)
    if checkpointed:
        checkpoint_blocks(built.blocks, every=1)
    options |= {"precision": "bf16", "micro_batch": 2, "accumulation": accumulation, "data_parallel": ranks}
    strategy = Strategy(engine=engine, **options)
    device = torch.device("cuda", rank)
    world = World(rank=rank, size=ranks, local_rank=rank, device=device, data_rank=rank, data_size=ranks)
    module = CausalLM(built.model)
    module.one_shape = record
    return build_engine(strategy, module, built.blocks, built.weights.fill, Optimizer(), world), built


def train(engine: Engine, *steps: list[MicroBatch], rate: float = 1e-4) -> list[tuple[float, float]]:
    torch.manual_seed(5)  # dropout
    found = []
    for batches in steps:
        targets = sum(int((batch.labels != IGNORED).sum()) for batch in batches) * engine.world.data_size
        # with 1e-3 and all weights, one rounding more changes the norm by 0.7 % after 11 steps
        result = engine.step(batches, target_tokens=targets, learning_rate=rate)
        found.append((result.loss.item(), result.grad_norm.item()))
    return found


def recorded_passes(engine: Engine) -> RecordedPasses | None:
    assert isinstance(engine, (TorchEngine, DeepSpeedEngine))
    return engine._recorded


def end(engine: Engine) -> None:
    """To be called before `gc.collect`: a pool that is freed while another one is in use ends the process."""
    forget()
    if isinstance(engine, DeepSpeedEngine):  # hooks of weights keep it alive
        engine._engine.destroy()
        # ZeRO-3 leaves each model in a list and in a cache with `self` among its keys; the next engine needs
        # the memory
        parameter_offload.FWD_MODULE_STACK.clear()
        release = getattr(PartitionedParameterCoordinator, _TO_RELEASE)
        inspect.getclosurevars(release).nonlocals["func"].cache_clear()


def rank_of_two(rank: int, name: str, strategy: dict[str, Any], folder: str) -> None:
    """Save the numbers of recorded and of usual steps, each followed by an evaluation, as `found`."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    found = [_with_evaluations(rank, name, strategy, record=record) for record in (True, False)]
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.barrier()
    dist.destroy_process_group()


def _with_evaluations(
    rank: int, name: str, strategy: dict[str, Any], *, record: bool
) -> list[tuple[float, float]]:
    """Losses and norms of steps, and the loss of an evaluation after each."""
    how: dict[str, Any] = {"checkpointed": False, "accumulation": 1, "record": record}
    engine, built = engine_of(model_of(name), **how, rank=rank, ranks=2, **strategy)
    batch = micro_batches(built.config.vocab_size)[1]
    numbers = []
    for _ in range(5):
        numbers += train(engine, [batch], rate=2e-5)
        numbers.append((engine.evaluate(batch).item(), 1.0))
    passes = recorded_passes(engine)
    assert (passes is not None) == record
    if passes is not None:
        assert [graph is not None for graph in passes.graphs.values()] == [True], passes.waiting
    end(engine)
    del engine, built, passes
    gc.collect()
    return numbers
