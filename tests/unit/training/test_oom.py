"""What can be told of a step that ran out of memory: numbers from the message, the place from the trace."""

from __future__ import annotations

import importlib
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.data.batch import IGNORED, MicroBatch, StepBatch
from shardwise.engines.runtime.protocol import World
from shardwise.engines.single.runtime import SingleEngine
from shardwise.errors import MachineError
from shardwise.job.schema import Job
from shardwise.models.structure import checkpoint_blocks
from shardwise.record.schema import OutOfMemory
from shardwise.strategy import Strategy
from shardwise.training.loop import Loop
from shardwise.training.oom import (
    IN_WORDS,
    PHASES,
    FailureLocation,
    Place,
    counters,
    headline,
    memory_in_words,
    numbers_in,
    out_of_memory_in,
    release_frames,
)
from shardwise.training.process import Ranks, StopSignal
from shardwise.training.saving import Progress, Saver

GIB, MIB = 2**30, 2**20
LEDGER = Path(__file__).parents[3] / "benchmarks" / "accuracy" / "results" / "measured.jsonl"
WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), data_rank=0, data_size=1)


def test_the_numbers_of_real_messages() -> None:
    """Of torch 2.11 on H200, as the ledger's rows that did not fit have kept them."""
    errors = [json.loads(line)["error"] for line in LEDGER.read_text().splitlines()]
    messages = [error for error in errors if error and "Tried to allocate" in error]
    assert len(messages) >= 5
    for message in messages:
        found = numbers_in(message)
        assert found.keys() == {"asked_bytes", "process_bytes", "allocated_bytes"}
        assert 0 < found["allocated_bytes"] < found["process_bytes"] < round(139.80 * GIB)
    first = numbers_in(next(message for message in messages if "954.00 MiB" in message))
    assert first["asked_bytes"] == 954 * MIB


def test_the_other_numbers_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    known = {"reserved_bytes": 70 * GIB, "free_bytes": GIB, "total_bytes": 80 * GIB}
    assert counters(device) == known
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.25)
    assert counters(device) == {**known, "allowed_bytes": 20 * GIB}, "--memory-cap"
    assert counters(torch.device("cpu")) == {}


def test_a_message_without_numbers_has_none() -> None:
    assert numbers_in("CUDA error: out of memory") == {}
    assert numbers_in("Tried to allocate 512 bytes.") == {"asked_bytes": 512}


def test_it_is_found_where_it_is_the_cause_of_another_error() -> None:
    inner = torch.OutOfMemoryError("x")
    outer = MachineError("a checkpoint could not be written")
    outer.__cause__ = inner
    assert out_of_memory_in(inner) is inner
    assert out_of_memory_in(outer) is inner
    assert out_of_memory_in(RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"))
    assert out_of_memory_in(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert out_of_memory_in(RuntimeError("out of range")) is None
    assert out_of_memory_in(MachineError("x")) is None


def evidence(**known: Any) -> OutOfMemory:
    unknown = dict.fromkeys(OutOfMemory.__dataclass_fields__)
    return OutOfMemory(
        **{**unknown, "rank": 1, "ranks": (1,), "phase": "backward", "message": "said", **known}
    )


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (
            {"step": 3, "module": "model.layers.1"},
            "the backward pass of step 3, in model.layers.1, on rank 1",
        ),
        ({"phase": "evaluation", "step": 0, "ranks": (1, 0)}, "the evaluation after step 0, on ranks 1, 0"),
        ({"phase": "building"}, "building the engine, on rank 1"),
    ],
)
def test_the_headline_names_phase_step_module_and_ranks(known: dict[str, Any], said: str) -> None:
    assert headline(evidence(**known)) == f"out of GPU memory in {said}"


def test_every_known_number_is_told() -> None:
    whole = evidence(
        asked_bytes=2 * GIB,
        allocated_bytes=70 * GIB,
        reserved_bytes=70 * GIB + 30 * MIB,
        free_bytes=GIB,
        total_bytes=80 * GIB,
        allowed_bytes=72 * GIB,
    )
    assert memory_in_words(whole) == (
        "2.0 GiB were asked for, 70.0 GiB are in tensors, 30 MiB reserved in fragments, "
        "1.0 GiB of the GPU's 80.0 GiB are free, --memory-cap leaves torch 72.0 GiB"
    )
    assert memory_in_words(evidence()) == "said"


def test_phases_are_functions_that_exist_and_have_words() -> None:
    for (module, function), phase in PHASES.items():
        loaded = importlib.import_module(module)
        owners = [loaded, *(value for value in vars(loaded).values() if isinstance(value, type))]
        assert any(hasattr(owner, function) for owner in owners), (module, function)
        assert phase in IN_WORDS


class Full(torch.autograd.Function):
    """Identity; its backward pass does what it is told."""

    act: Callable[[], None] = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Full.act()
        return gradient


class Mlp(nn.Module):
    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.act = act

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.act()
        return torch.tanh(self.up(hidden))


class Block(nn.Module):
    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.mlp = Mlp(act)
        self.backs = False

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor]:
        hidden = self.mlp(hidden) + hidden
        return (Full.apply(hidden) if self.backs else hidden,)


