"""Passes recorded as CUDA graphs train as usual ones, and are recorded wherever the tracer says so."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from packed_rows import packed
from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.deepspeed.runtime.engine import DeepSpeedEngine
from shardwise.engines.runtime.base import TorchEngine
from shardwise.engines.runtime.protocol import Engine, World, build_engine
from shardwise.engines.runtime.recorded import RecordedPasses, forget
from shardwise.job.schema import Lora, Model, Optimizer
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.catalog import lookup
from shardwise.models.structure import checkpoint_blocks
from shardwise.objective.causal_lm import CausalLM
from shardwise.simulate.memory.recorded import own_pool
from shardwise.strategy import Strategy
from shardwise.trace.trace import Tracer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = torch.device("cuda")
LENGTH = 512
LENGTHS = (512, 300, 212, 100, 90, 80, 70, 60, 50, 40)
ROWS = (((0,), (1, 2)), ((3, 4, 5, 6, 7, 8), (1, 2)), ((0,), (0,)))
"""Micro-batches of three kinds: one row of a single sample, none, both."""
LAYERS = {
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"n_layer": 2},
    "gpt2": {"n_layer": 2},
}
MODELS = (
    "llama-3.2-1b", "gemma-2-2b", "gemma-3-1b", "falcon-7b", "gpt-neo-1.3b", "gpt-j-6b", "pythia-1b",
    "stablelm-3b", "qwen1.5-moe-a2.7b", "olmo-2-1b", "deepseek-v2-lite", "gpt-oss-20b", "mamba-130m",
)  # fmt: skip


def model_of(name: str, **settings: Any) -> Model:
    shape = lookup(name)
    assert shape is not None
    layers = LAYERS.get(shape.model_type, {"num_hidden_layers": 2})
    return Model(source=name, weights="random", config=layers, **settings)


def micro_batches(vocabulary: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, vocabulary, (length,), generator=generator) for length in LENGTHS]
    pairs = [(ids, torch.cat([ids[1:], torch.tensor([IGNORED])])) for ids in drawn]
    return [packed(pairs, rows=rows, length=LENGTH).to(DEVICE) for rows in ROWS]


def engine_of(
    model: Model,
    *,
    checkpointed: bool,
    accumulation: int = len(ROWS),
    record: bool = True,
    engine: str = "single",
    stage: int = 0,
) -> tuple[Engine, BuiltModel]:
    built = build_model(model, dtype=torch.bfloat16, seed=1, sequence_length=LENGTH)
    if checkpointed:
        checkpoint_blocks(built.blocks, every=1)
    strategy = Strategy(
        engine=engine, stage=stage, precision="bf16", micro_batch=2, accumulation=accumulation
    )
    world = World(rank=0, size=1, local_rank=0, device=DEVICE, data_rank=0, data_size=1)
    module = CausalLM(built.model)
    module.one_shape = record
    return build_engine(strategy, module, built.blocks, built.weights.fill, Optimizer(), world), built


def train(engine: Engine, *steps: list[MicroBatch], rate: float = 1e-4) -> list[tuple[float, float]]:
    torch.manual_seed(5)  # dropout
    found = []
    for batches in steps:
        targets = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
        # with 1e-3 and all weights, one rounding more changes the norm by 0.7 % after 11 steps
        result = engine.step(batches, target_tokens=targets, learning_rate=rate)
        found.append((result.loss.item(), result.grad_norm.item()))
    return found


def recorded_passes(engine: Engine) -> RecordedPasses | None:
    assert isinstance(engine, (TorchEngine, DeepSpeedEngine))
    return engine._recorded


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The group of a single process, for engines that need one; DeepSpeed keeps the first it sees."""
    file = tmp_path_factory.mktemp("group") / "file"
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    forget()
    dist.destroy_process_group()


