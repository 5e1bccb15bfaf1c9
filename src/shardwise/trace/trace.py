"""From a model to its StepTrace: forward and backward pass of one micro-batch, on tensors without values."""

from functools import cache, partial
from typing import Any

import torch
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.errors import JobError, model_code
from shardwise.job import schema
from shardwise.kernels.target import HOPPER, Target, meta_stands_for
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.structure import DTYPES, checkpoint_blocks
from shardwise.objective import MakeObjective, Objective
from shardwise.objective.causal_lm import CausalLM
from shardwise.simulate import step_trace
from shardwise.simulate.step_trace import StepTrace
from shardwise.trace.fold import block_kinds, find_folding, unfold
from shardwise.trace.functions import cuda_functions, traced_kernels
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
        objective: MakeObjective = CausalLM,
        target: Target = HOPPER,
    ) -> None:
        """`model`, `precision` and `vocab_size` are for `build_model`; `objective` is `objective_of(job)`."""
        sizes = {"vocab_size": vocab_size, "sequence_length": sequence_length}
        self.built = build_model(model, dtype=DTYPES[precision], seed=0, masks=False, **sizes)
        self._split = cache(self._split_over)
        self._precision = precision
        self._sequence_length = sequence_length
        self._objective = objective
        self._target = target

    def trace(
        self,
        *,
        rows: int,
        checkpoint_every: int,
        tensor_parallel: int = 1,
        single_segment_rows: int | None = None,
        folded: bool = True,
    ) -> StepTrace:
        """Trace one micro-batch of full rows, each a single segment.

        Every `checkpoint_every`-th block is checkpointed; 0 for none. `tensor_parallel` GPUs share each row;
        the trace is that of the first. `single_segment_rows`, by default all, go to the kernel for single
        segments, where there is one; the others to the kernel for packed rows. `folded`: repeated blocks are
        traced only a few times; the result is the same. Raises JobError where the objective does.
        """
        built, layout = self._split(tensor_parallel)
        blocks = len(built.blocks)
        folding = find_folding(block_kinds(built, checkpoint_every)) if folded else None
        kept = folding.kept(blocks) if folding else list(range(blocks))
        part = layout.part(kept)
        if checkpoint_every:
            checkpoint_blocks([part.units[i] for i in kept if i % checkpoint_every == 0], every=1)
        if tensor_parallel > 1:
            sum_gradients(part.model)
        with meta_stands_for(self._target), traced_kernels(part.model):
            objective = self._objective(part.model).to("meta").train()
            single = rows if single_segment_rows is None else single_segment_rows
            batch = objective.batch_kind.on_meta(rows, self._sequence_length, single_segment_rows=single)
            try:
                recorder = _record(objective, part, batch, self._target)
            except NotImplementedError as error:  # torch's, such as a result whose size depends on values
                if not (place := model_code(error)):
                    raise
                what = f"the model's own code calls what cannot be computed without values, {place}"
                fix = "train with a strategy by its name, such as `strategy: zero3`, which needs no plan"
                raise JobError(what, where="model.source", fix=fix) from None
        marked = mark_gradients(recorder.events)
        events = unfold(marked, folding, blocks, layout) if folding else marked
        if events is None:
            shared: Any = {"tensor_parallel": tensor_parallel, "single_segment_rows": single_segment_rows}
            return self.trace(rows=rows, checkpoint_every=checkpoint_every, folded=False, **shared)
        return StepTrace(
            parameters=layout.parameters,
            buffers=layout.buffers,
            units=layout.units,
            events=tuple(events),
            ops=tuple(recorder.ops),
            rows=rows,
            sequence_length=self._sequence_length,
            checkpoint_every=checkpoint_every,
            precision=self._precision,
            one_shape=objective.one_shape,
            host_waits=recorder.host_waits,
            tensor_parallel=tensor_parallel,
        )

    def _split_over(self, degree: int) -> tuple[BuiltModel, Layout]:
        """The model as a rank of a tensor-parallel group holds it."""
        full = Layout(self.built)
        if degree == 1:
            return self.built, full
        part = cut(self.built, degree)
        return part, Layout(part, full=full)


def _record(objective: Objective, part: Part, batch: MicroBatch, target: Target) -> Recorder:
    recorder = Recorder(target)
    for tensor in (*objective.parameters(), *objective.buffers(), *batch.tensors().values()):
        recorder.ignore(tensor)
    for index, parameter in part.parameters.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, recorder, index))
    head = part.model.get_output_embeddings()
    for unit, owner in part.units.items():
        _mark(owner, unit, recorder, is_head=owner is head)
    scale = torch.empty((), device="meta")
    recorder.ignore(scale)
    with cuda_functions(), recorder:
        loss = objective(batch)
        (loss * scale).backward()
        del loss
    return recorder


def _hand_over(recorder: Recorder, index: int, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    recorder.gradient(index, parameter.grad)
    parameter.grad = None


def _mark(module: nn.Module, unit: int, recorder: Recorder, *, is_head: bool) -> None:
    """Record when a unit's forward and backward pass begin and end.

    Memory allocated from the head's forward pass to the end of its backward pass belongs to the loss.
    """

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.mark(step_trace.FORWARD, unit)
        if is_head:
            recorder.tag = step_trace.LOSS
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(end)

    def end(_: torch.Tensor) -> None:
        recorder.mark(step_trace.BACKWARD_END, unit)
        if is_head:
            recorder.tag = step_trace.ACTIVATION

    def after(_: nn.Module, __: Any, output: Any) -> None:
        recorder.mark(step_trace.FORWARD_END, unit)
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: recorder.mark(step_trace.BACKWARD, unit))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
