"""Passes recorded as CUDA graphs train as usual ones, and are recorded wherever the tracer says so."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from recorded_steps import LENGTH, ROWS, end, engine_of, micro_batches, model_of, recorded_passes, train
from shardwise.engines.runtime.protocol import Engine
from shardwise.engines.runtime.recorded import forget
from shardwise.job.schema import Lora
from shardwise.models.build import BuiltModel
from shardwise.simulate.memory.recorded import own_pool
from shardwise.trace.trace import Tracer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MODELS = (
    "llama-3.2-1b", "gemma-2-2b", "gemma-3-1b", "falcon-7b", "gpt-neo-1.3b", "gpt-j-6b", "pythia-1b",
    "stablelm-3b", "qwen1.5-moe-a2.7b", "olmo-2-1b", "deepseek-v2-lite", "gpt-oss-20b", "mamba-130m",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _collected_between_tests() -> Iterator[None]:
    """A pool that is freed while another one is in use ends the process; a failed test leaves its pool."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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
        ("deepspeed", 0, None),
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
        "zero0",
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
        found.append(_numbers(*made, accumulation=accumulation, record=record, last_differs=stage == 1))
        end(made[0])
        del made
        gc.collect()
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
        end(engine)
        del engine, built
        gc.collect()
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.filterwarnings("ignore:barrier.*device under current context:UserWarning")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("engine", ["single", "fsdp2"])
def test_a_micro_batch_that_replays_a_wider_graph_is_a_usual_one(engine: str) -> None:
    lengths, many = (300, 212, *[20] * 25), tuple(range(2, 27))
    found = []
    for record in (True, False):
        model = model_of("llama-3.2-1b", lora=Lora(rank=8))
        made, built = engine_of(model, checkpointed=False, accumulation=1, record=record, engine=engine)
        wide, narrow = micro_batches(built.config.vocab_size, lengths, (((0, 1), many), ((0, 1), (0, 1))))
        found.append(train(made, *[[one] for one in (wide, wide, narrow, wide, narrow)], rate=2e-5))
        passes = recorded_passes(made)
        assert passes is None or [kind.layout.borders for kind in passes.graphs] == [32]
        end(made)
        del made, built, passes
        gc.collect()
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)


def _numbers(
    engine: Engine, built: BuiltModel, *, accumulation: int, record: bool, last_differs: bool
) -> list[tuple[float, float]]:
    """Losses and norms of steps, and losses of evaluations between them.

    `last_differs`: the last micro-batch of a step has a graph of its own. In every other step it is another.
    """
    batches = micro_batches(built.config.vocab_size)
    several, graphs = accumulation > 1, len(ROWS)
    steps = [batches, batches[::-1]] if several else [[batch] for _ in range(2) for batch in batches]
    if several and last_differs:
        graphs += 2
    numbers = []
    for _ in range(3 if several else 2):
        numbers += train(engine, *steps, rate=2e-5)
        numbers.append((engine.evaluate(batches[1]).item(), 1.0))
    passes = recorded_passes(engine)
    assert (passes is not None) == record
    if passes is not None:
        assert not passes.waiting
        assert [graph is not None for graph in passes.graphs.values()] == [True] * graphs
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
