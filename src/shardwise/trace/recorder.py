"""Records everything torch does on meta tensors as the events of a StepTrace."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.kernels.target import Target
from shardwise.simulate import step_trace
from shardwise.simulate.step_trace import ALLOC, FREE, GRADIENT, OP, Event, Op
from shardwise.trace.ops import describe, is_view, one_pass
from shardwise.trace.workspace import workspace

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_ADD_PRODUCT = torch.ops.aten.addmm.dtype_out
"""Returns its `out`. It is not called: torch 2.11's meta device takes the dtype for a factor."""
_ITEM = torch.ops.aten._local_scalar_dense.default

_NONZERO = torch.ops.aten.nonzero.default
_GROUPED = torch.ops.aten._grouped_mm.default

_is_view = cache(is_view)

_PRIVATE: list[tuple[Any, str]] = [
    (torch._C, "_storage_Use_Count"),
    (Tensor, "_use_count"),
    (torch.UntypedStorage, "_cdata"),
    (torch.autograd.graph, "_engine_run_backward"),
    (TorchDispatchMode, "_should_skip_dynamo"),
]
"""Private names of torch that recording relies on."""

# Operators whose CUDA side allocates its outputs in another order than it returns them.
_MADE_FIRST: dict[Any, Callable[[Tensor], bool]] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: lambda output: output.numel() > 1,  # seeds
    torch.ops.aten.native_dropout.default: lambda output: output.dtype != torch.bool,  # its mask
}

_ACTIVE: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


