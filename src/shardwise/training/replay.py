"""The check for silent corruption: every n steps a micro-batch is computed twice and compared bit for bit.

Compared are what each module returns and the loss, and on CPUs the gradients of that and of all weights: on
each rank, before anything is summed over ranks. The engine is passed by, so that nothing of a step changes.
On GPUs flash attention's backward pass adds up in changing order, whatever torch is asked for.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.data.batch import MicroBatch, StepBatch
from shardwise.engines.runtime.protocol import Engine
from shardwise.errors import JobError, MachineError
from shardwise.launch.heartbeat import mark
from shardwise.training.nonfinite import FirstNonFinite
from shardwise.training.process import Ranks

EVERY = "SHARDWISE_REPLAY_EVERY"  # In the environment: steps between two checks; 0: none
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIX = "look for a defective GPU or memory (`shardwise doctor`, `dmesg`); if it comes in each run, a kernel "
_FIX += "adds up in changing order: leave this check out"


class Replay(FirstNonFinite):
    """Compares two passes of this rank, with the same hooks; on a difference all ranks end. Collective."""

    def __init__(self, model: PreTrainedModel, engine: Engine, ranks: Ranks, *, pipeline: bool) -> None:
        super().__init__(model, str)
        self._engine, self._ranks, self._agreed = engine, ranks, 0
        self._gradients = engine.world.device.type == "cpu"
        text = os.environ.get(EVERY, "0")
        if not text.isdecimal():
            raise JobError(f"{EVERY}={text} is no number of steps", where=EVERY, fix=f"{EVERY}=100; 0: never")
        self.every: int = ranks.gather(int(text))[0]
        if self.every and pipeline:
            what = "a pipeline has no rank that computes a micro-batch alone"
            raise JobError(what, where=EVERY, fix="leave it out, or choose another strategy")

    def check(self, step: int, batch: StepBatch) -> None:
        """Before the step, if one is due. MachineError names rank, step and the first value that differs."""
        if not self.every or step % self.every:
            return
        mark("the first steps", step)  # hooks are slow
        micro_batch = batch.micro_batches[0].to(self._engine.world.device)
        (names, first), (again, second) = (self._pass(micro_batch) for _ in range(2))
        pairs = zip(names, first, again, second, strict=False)
        found = next((one for one, a, other, b in pairs if (one, a) != (other, b)), None)
        differ = {rank: what for rank, what in enumerate(self._ranks.gather(found)) if what}
        if differ:
            rank, what = next(iter(differ.items()))
            text = f"computed twice, {what} has other bits on rank {', '.join(map(str, differ))}"
            since = f"what was saved after step {self._agreed} may be wrong: --resume-from goes back further"
            raise MachineError(text, where=f"step {step}, rank {rank}", fix=f"{_FIX}; {since}")
        self._agreed = step

    def _pass(self, micro_batch: MicroBatch) -> tuple[list[str], list[int]]:
        """Names and checksums of all that is computed, in order."""
        self._seen: list[tuple[str, torch.Tensor]] = []
        device = self._engine.world.device
        cards = [device] if device.type == "cuda" else []
        apart = self._engine.apart()
        with torch.random.fork_rng(cards), _deterministic(), apart as module, self._hooks() as handles:
            with torch.set_grad_enabled(self._gradients):
                loss = module(micro_batch)
            if self._gradients:
                weights = [one for one in handles if isinstance(one, torch.Tensor) and one.requires_grad]
                # Into no `.grad`: an engine would take them for those of a step.
                torch.autograd.grad(loss, weights, allow_unused=True)
        self._look("the loss", loss)
        names, sums = zip(*self._seen, strict=True)
        return list(names), torch.stack(sums).tolist()

    def _look(self, what: str, value: torch.Tensor, _: int = -1) -> None:
        value = value.detach()
        if isinstance(value, DTensor):
            value = value.to_local()
        if not what.startswith("the weight "):
            # Another value of one element, whatever it is, is another sum.
            self._seen.append((what, value.view(_BITS[value.element_size()]).sum(dtype=torch.int64)))

    def _learn(self, what: str, gradient: torch.Tensor) -> torch.Tensor:
        """In its place, zeros that take no memory: all gradients of a sharded model fit on no rank."""
        self._look(what, gradient)
        return gradient.new_zeros(()).expand_as(gradient)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Within, torch takes algorithms that give the same bits each time, where it has them."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warns)
