"""What an operator costs, from the shapes and strides of its tensors."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.target import HOPPER
from shardwise.simulate.step_trace import Op
from shardwise.trace.recorder import Recorder

META = torch.device("meta")


def values(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=META, dtype=torch.bfloat16, requires_grad=True)


def recorded(action) -> list[Op]:
    recorder = Recorder(HOPPER)
    with recorder:
        action()
    return list(recorder.ops)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_share_the_tokens_in_all_three_of_their_products(dtype: torch.dtype) -> None:
    experts, tokens, k, n = 8, 1024, 64, 96
    x, w = (values(*shape).detach().to(dtype).requires_grad_() for shape in ((tokens, k), (experts, k, n)))
    ends = torch.empty(experts, device=META, dtype=torch.int32)

    def step() -> None:
        out = torch._grouped_mm(x, w, offs=ends)
        out.backward(torch.empty_like(out))

    found = [op for op in recorded(step) if op.name == "_grouped_mm"]
    assert {op.item_bytes for op in found} == {x.element_size()}
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert {op.flops for op in found} == {2.0 * tokens * k * n}
    assert len(found) == 3
    assert all(op.shape[:2] == (experts, tokens // experts) for op in found)
    assert all(sorted(op.shape[2:]) == [k, n] for op in found)


def test_every_second_element_is_read_with_the_one_between() -> None:
    x = values(512, 128).detach()
    (dense,) = recorded(lambda: x[:, :64].clamp(min=0))
    (spread,) = recorded(lambda: x[:, ::2].clamp(min=0))
    assert dense.read_bytes == 512 * 64 * 2
    assert spread.read_bytes == 2 * dense.read_bytes
    (turned,) = recorded(lambda: x.t().clamp(min=0))
    assert turned.read_bytes == 512 * 128 * 2