# ZeRO imports Muon, which torch 2.11 compiles by what it deprecates
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:barrier.*device under current context:UserWarning")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("accumulation", [1, len(ROWS)])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(
    ("engine", "stage", "lora"),
    [
        ("fsdp2", 0, None),
        ("fsdp2", 0, Lora(rank=8)),
        ("deepspeed", 0, Lora(rank=8)),
        ("deepspeed", 1, Lora(rank=8)),
        ("deepspeed", 2, Lora(rank=8)),
        ("deepspeed", 1, None),
        ("deepspeed", 2, None),
        ("deepspeed", 3, None),
        ("deepspeed", 3, Lora(rank=8)),
    ],
    ids=[
        "fsdp2",
        "fsdp2, adapters",
        "zero0, adapters",
        "zero1, adapters",
        "zero2, adapters",
        "zero1",
        "zero2",
        "zero3",
        "zero3, adapters",
    ],
)
def test_sharded_steps_are_usual_steps(
    engine: str, stage: int, lora: Lora | None, checkpointed: bool, accumulation: int
) -> None:
    """An evaluation between steps leaves nothing that a graph does not know of."""
    model, found = model_of("llama-3.2-1b", lora=lora), []
    for record in (True, False):
        how: dict[str, Any] = {"accumulation": accumulation, "record": record, "stage": stage}
        made = engine_of(model, checkpointed=checkpointed, engine=engine, **how)
        alike = stage != 1 or lora is not None or accumulation == 1  # ZeRO-1 reduces in the last pass alone
        found.append(_numbers(*made, accumulation=accumulation, record=record and alike))
        del made
        forget()
        gc.collect()  # a pool that is freed while another one is in use ends the process
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:barrier.*device under current context:UserWarning")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stage", [2, 3])
def test_steps_of_a_mixture_are_usual_steps(stage: int) -> None:
    """Under ZeRO, whose hooks see gradients of stacked experts; whether these are recorded or not.

    Without a learning rate: a token that another expert gets changes the norm of later steps by 0.4 %.
    """
    found = []
    for record in (True, False):
        model = model_of("qwen1.5-moe-a2.7b")
        how: dict[str, Any] = {"accumulation": 1, "record": record, "stage": stage}
        engine, built = engine_of(model, checkpointed=False, engine="deepspeed", **how)
        batches = micro_batches(built.config.vocab_size)
        found.append(train(engine, *[[batch] for _ in range(4) for batch in batches], rate=0.0))
        assert (recorded_passes(engine) is not None) == record
        del engine, built
        forget()
        gc.collect()
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)


def _numbers(
    engine: Engine, built: BuiltModel, *, accumulation: int, record: bool
) -> list[tuple[float, float]]:
    """Losses and norms of steps, and losses of evaluations between them."""
    batches = micro_batches(built.config.vocab_size)
    steps = [batches] * 2 if accumulation > 1 else [[batch] for _ in range(2) for batch in batches]
    numbers = []
    for _ in range(2):
        numbers += train(engine, *steps, rate=2e-5)
        numbers.append((engine.evaluate(batches[1]).item(), 1.0))
    passes = recorded_passes(engine)
    assert (passes is not None) == record
    if passes is not None:
        assert not passes.waiting
        assert [graph is not None for graph in passes.graphs.values()] == [True] * len(ROWS)
    return numbers


@pytest.mark.parametrize("accumulation", [1, len(ROWS)])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(
    ("name", "lora"),
    [("llama-3.2-1b", Lora(rank=8)), ("llama-3.2-1b", Lora(rank=8, dropout=0.1)), ("gpt2-small", None)],
    ids=["adapters", "adapters with dropout", "all weights with dropout"],
)
@pytest.mark.parametrize("attention", ["torch", "flash4"])
def test_recorded_steps_are_usual_steps(
    accumulation: int,
    checkpointed: bool,
    name: str,
    lora: Lora | None,
    attention: str,
    request: pytest.FixtureRequest,
) -> None:
    """Flash attention 4 computes rows of a single sample as others, so that all three kinds are one.

    GPT-2's dropout of attention weights keeps it out.
    """
    kinds = 1 if attention == "flash4" and lora else len(ROWS)
    if attention == "flash4":
        request.getfixturevalue("flash_attention_4")
    model = model_of(name, lora=lora)
    how: dict[str, Any] = {"checkpointed": checkpointed, "accumulation": accumulation}
    engine, built = engine_of(model, **how)
    batches = micro_batches(built.config.vocab_size)
    # of the kinds in turn, so that a graph's memory is used by those of others before it is replayed
    steps = [batches] * 5 if accumulation > 1 else [[batch] for _ in range(5) for batch in batches]
    recorded = train(engine, *steps)
    passes = recorded_passes(engine)
    assert passes is not None
    assert not passes.waiting
    assert [graph is not None for graph in passes.graphs.values()] == [True] * kinds

    held_out = engine.evaluate(batches[0])
    usual, _ = engine_of(model, record=False, **how)
    assert recorded_passes(usual) is None
    for ours, theirs in zip(recorded, train(usual, *steps), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)
    assert held_out.item() == pytest.approx(usual.evaluate(batches[0]).item(), rel=2e-3)


@pytest.mark.parametrize("lora", [Lora(rank=8), None], ids=["adapters", "all weights"])
@pytest.mark.parametrize("name", MODELS)
def test_what_the_tracer_says_is_recorded(name: str, lora: Lora | None) -> None:
    model = model_of(name, lora=lora)
    tracer = Tracer(model, precision="bf16", sequence_length=LENGTH)
    trace = tracer.trace(rows=2, checkpoint_every=0, single_segment_rows=1)
    assert own_pool(trace)
    engine, built = engine_of(model, checkpointed=False)
    losses = train(engine, *[micro_batches(built.config.vocab_size)] * 3)
    passes = recorded_passes(engine)
    assert passes is not None
    assert bool(passes.waiting) == trace.host_waits, passes.waiting
    assert all(loss > 0 and norm > 0 for loss, norm in losses)
