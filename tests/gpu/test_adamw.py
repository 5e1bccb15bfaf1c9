"""On a GPU: our AdamW kernel takes the steps of float64 arithmetic, and nothing waits for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # kernels compiled for the first time may warn
]
DEVICE = torch.device("cuda")
SIZES = (1, 700, 65_536, 200_001, 4096, 131_088)  # the last two are read in vectors
RATE, DECAY, BETAS, EPSILON, DIVISOR, STEPS = 1e-2, 0.1, (0.9, 0.999), 1e-8, 2.0, 3.0


def rows(low: torch.dtype | None, form: torch.dtype) -> list[list[Any]]:
    """Weights with moments and gradients; one gradient is not aligned, one weight has none."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(count: int, scale: float) -> torch.Tensor:
        return scale * torch.randn(count, device=DEVICE, generator=generator)

    found = []
    for place, size in enumerate(SIZES):
        weight = random(size, 1.0)
        weight.grad_dtype = None
        weight.grad = random(size + 1, 1.0).to(form)[1:] if place == 1 else random(size, 1.0).to(form)
        rounded = None if low is None else weight.to(low)
        steps = torch.tensor(STEPS, device=DEVICE)
        found.append([weight, random(size, 0.1), random(size, 0.1).square() + 0.01, steps, rounded])
    found[2][0].grad = None
    return found


def exact(row: list[Any]) -> list[torch.Tensor]:
    """The weight and its moments after a step, in float64."""
    weight, mean, square = (tensor.double() for tensor in row[:3])
    gradient = row[0].grad.double() / DIVISOR
    mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
    square = BETAS[1] * square + (1 - BETAS[1]) * gradient.square()
    first, second = (1 - beta ** (STEPS + 1) for beta in BETAS)
    moved = RATE / first * mean / ((square / second).sqrt() + EPSILON)
    return [weight * (1 - RATE * DECAY) - moved, mean, square]


def stepper(given: list[list[Any]]) -> Callable[[float], None]:
    from shardwise.kernels.adamw_triton import Tensors

    tensors, divisor = Tensors(given), torch.tensor(DIVISOR, device=DEVICE)
    flags = {value: torch.tensor(value, device=DEVICE) for value in (0.0, 1.0)}
    how: dict[str, Any] = {"rate": RATE, "weight_decay": DECAY, "betas": BETAS, "epsilon": EPSILON}
    return lambda skipped: tensors.step(divisor, flags[skipped], **how)


@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16])
def test_a_step_is_that_of_float64_and_a_skipped_one_changes_nothing(
    low: torch.dtype | None, form: torch.dtype
) -> None:
    given = rows(low, form)
    before = [[None if one is None else one.clone() for one in row] for row in given]
    step = stepper(given)
    step(1.0)
    for row, old in zip(given, before, strict=True):
        assert all(one is None or torch.equal(one, was) for one, was in zip(row, old, strict=True))
    expected = [None if row[0].grad is None else exact(row) for row in given]
    step(0.0)
    for row, old, found in zip(given, before, expected, strict=True):
        if found is None:
            assert torch.equal(row[0], old[0])
            assert row[3].item() == STEPS
            continue
        assert row[3].item() == STEPS + 1
        for one, right in zip(row, found, strict=False):
            torch.testing.assert_close(one.double(), right, rtol=2e-6, atol=1e-6)
        assert low is None or torch.equal(row[4], row[0].to(low))


def test_no_step_waits_for_the_gpu() -> None:
    given = rows(torch.bfloat16, torch.bfloat16)
    step = stepper(given)
    step(0.0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        given[0][0].grad = given[0][0].grad.clone()  # at another address
        step(0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
