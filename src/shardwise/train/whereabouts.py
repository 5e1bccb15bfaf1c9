"""Where in a run an error came from: the phase, the step and the module, read from its traceback.

A backward pass runs in C++, where a traceback shows no modules. So a hook on each block notes when it begins:
two calls of Python a block and micro-batch, which cost microseconds
(docs/out-of-memory.md has the measurement). All else is found out after the failure only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from shardwise.train.loop import Loop

PHASES = {
    ("shardwise.train.run", "make_engine"): "building",
    ("shardwise.train.run", "check_weights"): "building",
    ("shardwise.train.snapshot", "restore"): "restoring",
    ("shardwise.train.loop", "evaluate"): "evaluation",
    ("shardwise.train.loop", "save"): "saving",
}
"""Functions by module and name that are a phase of their own, whatever they call."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """See `record.schema.OutOfMemory`."""

    phase: str
    step: int | None
    module: str | None
    call: str
    loop: Loop | None
    """The loop that was under way, and with it the engine."""


class Whereabouts:
    """Knows a model's modules by name, and in which block a backward pass is."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Call it before an engine takes the model. `blocks`: its repeated layers."""
        self._names = {id(module): name for name, module in model.named_modules() if name}
        self._block: str | None = None
        for block in blocks:
            self._follow(block, self._names.get(id(block)))

    def of(self, trace: TracebackType | None, cause: TracebackType | None) -> Place:
        """Where an error was raised; `cause`: the traceback of the error that caused it, or its own again."""
        frames = _frames(trace) + ([] if cause is trace else _frames(cause))
        phase = _phase(frames)
        module = self._innermost(frames)
        if module is None and phase == "backward":
            module = self._block
        loop = next((f.f_locals["self"] for f in frames if isinstance(f.f_locals.get("self"), Loop)), None)
        step = None
        if loop is not None:
            step = loop.progress.step + (phase not in ("evaluation", "saving"))
        return Place(phase=phase, step=step, module=module, call=_call(cause), loop=loop)

    def _follow(self, block: nn.Module, name: str | None) -> None:
        def begins(_: Any) -> None:
            self._block = name

        def returned(_: nn.Module, __: Any, output: Any) -> None:
            self._block = None  # a backward pass begins behind the last block
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor) and hidden.grad_fn is not None:
                hidden.grad_fn.register_prehook(begins)  # a third of the cost of a hook on the tensor

        block.register_forward_hook(returned)

    def _innermost(self, frames: Sequence[FrameType]) -> str | None:
        """The deepest module that was being called, in a forward pass or in one that is repeated."""
        called = (self._names.get(id(frame.f_locals.get("self"))) for frame in reversed(frames))
        return next((name for name in called if name), None)


def _frames(trace: TracebackType | None) -> list[FrameType]:
    """Outermost first."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _phase(frames: Sequence[FrameType]) -> str:
    functions = [(str(frame.f_globals.get("__name__", "")), frame.f_code.co_name) for frame in frames]
    for function in functions:
        if function in PHASES:
            return PHASES[function]
    if ("shardwise.train.loop", "_issue") not in functions:
        return "other"
    inside = [frame for frame, (module, _) in zip(frames, functions, strict=True) if _in_an_engine(module)]
    if not inside:
        return "batch"
    if any(name == "backward" for _, name in functions):  # torch's, DeepSpeed's, a custom operation's
        return "backward"
    if any(isinstance(frame.f_locals.get("self"), nn.Module) for frame in frames if _is_call(frame)):
        return "forward"
    return "optimizer"


def _in_an_engine(module: str) -> bool:
    return module.startswith("shardwise.engines.")


def _is_call(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl")


def _call(trace: TracebackType | None) -> str:
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
