"""Results of operators on meta tensors, computed by torch once for each form of their inputs.

Many of torch's meta functions are Python and take up to a millisecond; repeated blocks call them with equal
forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch

Maker = Callable[[], Any]


class Results:
    """Results of the operators of one recording."""

    def __init__(self) -> None:
        self._makers: dict[Any, list[Maker]] = {}

    def of(self, key: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `function(*args, **kwargs)`; `key` is `form` of all three."""
        if key in self._makers:
            made = tuple(make() for make in self._makers[key])
            return made[0] if len(made) == 1 else made
        result = function(*args, **kwargs)
        values = result if isinstance(result, tuple) else (result,)
        if _is_functional(function) and _are_new(values, tensors_in((*args, *kwargs.values()))):
            self._makers[key] = [_maker(value) for value in values]
        return result


def form(value: Any) -> Any:
    """A key that is equal for values with which operators return results of equal form."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.stride())
    if isinstance(value, (tuple, list)):
        return tuple(form(item) for item in value)
    return (type(value), value)  # 1, 1.0 and True are equal


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, also inside lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


@cache
def _is_functional(function: Any) -> bool:
    """Whether its schema says that it changes no input and returns no view of one."""
    schema = function._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))


def _are_new(values: tuple[Any, ...], inputs: Iterable[torch.Tensor]) -> bool:
    """Whether tensors have memory of their own, and no more than they need.

    Some schemas are wrong about that: `_unsafe_view` returns its input's memory.
    """
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage._cdata in seen or storage.nbytes() != _maker(value)().untyped_storage().nbytes():
                return False
            seen.add(storage._cdata)
    return all(tensor.is_meta for tensor in tensors_in(values)) and not isinstance(values[0], list)


def _maker(value: Any) -> Maker:
    """A function that makes a tensor like this one; any other value is returned as it is."""
    if not isinstance(value, torch.Tensor):
        return lambda: value
    shape, dtype, stride = form(value)
    return partial(torch.empty_strided, shape, stride, dtype=dtype, device="meta")
