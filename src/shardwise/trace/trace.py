"""From a model to its StepTrace: forward and backward pass of one micro-batch, on tensors without values."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.parameters import DTYPES
from shardwise.job import schema
from shardwise.kernels.target import HOPPER, Target, speaking_for
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.checkpointing import checkpoint_blocks
from shardwise.objective.causal_lm import CausalLMLoss
from shardwise.simulate.step_trace import (
    ACTIVATION,
    BACKWARD,
    BACKWARD_END,
    FORWARD,
    FORWARD_END,
    LOSS,
    Event,
    StepTrace,
)
from shardwise.trace.fold import block_kinds, find_folding, unfold
from shardwise.trace.functions import cuda_functions
from shardwise.trace.fused import traced_kernels
from shardwise.trace.layout import Layout, Part
from shardwise.trace.recorder import Recorder, mark_gradients
from shardwise.trace.tensor_parallel import cut, sum_gradients


class Tracer:
    """Traces one model, `built`, at several micro-batch sizes, ways of checkpointing and degrees."""

    def __init__(
        self,
        model: schema.Model,
        *,
        precision: str,
        sequence_length: int,
        vocab_size: int | None = None,
        packing: bool = True,
        target: Target = HOPPER,
    ) -> None:
        """`model`, `precision` and `vocab_size` are `build_model`'s, `packing` is the job's."""
        self.built = build_model(
            model,
            dtype=DTYPES[precision],
            seed=0,
            vocab_size=vocab_size,
            sequence_length=sequence_length,
        )
        self._cut = cache(self._cut_over)
        self._precision = precision
        self._sequence_length = sequence_length
        self._packing = packing
        self._target = target

    def trace(
        self,
        *,
        rows: int,
        checkpoint_every: int,
        tensor_parallel: int = 1,
        whole_rows: int | None = None,
        folded: bool = True,
    ) -> StepTrace:
        """One micro-batch of `rows` full rows, each a single segment.

        `whole_rows`: so many of them go to the kernel for rows of one segment, where there is one, and the
        others to that for packed rows; None: all. `tensor_parallel`: GPUs that share each row; the trace is
        that of the first of them. `folded`: repeated blocks are traced a few times only; the result is the
        same. Raises what `build_model` and `CausalLMLoss` raise.
        """
        built, layout = self._cut(tensor_parallel)
        folding = find_folding(block_kinds(built, checkpoint_every)) if folded else None
        kept = list(range(len(built.blocks))) if folding is None else folding.kept(len(built.blocks))
        part = layout.part(kept)
        if checkpoint_every:
            checkpoint_blocks([part.units[i] for i in kept if i % checkpoint_every == 0], every=1)
        if tensor_parallel > 1:
            sum_gradients(part.model)
        with speaking_for(self._target), traced_kernels(part.model):
            batch = self._batch(rows, rows if whole_rows is None else whole_rows)
            recorder = _record(part, batch, self._target, packing=self._packing)
        events: list[Event] | None = mark_gradients(recorder.events)
        if folding is not None:
            events = unfold(events or [], folding, len(built.blocks), layout)
            if events is None:
                return self.trace(
                    rows=rows,
                    checkpoint_every=checkpoint_every,
                    tensor_parallel=tensor_parallel,
                    whole_rows=whole_rows,
                    folded=False,
                )
        return StepTrace(
            parameters=layout.parameters,
            buffers=layout.buffers,
            units=layout.units,
            events=tuple(events or []),
            ops=tuple(recorder.ops),
            rows=rows,
            sequence_length=self._sequence_length,
            checkpoint_every=checkpoint_every,
            precision=self._precision,
            tensor_parallel=tensor_parallel,
        )

    def _cut_over(self, degree: int) -> tuple[BuiltModel, Layout]:
        """The model as a rank of `degree` has it."""
        whole = Layout(self.built)
        if degree == 1:
            return self.built, whole
        part = cut(self.built, degree)
        return part, Layout(part, whole=whole)

    def _batch(self, rows: int, whole_rows: int) -> MicroBatch:
        shape = rows, self._sequence_length
        tokens, labels, positions = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(3))
        return MicroBatch(
            input_ids=tokens,
            labels=labels,
            position_ids=positions,
            cu_seqlens=torch.empty(rows + 1, dtype=torch.int32, device="meta"),
            max_seqlen=self._sequence_length,
            single_segment_rows=whole_rows,
        )


def _record(part: Part, batch: MicroBatch, target: Target, *, packing: bool) -> Recorder:
    module = CausalLMLoss(part.model, packed=packing).to("meta").train()
    recorder = Recorder(target)
    inputs = (batch.input_ids, batch.labels, batch.position_ids, batch.cu_seqlens)
    for tensor in (*module.parameters(), *module.buffers(), *inputs):
        recorder.ignore(tensor)
    for index, parameter in part.parameters.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_hand_over(recorder, index))
    head = part.model.get_output_embeddings()
    for unit, owner in part.units.items():
        _mark(owner, unit, recorder, is_head=owner is head)
    scale = torch.empty((), device="meta")
    recorder.ignore(scale)
    with cuda_functions(), recorder:
        loss = module(batch)
        (loss * scale).backward()
        del loss
    return recorder


def _hand_over(recorder: Recorder, index: int) -> Any:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        recorder.gradient(index, parameter.grad)
        parameter.grad = None

    return hook


def _mark(part: nn.Module, unit: int, recorder: Recorder, *, is_head: bool) -> None:
    """Lets the recorder know when a unit's forward and backward pass begin and end.

    What comes to be from the head's forward pass until its backward pass is over is the loss's.
    """

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.mark(FORWARD, unit)
        if is_head:
            recorder.tag = LOSS
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(end)

    def end(_: torch.Tensor) -> None:
        recorder.mark(BACKWARD_END, unit)
        if is_head:
            recorder.tag = ACTIVATION

    def after(_: nn.Module, __: Any, output: Any) -> None:
        recorder.mark(FORWARD_END, unit)
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: recorder.mark(BACKWARD, unit))

    part.register_forward_pre_hook(before, with_kwargs=True)
    part.register_forward_hook(after)
