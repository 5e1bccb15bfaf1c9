"""Results that are not asked of torch again are what torch would give."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.trace.recorder import Results, form

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def twice(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    results = Results()
    key = (function, form(args), *kwargs)
    first, second = (results.of(key, function, args, kwargs) for _ in range(2))
    return first, second


def storages(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def test_a_second_call_gives_new_tensors_of_the_same_form() -> None:
    rows = meta(6, 4).t()  # not in the order of its shape
    for function, args in (
        (ATEN.add.Tensor, (rows, rows)),
        (ATEN.native_layer_norm.default, (meta(3, 4), [4], None, None, 1e-5)),
    ):
        first, second = twice(function, *args)
        ones, twos = (list(r) if isinstance(r, tuple) else [r] for r in (first, second))
        assert [form(tensor) for tensor in twos] == [form(tensor) for tensor in ones]
        everything = storages(*args[:1], *ones, *twos)
        assert len(set(everything)) == len(everything)


def test_views_and_changes_in_place_stay_those_of_their_inputs() -> None:
    x = meta(4, 6)
    for function, args in (
        (ATEN.view.default, (x, [24])),
        (ATEN._unsafe_view.default, (x, [24])),  # its schema does not say so
        (ATEN.add_.Tensor, (x, x)),
    ):
        _, second = twice(function, *args)
        assert storages(second) == storages(x)


class Counted:
    """An operator that counts its calls."""

    def __init__(self, function: Any) -> None:
        self._function, self._schema, self.tags = function, function._schema, function.tags
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._function(*args)


def test_what_changes_only_values_is_asked_once() -> None:
    results, function = Results(), Counted(ATEN.mul_.Tensor)
    for x in (meta(4, 6), meta(4, 6)):
        assert results.of((function, form((x, x))), function, (x, x), {}) is x
    assert function.calls == 1


def test_what_changes_a_form_in_place_is_asked_each_time() -> None:
    results, function = Results(), Counted(ATEN.t_.default)
    for x in (meta(3, 3), meta(3, 3)):
        results.of((function, "equal"), function, (x,), {})
    assert function.calls == 2


def test_values_on_the_cpu_are_computed_each_time() -> None:
    results, key = Results(), (ATEN.add_.Tensor, "form")
    results.of(key, ATEN.add_.Tensor, (meta(2), 1), {})
    real = torch.zeros(2)
    for count in (1, 2):
        assert results.of(key, ATEN.add_.Tensor, (real, 1), {}).tolist() == [count, count]


def test_what_is_not_a_tensor_comes_again() -> None:
    q = meta(1, 2, 8, 64)
    args = (q, q, q, None, True, 0.0, True, False)
    first, second = twice(ATEN._scaled_dot_product_cudnn_attention.default, *args)
    assert [type(value) for value in second] == [type(value) for value in first]
    assert second[4:6] == first[4:6] == (8, 8)  # the longest rows


def test_numbers_of_other_types_are_other_calls() -> None:
    x = meta(4, dtype=torch.int64)
    results = Results()
    whole, real = (
        results.of((ATEN.mul.Tensor, form((x, factor))), ATEN.mul.Tensor, (x, factor), {})
        for factor in (2, 2.0)
    )
    assert (whole.dtype, real.dtype) == (torch.int64, torch.float32)
