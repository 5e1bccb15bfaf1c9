"""What test_patches.py runs inside a process: DeepSpeed's real optimizers with what is replaced in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engine_worker as w
import torch
import torch.distributed as dist
from engine_scenarios import DEEPSPEED, poisoned, same, snapshot

from shardwise.data.batch import MicroBatch
from shardwise.engines.deepspeed import config
from shardwise.engines.deepspeed.policy import sends_once
from shardwise.engines.deepspeed.runtime import engine, recorded
from shardwise.engines.deepspeed.runtime.gradients import Gradients
from shardwise.engines.deepspeed.runtime.zero3 import (
    _STORAGE,
    NO_LIMIT,
    release_gathered,
    release_in_order,
)
from shardwise.engines.runtime.protocol import Engine, World
from shardwise.strategy import Strategy


class Streams:
    """In the place of CUDA's streams and events: notes what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def current_stream(self) -> None: ...

    def Event(self) -> Streams:  # noqa: N802 - torch's name
        return self

    def record(self) -> None:
        self.log.append("record")

    def wait_event(self, _: Any) -> None:
        self.log.append("wait_event")

    def wait_stream(self, _: Any) -> None:
        self.log.append("wait_stream")


def leave(world: World, place: str, name: str, found: dict[str, Any]) -> None:
    """Write what the first rank found, and leave the group."""
    if world.rank == 0:
        (Path(place) / f"{name}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def joint_norms(world: World) -> dict[str, Any]:
    """How often each optimizer asked for the replaced norm, and whether it searched for NaN besides."""
    found = {}
    for name in ("zero1", "zero2", "zero3", "zero2-offload"):
        strategy = replace(w.fitted(DEEPSPEED[name], world), precision="bf16")
        engine = w.engine_for(strategy, world)
        optimizer = engine._optimizer
        if name == "zero2-offload":
            with patch.object(type(optimizer), "_has_inf_or_nan") as search:
                w.train(engine, strategy, range(2))
            found[name] = {"searched": search.call_count}
            continue
        calls: list[str] = []
        norm, search = optimizer.get_grad_norm_direct, optimizer.has_overflow
        optimizer.get_grad_norm_direct = lambda *args, c=calls, f=norm: (c.append("norm"), f(*args))[1]
        optimizer.has_overflow = lambda *args, c=calls, f=search: (c.append("search"), f(*args))[1]
        w.train(engine, strategy, range(2))
        found[name] = {
            "asked": sorted(set(calls)),
            "replaced": norm.__module__.startswith("shardwise."),
        }
    return found


def in_order(one: Engine) -> list[str]:
    streams = Streams()
    optimizer, root = one._optimizer, one._engine.module
    optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream = streams
    release_in_order(optimizer, root.parameters(), streams)
    return streams.log


def releases(world: World) -> dict[str, Any]:
    """Three engines of one process: as DeepSpeed releases, and two that release in order."""
    strategy = replace(w.fitted(DEEPSPEED["zero3"], world), precision="fp32")
    plain, first, second = (w.engine_for(strategy, world) for _ in range(3))
    logs = [in_order(first), in_order(second)]
    counts = []
    for one in (plain, first, second):
        w.train(one, strategy, range(3))
        counts.append([len(log) for log in logs])
    kept = [sum(p.data.numel() for p in e._engine.module.parameters()) for e in (plain, first, second)]
    coordinator = first._optimizer.parameter_offload.get_param_coordinator()
    limit = coordinator._PartitionedParameterCoordinator__max_ongoing_fetch_events
    results = {
        "counts": counts,
        "kinds": sorted(set(logs[0])),
        "kept": len(set(kept)),
        "unlimited": limit == NO_LIMIT,
    }
    ours = [snapshot(engine) for engine in (plain, first, second)]
    return {**results, "same": [same(ours[0], other) for other in ours[1:]]}


def kept_views(place: str) -> None:
    """Two engines of one process: autograd keeps views of weights that are released, and gathered again."""
    world = w.join()
    strategy = replace(w.fitted(DEEPSPEED["zero3-noreshard"], world), precision="fp32")
    with patch.object(config, "PERSIST", 8):
        plain, ours = (w.engine_for(strategy, world) for _ in range(2))
    log = in_order(ours)
    parameters = [*ours._engine.module.parameters()]
    found: dict[str, Any] = {"views": 0, "gathered": [], "empty": []}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.untyped_storage().data_ptr()
        view = not isinstance(tensor, torch.nn.Parameter)
        found["views"] += view and any(at == p.data.data_ptr() for p in parameters if numel(p))
        return tensor

    def look(*_: Any) -> None:
        storages = [getattr(p, _STORAGE) for p in parameters if hasattr(p, _STORAGE)]
        found["gathered"].append(len(storages))
        found["empty"].append(sum(storage.nbytes() == 0 for storage in storages))

    hook = ours._engine.module.register_forward_hook(look)
    numbers = [[result.loss.item() for result in w.train(plain, strategy, range(4))]]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        numbers.append([result.loss.item() for result in w.train(ours, strategy, range(4))])
    hook.remove()
    found["waits"] = "wait_stream" in log
    found["same"] = numbers[0] == numbers[1] and same(snapshot(plain), snapshot(ours))
    leave(world, place, "kept_views", found)


def gathers(place: str) -> None:
    """Two engines of one process: as DeepSpeed gathers, and in place, for which its own way is taken away."""
    from deepspeed.runtime.zero import partition_parameters

    world = w.join()
    strategy = replace(w.fitted(DEEPSPEED["zero3"], world), precision="fp32")
    with patch.object(engine, "gather_in_place"):
        joined = w.engine_for(strategy, world, lora=True)
    in_place = w.engine_for(strategy, world, lora=True)
    found = []
    for one in (joined, in_place):
        losses = [result.loss.item() for result in w.train(one, strategy, range(3))]
        found.append((losses, snapshot(one)))
        partition_parameters.AllGatherCoalescedHandle = None
    equal = found[0][0] == found[1][0] and same(found[0][1], found[1][1])
    leave(world, place, "gathers", {"same": equal})


def leaves_nothing(place: str) -> None:
    """Two engines of one process: one releases after an evaluation between steps, one evaluates nothing."""
    world = w.join()
    found: dict[str, Any] = {}
    for name in ("zero3", "zero3-noreshard"):
        strategy = replace(w.fitted(DEEPSPEED[name], world), precision="fp32")
        ended = []
        for evaluates in (False, True):
            with patch.object(config, "PERSIST", 8):
                one = w.engine_for(strategy, world)
            losses = [step.loss.item() for step in w.train(one, strategy, range(3))]
            if evaluates:
                one.evaluate(w.rows(0))
                parameters = [*one._engine.module.parameters()]
                left = [p for p in parameters if p.ds_status.name == "AVAILABLE" and not p.ds_persist]
                release_gathered(one._optimizer.parameter_offload.get_param_coordinator(), parameters)
                after = {p.ds_status.name for p in left}
                found[name] = {"left": bool(left), "after": sorted(after), "empty": not sum(map(numel, left))}
            losses += [step.loss.item() for step in w.train(one, strategy, range(3, 6))]
            ended.append((losses, snapshot(one)))
        found[name]["same"] = ended[0][0] == ended[1][0] and same(ended[0][1], ended[1][1])
    leave(world, place, "leaves_nothing", found)


class OneStream(Streams):
    """The computation's and the reducing one, which are one."""

    def current_stream(self) -> OneStream:  # type: ignore[override]
        return self

    def stream(self, _: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, _: Any = None) -> None:
        super().record()


def gradients_in_order(place: str) -> None:
    """Two engines of one process, offloaded: DeepSpeed's order of gradients, and ours.

    With micro-batches that add up their way to the host is DeepSpeed's. A bucket of 100 elements has room for
    few of them.
    """
    world = w.join()
    found: dict[str, Any] = {}
    for accumulation, bucket, precision in product((1, 2), (None, 100), ("fp32", "bf16")):
        bare = w.fitted(DEEPSPEED["zero3-offload"], world, accumulation)
        strategy = replace(bare, precision=precision, bucket=bucket)
        plain, ours = (w.engine_for(strategy, world) for _ in range(2))
        streams, once = OneStream(), sends_once(strategy)
        held = Gradients(ours._optimizer, to_host=once, streams=streams)
        held.reducing = streams
        steps = [w.train(one, strategy, range(4)) for one in (plain, ours)]
        before = snapshot(ours)
        with poisoned(ours):
            (bad,) = w.train(ours, strategy, range(4, 5))
        both = [*zip(*steps, strict=True)]
        pairs = [(a.loss, b.loss) for a, b in both] + [(a.grad_norm, b.grad_norm) for a, b in both]
        found[f"{accumulation}, {bucket}, {precision}"] = {
            "once": once,
            "difference": max(abs(float(ours) / float(theirs) - 1) for theirs, ours in pairs),
            "waits": sorted(set(streams.log)),
            "held": len(held._latest) + len(held._earlier),
            "refused": bad.skipped.item() == 1.0 and same(before, snapshot(ours)),
        }
    leave(world, place, "gradients_in_order", found)


def numel(parameter: torch.Tensor) -> int:
    return parameter.data.numel()


class UsualPasses:
    """In the place of recorded passes, which need a GPU: the same passes, issued one by one."""

    def __init__(
        self,
        loss: Callable[[MicroBatch], torch.Tensor],
        masters: Sequence[torch.Tensor],
        device: torch.device,
        gradients: Sequence[torch.Tensor],
        *,
        separates: bool,
    ) -> None:
        self._loss, self._masters, self._gradients = loss, masters, gradients
        self.place = nullcontext

    def run(self, micro_batches: Sequence[MicroBatch], factor: torch.Tensor) -> torch.Tensor:
        for at, master in enumerate(self._masters):
            master.grad = self._gradients[at].zero_() if self._gradients else None
        total = torch.zeros_like(factor)
        for micro_batch in micro_batches:
            loss = self._loss(micro_batch)
            (loss * factor).backward()
            total += loss.detach()
        return total


class HookedUsual(recorded._Recorded):
    """The same of passes with DeepSpeed's hooks."""

    def __init__(self, engine: Any, _: Any, apart: Sequence[torch.Tensor], order: Any, weights: Any) -> None:
        self._engine, self._optimizer, self._order, self._apart = engine, engine.optimizer, order, apart
        self.gradients, self.kept = [torch.zeros_like(one) for one in apart], {}
        self._weights, self.unreduced = weights, [torch.zeros_like(one) for one in weights]

    place = nullcontext

    def run(self, micro_batches: Sequence[MicroBatch], factor: torch.Tensor) -> torch.Tensor:
        self._factor = factor
        return self.passes(micro_batches[0])


def ends_as_usual(
    strategy: Strategy, world: World, *stand_ins: AbstractContextManager[Any], lora: bool = False
) -> bool:
    """Whether an engine that records ends as a usual one; `stand_ins` take the place of what needs a GPU."""
    ended = []
    for ours in (False, True):
        objective = {"side_effect": lambda module, *_, o=ours: module if o else None}
        with ExitStack() as stack:
            for one in (patch.object(engine, "recordable", **objective), *stand_ins):
                stack.enter_context(one)
            made = w.engine_for(strategy, world, model=w.mamba, lora=lora)
            assert (made._graphs is not None) == ours
            steps = w.train(made, strategy, range(4))
        numbers = [(step.loss.item(), step.grad_norm.item()) for step in steps]
        ended.append((numbers, snapshot(made), made.evaluate(w.rows(0)).item()))
    (losses, before, held_out), (our_losses, after, our_held_out) = ended
    return losses == our_losses and same(before, after) and held_out == our_held_out


def keeps_sums(place: str) -> None:
    """Two engines of each stage: gradients as DeepSpeed has them, and those of graphs, which stay."""
    world, found = w.join(), {}
    stand_ins = (
        patch.multiple(recorded.Zero12Order, begin=lambda _: None, end=lambda _: None),
        patch.object(recorded, "_Recorded", HookedUsual),
        patch.object(recorded, "RecordedPasses", UsualPasses),
    )
    for name, accumulation, lora in product(("zero0", "zero1", "zero2"), (1, 2), (False, True)):
        strategy = replace(w.fitted(DEEPSPEED[name], world, accumulation), precision="bf16")
        kind = "adapters" if lora else "all weights"
        found[f"{name} x{accumulation}, {kind}"] = ends_as_usual(strategy, world, *stand_ins, lora=lora)
    leave(world, place, "keeps_sums", found)


def main(place: str) -> None:
    world = w.join()
    torch.manual_seed(0)
    results = {"releases": releases(world), "norms": joint_norms(world)}
    leave(world, place, "result", results)
