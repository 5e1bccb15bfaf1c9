"""A single process: in which format gradients wait for the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.engines.single.runtime import _master


@pytest.mark.parametrize(("keeps", "form"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gradient_stays_as_it_is_or_begins_an_fp32_sum(keeps: bool, form: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    master = _master(weight, keeps=keeps)
    (2 * weight).sum().backward()
    assert master.grad is not None
    assert (weight.grad, master.grad.dtype, master.grad.tolist()) == (None, form, [2.0] * 3)
