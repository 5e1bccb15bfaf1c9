"""Where a value stopped being finite: a step is repeated with hooks on all modules; the first is named."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.data.batch import MicroBatch, StepBatch
from shardwise.engines.runtime.protocol import Engine
from shardwise.launch.heartbeat import mark
from shardwise.training.process import Ranks

SHOWN_TOKENS = 16  # Of a sample
GRADIENT = "the gradient of"
FINITE = (
    "repeated, all modules return finite values and gradients: `shardwise doctor` looks for a defective GPU"
)


class FirstNonFinite:
    """Finds the first weight, output of a module or gradient that is not finite on this rank."""

    def __init__(self, model: PreTrainedModel, decode: Callable[[list[int]], str]) -> None:
        """`decode`: tokens to text."""
        self._model, self._decode = model, decode
        self._found: str | None = None
        self._batches: Sequence[MicroBatch] = ()
        self._current = -1  # Micro-batch of the forward pass; -1 in the later stages of a pipeline

    def find(self, engine: Engine, ranks: Ranks, batch: StepBatch) -> list[tuple[str, str]]:
        """Repeat a step; what is not finite, and on which ranks. Collective. The run has to end then."""
        mark("the first steps")  # hooks are slow
        self._batches = [one.to(engine.world.device) for one in batch.micro_batches]
        try:
            with self._hooks():
                engine.passes(self._batches, target_tokens=batch.target_tokens)
        except torch.OutOfMemoryError:  # the other ranks wait in vain; the launcher ends them
            return [("the memory does not suffice to look for the module", f"rank {ranks.world.rank}")]
        by_what: dict[str, list[str]] = {}
        for rank, what in enumerate(ranks.gather(self._found)):
            if what is not None:
                by_what.setdefault(what, []).append(str(rank))
        if not by_what:
            return [(FINITE, "all ranks")]
        # A gradient on one rank may be what follows from a forward pass on another.
        first = [what for what in by_what if not what.startswith(GRADIENT)] or list(by_what)
        return [(what, f"rank {', '.join(by_what[what])}") for what in first]

    @contextmanager
    def _hooks(self) -> Iterator[dict[Any, Any]]:
        """Within, all is looked at, in order. The weights, as they are computed with, are among the keys."""
        handles: dict[Any, Any] = {}
        names = {module: name for name, module in self._model.named_modules() if name}
        embedding = self._model.get_input_embeddings()

        def enters(module: torch.nn.Module, _: Any) -> None:
            self._current += module is embedding
            for key, weight in module.named_parameters(recurse=False):
                name = f"{names[module]}.{key}"
                if not isinstance(weight, DTensor):  # this module's weights are not gathered for it
                    self._look(f"the weight {name}", weight)
                if weight.requires_grad and weight not in handles:
                    handles[weight] = weight.register_hook(partial(self._learn, f"{GRADIENT} {name}"))

        def returns(module: torch.nn.Module, _: Any, output: Any) -> None:
            name, value = names[module], output[0] if isinstance(output, tuple) else output
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return
            current = self._current
            self._look(f"what {name} returns", value, current)
            if value.requires_grad:
                what = f"{GRADIENT} what {name} returns"
                value.register_hook(lambda grad: self._look(what, grad, current))

        for module in names:
            handles[module, 0] = module.register_forward_pre_hook(enters)
            handles[module, 1] = module.register_forward_hook(returns)
        try:
            yield handles
        finally:
            for handle in handles.values():
                handle.remove()

    def _look(self, what: str, value: torch.Tensor, current: int = -1) -> None:
        if self._found is None and not _is_finite(value):
            self._found = f"{what} is not finite{'' if current < 0 else self._sample(value, current)}"

    def _learn(self, what: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """Look at the gradient of a weight; what takes its place, if anything."""
        self._look(what, gradient)
        return None

    def _sample(self, value: torch.Tensor, current: int) -> str:
        """The sample of the first value that is not finite, where `value` has a row for each token."""
        batch = self._batches[current]
        tokens, length = batch.input_ids.numel(), batch.input_ids.shape[-1]
        dims = next((dims for dims in (1, 2) if value.shape[:dims].numel() == tokens), None)
        if dims is None:
            return ""
        at = int((~value.detach().reshape(tokens, -1).isfinite()).any(1).nonzero()[0])
        start = int(batch.cu_seqlens[batch.cu_seqlens <= at].max())
        text = self._decode(batch.input_ids.reshape(-1)[start : start + SHOWN_TOKENS].tolist())
        where = f"micro-batch {current + 1} of {len(self._batches)}, row {at // length + 1}"
        return f" in {where}, from the sample that begins {text!r} on"


def _is_finite(value: torch.Tensor) -> bool:
    """Without a copy: memory may be scarce."""
    return value.numel() == 0 or math.isfinite(sum(torch.stack(value.detach().aminmax()).tolist()))
