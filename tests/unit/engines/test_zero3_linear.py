"""What ZeRO-3's layers call on the host, compared with torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.engines.deepspeed.runtime import zero3


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 5, 3)])
@pytest.mark.parametrize("trained", ["x", "weight", "bias", "x weight", "x weight bias"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_linear_layer_under_zero_3_is_torchs(shape: tuple[int, ...], trained: str, bias: bool) -> None:
    if trained == "bias" and not bias:
        return
    torch.manual_seed(0)
    made = {"x": torch.randn(shape), "weight": torch.randn(7, 3), "bias": torch.randn(7) if bias else None}
    results = []
    for linear in (torch.nn.functional.linear, zero3._linear):
        given = {name: None if one is None else one.double() for name, one in made.items()}
        of = [given[name].requires_grad_() for name in trained.split() if given[name] is not None]
        output = linear(*given.values())
        results.append([output, *torch.autograd.grad(output.sin().sum(), of)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("trained", [True, False])
def test_the_input_is_kept_only_where_the_weight_is_trained(trained: bool) -> None:
    """As torch does; a plan counts no more: a router between adapters is frozen."""
    kept: list[torch.Tensor] = []
    x, weight = torch.randn(4, 3, requires_grad=True), torch.nn.Parameter(torch.randn(7, 3), trained)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        zero3._linear(x, weight)
    assert [one.data_ptr() for one in kept] == [x.data_ptr()] * trained + [weight.data_ptr()]


def test_a_linear_layer_takes_torchs_names_and_autocast() -> None:
    x, weight = torch.randn(4, 3), torch.nn.Parameter(torch.randn(7, 3))
    expected = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(zero3._linear(input=x, weight=weight, bias=None), expected)
    with torch.autocast("cpu", torch.bfloat16):
        output = zero3._linear(x, weight)
        output.sum().backward()
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=0.05, rtol=0.05)
    assert weight.grad is not None


def test_a_model_is_traced_after_zero_3_has_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed replaces the function for the process; torch 2.11 has no autocast for meta tensors."""

    def enabled(device: str) -> bool:
        assert device != "meta", "unknown device type for autocast"
        return False

    monkeypatch.setattr(torch, "is_autocast_enabled", enabled)
    x, weight = torch.randn(4, 3, device="meta"), torch.randn(7, 3, device="meta")
    assert zero3._linear(x, weight).shape == (4, 7)


def test_a_linear_layers_weight_that_is_gone_is_gathered_for_its_backward_pass() -> None:
    weight, full = torch.nn.Parameter(torch.randn(7, 3)), torch.randn(7, 3)
    calls: list[str] = []

    def all_gather() -> None:
        weight.data = full
        calls.append("gather")

    weight.all_gather, weight.partition = all_gather, lambda: calls.append("release")  # type: ignore[attr-defined]
    x = torch.randn(2, 3, requires_grad=True)
    output = zero3._linear(x, weight)
    weight.data = torch.empty(0)
    output.sum().backward()
    torch.testing.assert_close(x.grad, full.sum(0).expand(2, 3))
    assert calls == ["gather", "release"]


def test_parameters_that_are_registered_later_are_found() -> None:
    """Those of a module are looked for once; those that it takes from others come during the first pass."""
    layer, further = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.zeros(1))
    outside: list[tuple[str, Any]] = []
    layer.ds_external_parameters = lambda: iter(outside)  # type: ignore[assignment]
    assert [name for name, _ in zero3._parameters(layer)] == ["weight", "bias"]
    outside.append(("further", further))
    assert [name for name, _ in zero3._parameters(layer)] == ["weight", "bias", "further"]
