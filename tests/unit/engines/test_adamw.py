from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engines.runtime.adamw import INITIAL_LOSS_SCALE, AdamW
from shardwise.engines.runtime.parameters import Group
from shardwise.job.schema import Optimizer

SETTINGS = Optimizer(learning_rate=1e-2, weight_decay=0.1)
EIGHT_BIT = SETTINGS.model_copy(update={"name": "adamw8bit"})
LOSS = torch.tensor(2.0)


def make(
    *, clip_norm: float = 0.0, fp16: bool = False, settings: Optimizer = SETTINGS, rows: int = 5
) -> tuple[AdamW, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "matrix": torch.randn(rows, 3, generator=generator),
        "vector": torch.randn(4, generator=generator),
    }
    optimizer = AdamW(
        weights,
        {"matrix": Group(settings.weight_decay), "vector": Group(0.0, settings.lora_plus)},
        settings,
        clip_norm=clip_norm,
        fp16=fp16,
        sharded=False,
        device=torch.device("cpu"),
    )
    return optimizer, weights


def set_gradients(
    weights: dict[str, torch.Tensor], *, step: int = 0, scale: float = 1.0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    for p in weights.values():
        p.grad = scale * torch.randn(p.shape, generator=generator)
    return [p.grad for p in weights.values() if p.grad is not None]


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 100.0])
def test_it_takes_the_steps_of_torch_with_clip_grad_norm(clip_norm: float) -> None:
    optimizer, weights = make(clip_norm=clip_norm)
    expected = {name: p.clone().requires_grad_() for name, p in weights.items()}
    plain = torch.optim.AdamW(
        [
            {"params": [expected["matrix"]], "weight_decay": 0.1},
            {"params": [expected["vector"]], "weight_decay": 0.0},
        ],
        betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.epsilon,
    )
    for step, rate in enumerate((1e-2, 5e-3, 1e-3)):
        set_gradients(weights, step=step)
        gradients = set_gradients(expected, step=step)
        norm = torch.nn.utils.clip_grad_norm_(expected.values(), clip_norm or float("inf"))
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
        result = optimizer.step(LOSS, learning_rate=rate)
        assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert result.loss.item() == 2.0
        assert result.skipped.item() == 0.0
        assert len(gradients) == 2
    for name, p in weights.items():
        torch.testing.assert_close(p, expected[name].detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_in_8_bits_it_takes_the_steps_of_bitsandbytes(clip_norm: float) -> None:
    """7000 x 3 is stepped in 8 bits, in 82 full blocks and a shorter one; the small vector is not."""
    from bitsandbytes.optim import AdamW8bit

    optimizer, weights = make(clip_norm=clip_norm, settings=EIGHT_BIT, rows=7000)
    expected = {name: p.clone().requires_grad_() for name, p in weights.items()}
    plain = AdamW8bit(
        [
            {"params": [expected["matrix"]], "weight_decay": 0.1},
            {"params": [expected["vector"]], "weight_decay": 0.0},
        ],
        betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.epsilon,
    )
    for step, rate in enumerate((1e-2, 5e-3, 1e-3)):
        set_gradients(weights, step=step)
        set_gradients(expected, step=step)
        torch.nn.utils.clip_grad_norm_(expected.values(), clip_norm or float("inf"))
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
        optimizer.step(LOSS, learning_rate=rate)
    for name, p in weights.items():
        torch.testing.assert_close(p, expected[name].detach(), rtol=1e-5, atol=1e-6)
    state = optimizer.state()
    theirs = plain.state[expected["matrix"]]
    assert state["state1/matrix"].dtype == state["state2/matrix"].dtype == torch.uint8
    assert state["absmax1/matrix"].shape == theirs["absmax1"].shape == (83,)
    assert state["state1/vector"].dtype == torch.float32
    assert state["step/matrix"].item() == theirs["step"] == 3
    same = (state["state1/matrix"] == theirs["state1"]).float().mean()
    assert same > 0.999, "a code on the border of two may round either way"


def test_in_8_bits_a_restored_state_goes_on_the_same() -> None:
    first, weights = make(clip_norm=1.0, settings=EIGHT_BIT, rows=2000)
    second, others = make(clip_norm=1.0, settings=EIGHT_BIT, rows=2000)
    for step in range(2):
        set_gradients(weights, step=step)
        first.step(LOSS, learning_rate=1e-2)
    saved = first.state()
    for name, tensor in second.state().items():
        tensor.copy_(saved[name])
    for optimizer, parameters in ((first, weights), (second, others)):
        set_gradients(parameters, step=2)
        optimizer.step(LOSS, learning_rate=1e-2)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_lora_plus_multiplies_the_rate_of_its_group() -> None:
    """With beta1 = beta2 = 0 a step is the rate times the gradient's sign."""
    plus = SETTINGS.model_copy(update={"lora_plus": 16.0, "weight_decay": 0.0, "beta1": 0.0, "beta2": 0.0})
    optimizer, weights = make(settings=plus)
    before = {name: p.clone() for name, p in weights.items()}
    set_gradients(weights)
    optimizer.step(LOSS, learning_rate=1e-3)
    moved = {name: (p - before[name]).abs() for name, p in weights.items()}
    torch.testing.assert_close(moved["matrix"], torch.full((5, 3), 1e-3), rtol=1e-3, atol=0)
    torch.testing.assert_close(moved["vector"], torch.full((4,), 1.6e-2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("settings", [SETTINGS, EIGHT_BIT], ids=["fp32", "8bit"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_stops_the_rest(
    where: str, bad: float, settings: Optimizer
) -> None:
    optimizer, weights = make(clip_norm=1.0, settings=settings, rows=1400)
    set_gradients(weights)
    optimizer.step(LOSS, learning_rate=1e-2)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    gradients = set_gradients(weights, step=1)
    if where == "gradient":
        gradients[0][0, 0] = bad
    result = optimizer.step(torch.tensor(bad) if where == "loss" else LOSS, learning_rate=1e-2)
    set_gradients(weights, step=2)
    later = optimizer.step(LOSS, learning_rate=1e-2)
    assert (result.skipped.item(), later.skipped.item()) == (1.0, 1.0)
    after = optimizer.state()
    assert after.pop("guard/stopped").item() == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_fp16_halves_the_scale_on_overflow_skips_that_step_only_and_grows_again() -> None:
    optimizer, weights = make(clip_norm=1.0, fp16=True)
    exact, expected = make(clip_norm=1.0)
    set_gradients(weights)[0][0, 0] = float("inf")
    before = weights["vector"].clone()
    result = optimizer.step(LOSS, learning_rate=1e-2)
    assert result.loss_scale is not None
    assert (result.skipped.item(), result.loss_scale.item()) == (1.0, INITIAL_LOSS_SCALE)
    assert torch.equal(weights["vector"], before)

    set_gradients(weights, scale=INITIAL_LOSS_SCALE / 2)
    result = optimizer.step(LOSS, learning_rate=1e-2)
    set_gradients(expected)
    plain = exact.step(LOSS, learning_rate=1e-2)
    assert result.loss_scale is not None
    assert (result.skipped.item(), result.loss_scale.item()) == (0.0, INITIAL_LOSS_SCALE / 2)
    assert result.grad_norm.item() == pytest.approx(plain.grad_norm.item(), rel=1e-6)
    for name, p in weights.items():
        torch.testing.assert_close(p, expected[name], rtol=1e-6, atol=1e-7)

    optimizer.growth.fill_(1999)
    set_gradients(weights)
    optimizer.step(LOSS, learning_rate=1e-2)
    assert optimizer.loss_scale.item() == INITIAL_LOSS_SCALE


class NoRead(TorchDispatchMode):
    """Fails where the host reads a number, which on a GPU waits for all the work before it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("fp16", [False, True])
def test_no_step_waits_for_the_device(fp16: bool) -> None:
    optimizer, weights = make(clip_norm=1.0, fp16=fp16)
    set_gradients(weights)
    with NoRead():
        result = optimizer.step(LOSS, learning_rate=1e-2)
    assert (result.loss_scale is not None) == fp16


def test_the_norm_is_of_gradients_wherever_they_lie() -> None:
    """Offloaded shards on the host and fp32 parameters on the device; `meta` stands for a GPU."""
    optimizer, weights = make()
    gradients = set_gradients(weights)
    assert optimizer._sum_of_squares() == pytest.approx(sum(g.square().sum().item() for g in gradients))
    optimizer.device = torch.device("meta")
    optimizer.parameters["fp32"] = torch.empty(3, device="meta")
    optimizer.parameters["fp32"].grad = torch.empty(3, device="meta")
    assert optimizer._sum_of_squares().device.type == "meta"


def halves(weights: dict[str, torch.Tensor], *, step: int = 0) -> None:
    """Gradients in bf16."""
    for p, gradient in zip(weights.values(), set_gradients(weights, step=step), strict=True):
        p.grad_dtype, p.grad = None, gradient.bfloat16()


def test_the_norm_of_gradients_in_bf16_is_not_rounded_to_bf16() -> None:
    optimizer, weights = make(rows=7000)
    halves(weights)
    exact = sum(p.grad.double().square().sum().item() for p in weights.values() if p.grad is not None)
    assert optimizer._sum_of_squares().item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("settings", [SETTINGS, EIGHT_BIT], ids=["fp32", "8bit"])
def test_gradients_in_bf16_step_as_the_same_in_fp32_and_rounded_weights_follow(settings: Optimizer) -> None:
    _, weights = make(settings=settings, rows=1400)
    low = {name: p.bfloat16() for name, p in weights.items()}
    others = {name: p.clone() for name, p in weights.items()}
    group = {"matrix": Group(settings.weight_decay), "vector": Group(0.0)}
    how: dict[str, Any] = {"clip_norm": 1.0, "fp16": False, "sharded": False, "device": torch.device("cpu")}
    first = AdamW(weights, group, settings, rounded=low, **how)
    second = AdamW(others, group, settings, **how)
    for step in range(2):
        halves(weights, step=step)
        for p, other in zip(weights.values(), others.values(), strict=True):
            assert p.grad is not None
            other.grad = p.grad.float()
        results = [one.step(LOSS, learning_rate=1e-2) for one in (first, second)]
        assert results[0].grad_norm.item() == pytest.approx(results[1].grad_norm.item(), rel=1e-5)
    for name, p in weights.items():
        torch.testing.assert_close(p, others[name], rtol=1e-5, atol=1e-7)
        assert torch.equal(low[name], p.bfloat16())
        p.add_(1.0)
    first.round()
    assert all(torch.equal(low[name], p.bfloat16()) for name, p in weights.items())
