"""Each kind of attention at a real width in bf16, against transformers' eager attention in fp32.

Mamba, which has modules of its own, is in `test_mamba`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from packed_rows import one_by_one, packed
from shardwise.data.batch import IGNORED
from shardwise.kernels.fused import apply_fused_kernels
from shardwise.models.catalog import lookup
from shardwise.models.families import attention_of, liger_kernels
from shardwise.objective.causal_lm import CausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = torch.device("cuda")
MODELS: dict[str, dict[str, Any]] = {
    "falcon-7b": {"num_hidden_layers": 2},
    "gpt-j-6b": {"n_layer": 2},
    "gpt-neo-1.3b": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "bloom-1b7": {"n_layer": 2},
    "mpt-7b": {"n_layers": 2},
    "gemma-2-2b": {"num_hidden_layers": 2},
    "gpt-oss-20b": {"num_hidden_layers": 2},
    "deepseek-v2-lite": {"num_hidden_layers": 2},
    "olmo-2-7b": {"num_hidden_layers": 2},
    "mixtral-8x7b": {"num_hidden_layers": 2},
    "qwen3-30b-a3b": {"num_hidden_layers": 2},
    "llama-3.1-8b": {"num_hidden_layers": 2},
}
MAMBA_2 = {"model_type": "mamba2", "hidden_size": 1024, "num_hidden_layers": 2, "num_heads": 32}
"""Of mamba2-370m: the reference of transformers keeps 32 GiB at 64 heads."""
LENGTHS = (700, 37, 287, 1024)


def config_of(name: str) -> Any:
    if name == "mamba2":
        return AutoConfig.for_model(**MAMBA_2)
    shape = lookup(name)
    assert shape is not None
    return AutoConfig.for_model(**{**shape.hf_config(), **MODELS[name]})


def samples(vocabulary: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, vocabulary, (length,), generator=generator) for length in LENGTHS]
    return [(ids, torch.cat([ids[1:], torch.tensor([IGNORED])])) for ids in drawn]


def gradient(model: PreTrainedModel) -> torch.Tensor:
    found = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", [*MODELS, "mamba2"])
def test_the_step_is_as_close_to_fp32_as_that_of_transformers_in_bf16(name: str) -> None:
    config = config_of(name)
    pairs = samples(config.vocab_size)
    torch.manual_seed(0)
    with DEVICE:
        exact = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    half = copy.deepcopy(exact).to(torch.bfloat16)
    on_gpu = [(ids.to(DEVICE), labels.to(DEVICE)) for ids, labels in pairs]
    expected = one_by_one(exact, on_gpu)
    expected.backward()
    right = gradient(exact)

    one_by_one(half, on_gpu).backward()
    theirs = (gradient(half).sub_(right).norm() / right.norm()).item()

    can_pack = attention_of(half.config).packing != "rows"
    rows = ((0, 1, 2), (3,)) if can_pack else tuple((number,) for number in range(len(LENGTHS)))
    apply_fused_kernels(half, DEVICE, liger=liger_kernels(half.config))
    loss = CausalLM(half, packed=can_pack)
    found = loss(packed(pairs, rows=rows, length=max(LENGTHS)).to(DEVICE))
    found.backward()
    ours = (gradient(half).sub_(right).norm() / right.norm()).item()
    difference = found.item() / expected.item() - 1
    print(
        f"{name}: {attention_of(half.config).packing}, loss {difference:+.1e}, "
        f"gradient {ours:.1e}, transformers' {theirs:.1e}"
    )
    assert abs(difference) <= 1e-3
    assert ours <= max(2e-2, 1.3 * theirs)
