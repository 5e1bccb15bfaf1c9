"""Two passes of one micro-batch give the same bits, and leave no trace; a changed bit is found."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import JobError, MachineError
from shardwise.training.replay import EVERY, Replay

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}
MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}


class Batch:
    """As much of a micro-batch as a model of transformers needs."""

    def __init__(self) -> None:
        self.input_ids = torch.randint(0, 512, (4, 256), generator=torch.Generator().manual_seed(1))

    def to(self, _: object) -> Batch:
        return self


def replay(monkeypatch: pytest.MonkeyPatch, kind: str, every: str = "5", **config: Any) -> tuple[Replay, Any]:
    monkeypatch.setenv(EVERY, every)
    torch.manual_seed(0)
    model: Any = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **config)).float().train()
    )

    def loss(batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch.input_ids, labels=batch.input_ids).loss
        return found

    world = SimpleNamespace(device=torch.device("cpu"), rank=0, size=1)
    engine: Any = SimpleNamespace(world=world, apart=lambda: nullcontext(loss))
    ranks: Any = SimpleNamespace(gather=lambda value: [value])
    return Replay(model, engine, ranks, pipeline=False), model


def step() -> Any:
    return SimpleNamespace(micro_batches=[Batch()])


@pytest.mark.parametrize(
    ("kind", "config"),
    [("llama", {"attention_dropout": 0.5}), ("qwen2_moe", MOE)],
    ids=["dropout", "sums in changing order"],
)
def test_sound_passes_are_alike_and_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch, kind: str, config: dict[str, Any]
) -> None:
    """The experts' sums of qwen2_moe have another order each time, unless torch is asked for one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4 if kind == "qwen2_moe" else threads)
    try:
        check, model = replay(monkeypatch, kind, **config)
        state = torch.get_rng_state()
        for number in range(10):
            check.check(5 * number, step())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())
    assert not torch.are_deterministic_algorithms_enabled()
    assert not any(module._forward_hooks for module in model.modules())


def test_on_a_gpu_gradients_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention adds them up in changing order; what modules return is compared all the same."""
    check, model = replay(monkeypatch, "llama")
    check._gradients = False
    layer, noise = model.model.layers[1].mlp, torch.Generator().manual_seed(0)
    hook = layer.register_full_backward_hook(
        lambda _, grads, __: (grads[0] + torch.rand((), generator=noise),)
    )
    check.check(5, step())
    hook.remove()
    calls: list[int] = []

    def flip(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * (1.0 + 2**-20) if len(calls) == 2 else output

    layer.register_forward_hook(flip)
    with pytest.raises(MachineError, match=r"what model\.layers\.1"):
        check.check(10, step())


def test_one_changed_bit_of_one_gradient_is_found_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    check, model = replay(monkeypatch, "llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    calls: list[int] = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        changed = gradient.clone()
        changed.view(torch.int32)[3, 7] ^= int(len(calls) == 2)
        return changed

    weight.register_hook(spoil)
    check.check(4, step())
    assert calls == []
    with pytest.raises(
        MachineError, match=r"the gradient of model\.layers\.0\.mlp\.up_proj\.weight has other bits"
    ):
        check.check(5, step())


@pytest.mark.parametrize("every", ["often", "-1", "0.5"])
def test_what_is_no_number_of_steps_is_refused(monkeypatch: pytest.MonkeyPatch, every: str) -> None:
    with pytest.raises(JobError, match="is no number of steps"):
        replay(monkeypatch, "llama", every)