class Model(nn.Module):
    """Four blocks; the third may run out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.fails_at: int | None = None
        self.layers = nn.ModuleList(Block(self.act if number == 2 else lambda: None) for number in range(4))

    def act(self) -> None:
        self.forwards += 1
        if self.forwards == self.fails_at:
            raise torch.OutOfMemoryError("full")

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        hidden = batch.input_ids.float()
        for layer in self.layers:
            (hidden,) = layer(hidden)
        return hidden.square().sum()


ROW = torch.ones(1, 4, dtype=torch.int64)
BATCH = MicroBatch(
    input_ids=ROW,
    labels=torch.full((1, 4), IGNORED),
    position_ids=ROW,
    cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
    max_seqlen=4,
)


class Evaluation:
    target_tokens = 3

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter([BATCH])


def where(change: Callable[[Model, Loop], None], *, checkpoint_every: int = 0, steps: int = 3) -> Place:
    """Where `change` lets a run of the loop fail."""
    model = Model()
    blocks = list(model.layers)
    location = FailureLocation(model, blocks)
    checkpoint_blocks(blocks, every=checkpoint_every)
    job = Job.model_validate(
        {
            "name": "t",
            "model": {"source": "x"},
            "data": {"train": "x"},
            "train": {"steps": steps, "eval_every": 0, "save_every": 2, "worst_case_first": False},
        }
    )
    strategy = Strategy(engine="single", precision="fp32", checkpoint_every=checkpoint_every)
    engine = SingleEngine(strategy, model, blocks, lambda *_: None, job.optimizer, WORLD)

    def stream() -> Iterator[StepBatch]:
        while True:
            yield StepBatch(micro_batches=[BATCH, BATCH], target_tokens=3, tokens=4, epoch=0)

    class Silent:
        def on_step(self, report: Any) -> None: ...
        def on_eval(self, **_: Any) -> None: ...
        def on_save(self, saved: Any) -> None: ...

    loop = Loop(
        job=job,
        engine=engine,
        stream=stream(),  # type: ignore[arg-type]
        evaluation=Evaluation(),  # type: ignore[arg-type]
        ranks=Ranks(WORLD),
        stop=StopSignal(),
        observer=Silent(),
        saver=Saver(lambda progress: 0),
        progress=Progress(),
        total_steps=steps,
    )
    change(model, loop)
    with pytest.raises(torch.OutOfMemoryError) as error:
        loop.run(steps)
    found = location.find(error.value.__traceback__, error.value.__traceback__)
    assert found.loop is loop
    return found


def fail(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("full")


def told(place: Place) -> tuple[str, int | None, str | None]:
    return place.phase, place.step, place.module


def test_a_forward_pass_names_the_innermost_module() -> None:
    """The evaluation before step 1 is the first call; a step has two micro-batches."""

    def change(model: Model, loop: Loop) -> None:
        model.fails_at = 1 + 2 + 2

    place = where(change)
    assert told(place) == ("forward", 2, "layers.2.mlp")
    assert place.call.startswith("test_oom.py:")
    assert place.call.endswith(" in act")


def test_a_backward_pass_names_the_block() -> None:
    def change(model: Model, loop: Loop) -> None:
        model.layers[1].backs = True
        Full.act = fail

    assert told(where(change)) == ("backward", 1, "layers.1")


def test_what_a_backward_pass_computes_again_names_the_module() -> None:
    """The second call in step 1 is block 2's recomputation."""

    def change(model: Model, loop: Loop) -> None:
        model.fails_at = 1 + 2

    assert told(where(change, checkpoint_every=1)) == ("backward", 1, "layers.2.mlp")


def test_behind_the_last_block_no_block_is_named() -> None:
    def change(model: Model, loop: Loop) -> None:
        model.register_forward_hook(lambda _, __, output: Full.apply(output))
        Full.act = fail

    assert told(where(change)) == ("backward", 1, None)


def test_the_optimizer_step() -> None:
    def change(model: Model, loop: Loop) -> None:
        ((_, moments, _),) = loop.engine._optimizer._stages  # type: ignore[attr-defined]
        moments.step = fail

    assert told(where(change)) == ("optimizer", 1, None)


def test_evaluating_and_saving_come_after_a_step() -> None:
    def evaluating(model: Model, loop: Loop) -> None:
        model.fails_at = 1

    def saving(model: Model, loop: Loop) -> None:
        loop.saver = Saver(fail)

    assert told(where(evaluating)) == ("evaluation", 0, "layers.2.mlp")
    assert told(where(saving)) == ("saving", 2, None)


def test_copying_a_batch() -> None:
    class Large:
        to = fail

    def change(model: Model, loop: Loop) -> None:
        loop.stream = iter([StepBatch(micro_batches=[Large()], target_tokens=1, tokens=1, epoch=0)])  # type: ignore[assignment, list-item]

    assert told(where(change)) == ("batch", 1, None)


def test_the_frames_of_the_cause_are_looked_at_too() -> None:
    """A store that could not write raises another error from this one, outside of the failed call."""

    def save(progress: Progress) -> int:
        try:
            fail()
        except torch.OutOfMemoryError as error:
            raise MachineError("could not be written") from error
        return 0

    model = Model()
    location = FailureLocation(model, list(model.layers))
    with pytest.raises(MachineError) as error:
        save(Progress())
    cause = out_of_memory_in(error.value)
    assert cause is not None
    assert location.find(error.value.__traceback__, cause.__traceback__).call.endswith(" in fail")


def test_nothing_of_the_failed_call_is_kept() -> None:
    """With hooks, torch's modules call a function that closes over the arguments."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class Last(nn.Module):
        def forward(self, hidden: torch.Tensor) -> None:
            alive.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError("CUDA out of memory")

    @contextmanager
    def explained() -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            release_frames(error)
            assert alive[0]() is None

    model = nn.Sequential(nn.Linear(4, 4), Last())
    for module in model:
        module.register_forward_hook(lambda *_: None)
    with explained():
        model(torch.ones(2, 4))
    assert len(alive) == 1