class Recorder(TorchDispatchMode):
    """A dispatch mode whose `events` and `ops` grow while it is entered.

    A storage is a tensor of the trace from the operator that returns it first until its last reference is
    gone. Call `ignore` for storages that exist already: parameters, buffers, the batch.
    """

    def __init__(self, target: Target) -> None:
        """Raise RuntimeError where this torch lacks something that recording relies on."""
        super().__init__()
        missing = [f"{owner.__name__}.{name}" for owner, name in _PRIVATE if not hasattr(owner, name)]
        if missing:
            raise RuntimeError(_outdated(", ".join(missing)))
        _references_of_an_unshared_total()
        self.target = target
        self.events: list[Event] = []
        self.ops: list[Op] = []
        self.tag = step_trace.ACTIVATION
        self.host_waits = False
        """Whether Python reads a value, or a tensor is copied from the host."""
        self._tensors: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._handed_over: set[int] = set()
        self._known_ops: dict[Any, int | None] = {}
        self._results = Results()
        self._numbers = count()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__, which costs time and hides the caller

    def __enter__(self) -> Recorder:
        self._token = _ACTIVE.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _ACTIVE.reset(self._token)

    def ignore(self, tensor: Tensor) -> None:
        """Record no event for `tensor`, which must outlive the recording."""
        self._tensors[tensor.untyped_storage()._cdata] = -1

    def mark(self, *event: int) -> None:
        self.events.append(event)

    def gradient(self, parameter: int, gradient: Tensor) -> None:
        """The gradient of `parameter` is complete; the engine frees it."""
        tensor = self._tensors[gradient.untyped_storage()._cdata]
        self._handed_over.add(tensor)
        self.events.append((GRADIENT, parameter, tensor))

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is _ITEM:
            self.host_waits = True
            if args[0].dtype != torch.bool:
                raise RuntimeError("the model's code depends on values, which a traced step does not have")
            return True  # transformers asks whether all rows are single segments
        if _is_view(function) and args[0].is_meta and args[0].untyped_storage()._cdata in self._tensors:
            return function(*args, **kwargs)  # nothing happens on the GPU
        from_engine = sys._getframe(1).f_code.co_name == "_engine_run_backward"
        if from_engine and function is _ADD and _adds_in_place(args[0]):
            function = _ADD_IN_PLACE
        key = (function, form(args), *((name, form(value)) for name, value in kwargs.items()))
        result = kwargs["out"] if function is _ADD_PRODUCT else self._results.of(key, function, args, kwargs)
        outputs = list(tensors_in((result,)))
        for tensor in sorted(outputs, key=_MADE_FIRST[function]) if function in _MADE_FIRST else outputs:
            self._meet(tensor)
        if key not in self._known_ops:
            inputs = list(tensors_in((*args, *kwargs.values())))
            self.host_waits |= function is _NONZERO or any(map(self._from_the_host, inputs))
            self._known_ops[key] = self._add(describe(function, args, inputs, outputs))
        for size in workspace(function, args, outputs, self.target):
            scratch = next(self._numbers)
            self.events += [(ALLOC, scratch, size, step_trace.WORKSPACE), (FREE, scratch)]
        index = self._known_ops[key]
        if index is not None:
            self.events.append((OP, index))
        return result

    def _from_the_host(self, tensor: Tensor) -> bool:
        """Whether Python made its values: no operator did, and nobody called `ignore`."""
        if tensor.device.type == "cpu":
            return tensor.ndim > 0  # a number goes with the kernel's launch
        return tensor.untyped_storage()._cdata not in self._tensors

    def _add(self, op: Op | None) -> int | None:
        if op is None:
            return None
        self.ops.append(op)
        return len(self.ops) - 1

    def _meet(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._tensors:
            return
        tensor = self._tensors[key] = next(self._numbers)

        def gone(_: Any) -> None:
            del self._tensors[key], self._watched[key]
            if tensor not in self._handed_over:
                self.events.append((FREE, tensor))

        self._watched[key] = weakref.ref(storage, gone)
        self.events.append((ALLOC, tensor, storage.nbytes(), self.tag))


def record_kernel(op: Op) -> None:
    """Record a kernel that is no operator of torch with the active recorder."""
    recorder = _ACTIVE.get()
    assert recorder is not None, "stand-ins for kernels exist only while a step is recorded"
    if op not in recorder._known_ops:
        recorder._known_ops[op] = recorder._add(op)
    recorder.events.append((OP, recorder._known_ops[op]))  # type: ignore[arg-type]


def record_pass(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Record one kernel that reads and writes these tensors once; a norm by its name, or elementwise."""
    kind = "normalization" if "norm" in name else "elementwise"
    flops = float(sum(t.numel() for t in read))
    record_kernel(one_pass(kind, name, flops, read, written, item_bytes=read[0].element_size()))


def mark_gradients(events: list[Event]) -> list[Event]:
    """Give every storage that a GRADIENT event names the tag `gradient`."""
    handed = {e[2] for e in events if e[0] == GRADIENT}
    return [(*e[:3], step_trace.GRADIENT_TAG) if e[0] == ALLOC and e[1] in handed else e for e in events]


def _adds_in_place(total: Tensor) -> bool:
    """Whether autograd adds a further gradient to `total` in place.

    It does so in memory that nothing else references (can_accumulate_inplace in input_buffer.cpp), but never
    while a dispatch mode like this one is active, whose own references come on top.
    """
    alone = _references_of_an_unshared_total()  # counted when the recorder was created
    return all(count <= least for count, least in zip(_references(total), alone, strict=True))


def _references(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


@cache
def _references_of_an_unshared_total() -> tuple[int, int]:
    """Counts within a dispatch mode, in a backward pass where nothing else references the first gradient."""
    seen: list[tuple[int, int]] = []

    class Counter(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is _ADD and sys._getframe(1).f_code.co_name == "_engine_run_backward":
                seen.append(_references(args[0]))
            return function(*args, **(kwargs or {}))

    x = torch.empty(2, device="meta", requires_grad=True) * 1.0
    with Counter():
        (x * 2.0 + x * 3.0).sum().backward()
    if len(seen) != 1:
        raise RuntimeError(_outdated("an addition of gradients called by _engine_run_backward"))
    return seen[0]


def _outdated(missing: str) -> str:
    fix = "install the torch of the lock file, or adapt shardwise/trace/recorder.py"
    return f"torch {torch.__version__} lacks {missing}, which recording a training step relies on: {fix}"


Maker = Callable[[], Any]


class Results:
    """Results of the operators of one recording, computed by torch once for each form of their inputs.

    Many of torch's meta functions are Python and take up to a millisecond; repeated blocks call them with
    equal forms. An operator that writes into its first input returns that input.
    """

    def __init__(self) -> None:
        self._makers: dict[Any, list[Maker]] = {}
        self._in_place: set[Any] = set()

    def of(self, key: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `function(*args, **kwargs)`; `key` is `form` of all three."""
        if key in self._in_place and args[0].is_meta:
            return args[0]
        if key in self._makers:
            made = tuple(make() for make in self._makers[key])
            return made[0] if len(made) == 1 else made
        result = _grouped(*args, **kwargs) if function is _GROUPED else function(*args, **kwargs)
        values = result if isinstance(result, tuple) else (result,)
        if _is_functional(function) and _are_new(values, tensors_in((*args, *kwargs.values()))):
            self._makers[key] = [_maker(value) for value in values]
        elif _only_writes_first(function) and result is args[0]:
            self._in_place.add(key)
        return result


def _grouped(left: Tensor, right: Tensor, *others: Any, **options: Any) -> Tensor:
    """Experts' products in any dtype, as CUDA has them; torch's meta function knows bf16 alone."""
    low = (tensor.to(torch.bfloat16) for tensor in (left, right))
    return _GROUPED(*low, *others, **options).to(left.dtype)  # type: ignore[no-any-return]


def form(value: Any) -> Any:
    """A key that is equal for values with which operators return results of equal form."""
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.stride())
    if isinstance(value, (tuple, list)):
        return tuple(form(item) for item in value)
    return (type(value), value)  # 1, 1.0 and True are equal


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, also inside lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


@cache
def _is_functional(function: Any) -> bool:
    """Whether its schema says that it changes no input and returns no view of one."""
    schema = function._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


@cache
def _only_writes_first(function: Any) -> bool:
    """Whether its schema says that it writes values into its first argument, and changes nothing else."""
    changed = [a for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return changed == function._schema.arguments[:1] and torch.Tag.inplace_view not in function.tags


def _are_new(values: tuple[Any, ...], inputs: Iterable[Tensor]) -> bool:
    """Whether tensors have memory of their own, and no more than they need.

    Some schemas are wrong about that: `_unsafe_view` returns its input's memory.
    """
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage._cdata in seen or storage.nbytes() != _maker(value)().untyped_storage().nbytes():
                return False
            seen.add(storage._cdata)
    return all(tensor.is_meta for tensor in tensors_in(values)) and not isinstance(values[0], list)


def _maker(value: Any) -> Maker:
    """A function that makes a tensor like this one; any other value is returned as it is."""
    if not isinstance(value, Tensor):
        return lambda: value
    shape, dtype, stride = form(value)
    return partial(torch.empty_strided, shape, stride, dtype=dtype, device="meta")
