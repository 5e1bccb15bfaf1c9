"""GELU's tanh approximation by one kernel: transformers' numbers, with a fifth of the memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.kernels.fused import fuse_gelu

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "phi": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def model(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=61, **SMALL[kind])
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


@pytest.mark.parametrize("kind", SMALL)
def test_the_step_is_that_of_transformers(kind: str) -> None:
    theirs = model(kind)
    ours = copy.deepcopy(theirs)
    fuse_gelu(ours)
    assert sum(isinstance(one, torch.nn.GELU) for one in ours.modules()) == 2
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    losses = [one(input_ids=ids, labels=ids).loss for one in (theirs, ours)]
    for loss in losses:
        loss.backward()
    # Bloom's code has sqrt(2 / pi) with eight digits, and its own backward pass
    bound = 1e-7 if kind == "bloom" else 1e-12
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=bound)
    pairs = zip(theirs.named_parameters(), ours.named_parameters(), strict=True)
    for (name, a), (other, b) in pairs:
        assert name == other
        torch.testing.assert_close(b.grad, a.grad, rtol=100 * bound, atol=bound)


def test_the_backward_pass_keeps_one_tensor_of_the_mlp() -> None:
    kept: list[list[torch.Size]] = []
    for fused in (False, True):
        one = model("gpt2")
        if fused:
            fuse_gelu(one)
        shapes: list[torch.Size] = []
        kept.append(shapes)

        def keep(tensor: torch.Tensor, into: list[torch.Size] = shapes) -> torch.Tensor:
            into.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            one(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None])
    before, after = (sum(shape[-1:] == (128,) and 9 in shape for shape in shapes) for shapes in kept)
    assert after == 4  # two blocks: what the activation and the product after it read
    assert before >= 10
