"""A quantised base: which layers, filled from where, with adapters around, saved, merged, and refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerBase

from shardwise.errors import CheckpointError, JobError, MachineError
from shardwise.job.schema import Lora, Model
from shardwise.kernels.quantized_linear import LAYERS, QuantizedLinear
from shardwise.models.adapters import check_bitsandbytes, dequantize_linears, is_adapter
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.export import export, load_with_adapter, save_weights
from shardwise.models.tokenizer import load_tokenizer

pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
TOKENS = torch.arange(40).view(2, 20) * 2 + 3
Saved = Callable[..., Model]
KINDS = list(LAYERS)
# transformers asks bitsandbytes and accelerate for a device while it loads
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def make(model: Model, *, dtype: torch.dtype = torch.bfloat16, by_block: bool = False) -> BuiltModel:
    built = build_model(model, dtype=dtype, seed=0)
    for part in (*reversed(built.blocks), built.model) if by_block else (built.model,):
        built.weights.fill(part, CPU)
    return built


def quantized(built: BuiltModel) -> dict[str, QuantizedLinear]:
    return {
        name.replace(".base_layer", ""): module
        for name, module in built.model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def dequantized(theirs: nn.Module) -> torch.Tensor:
    """The weight of a layer of bitsandbytes, in bf16."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    state = getattr(theirs.weight, "quant_state", None)
    if state is None:
        return dequantize_bnb_weight(theirs.weight, theirs.state).bfloat16()
    # a block a row: of rows that cut blocks, bitsandbytes 0.50 makes wrong weights where there is AVX-512
    shape, state.shape = state.shape, torch.Size([state.shape.numel() // 64, 64])
    return dequantize_bnb_weight(theirs.weight, state).bfloat16().view(shape)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "phi3", "gemma3", "gpt2", "gpt_neo", "opt"])
def test_layers_and_weights_are_those_of_transformers(saved: Saved, name: str, kind: str) -> None:
    """from_pretrained with a BitsAndBytesConfig quantises the same layers to the same weights."""
    model = saved(name, lora=Lora(rank=2), quantization=kind)
    built = make(model, by_block=True)
    config = (
        BitsAndBytesConfig(load_in_8bit=True)
        if kind == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        model.source, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    ).train()
    mine = quantized(built)
    classes = ("Linear8bitLt", "Linear4bit")
    assert mine.keys() == {n for n, m in theirs.named_modules() if type(m).__name__ in classes}
    for full_name, layer in mine.items():
        assert torch.equal(layer.dequantized(), dequantized(theirs.get_submodule(full_name))), full_name
    assert built.weights.verify(built.model.named_parameters()) == len(list(built.skeleton.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_base_is_the_unquantised_one_rounded(config_folder: Callable[[str], str], kind: str) -> None:
    plain = Model(source=config_folder("gpt2"), weights="random", lora=Lora(rank=2))
    exact = make(plain).model.state_dict()
    built = make(plain.model_copy(update={"quantization": kind}), by_block=True)
    for name, layer in quantized(built).items():
        assert layer.holds(exact[f"{name}.base_layer.weight"], layer.weight), name
    for name, parameter in built.model.named_parameters():
        if "base_layer.weight" not in name:
            assert torch.equal(parameter, exact[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_are_trained_and_counted_as_before(
    config_folder: Callable[[str], str], kind: str
) -> None:
    plain = Model(source=config_folder("llama"), weights="random", lora=Lora(rank=2))
    bf16 = build_model(plain, dtype=torch.bfloat16, seed=0)
    low = make(plain.model_copy(update={"quantization": kind}))
    assert (low.total, low.trainable) == (bf16.total, bf16.trainable)
    assert low.trainable_shapes == bf16.trainable_shapes
    assert all(p.requires_grad == is_adapter(name) for name, p in low.model.named_parameters())
    assert {p.dtype for name, p in low.model.named_parameters() if is_adapter(name)} == {torch.bfloat16}


def test_weights_that_were_not_loaded_are_noticed(saved: Saved) -> None:
    built = make(saved("llama", lora=Lora(rank=2), quantization="nf4"))
    name = "model.layers.1.mlp.up_proj.base_layer.weight"
    packed = built.model.get_parameter(name)
    with pytest.raises(CheckpointError, match="differs from the one that was loaded"):
        built.weights.verify([(name, packed.flip(0))])


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    model = Model(source="tiny-llama", weights="random", tokenizer="train", tokenizer_vocab=320)
    texts = ["hello world, how are you today? " * 30]
    return load_tokenizer(model, corpus=lambda: iter(texts), cache=tmp_path / "cache")


def train(built: BuiltModel) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for name in built.trainable_shapes:
            parameter = built.model.get_parameter(name)
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_adapter_goes_on_the_unquantised_base_and_merges(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str, kind: str
) -> None:
    model = saved(name, lora=Lora(rank=4), quantization=kind)
    built = make(model, dtype=torch.float32)
    train(built)
    trained = [(n, p.detach()) for n, p in built.model.named_parameters() if p.requires_grad]
    save_weights(built, trained, tmp_path / "model", tokenizer)
    built.model.eval()

    base = AutoModelForCausalLM.from_pretrained(model.source)
    untrained = logits(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "model").eval()
    assert loaded.peft_config["default"].fan_in_fan_out == (name == "gpt2")
    # what quantising moves is less than what training moved
    moved = (logits(built.model) - untrained).norm()
    assert (logits(loaded) - logits(built.model)).norm() < (0.1 if kind == "int8" else 0.6) * moved

    again = load_with_adapter(tmp_path / "model", model, CPU)
    assert torch.equal(logits(again.model), logits(built.model))

    result = export(tmp_path / "model", tmp_path / "out", merge=True, base=model)
    assert result["kind"] == "merged"
    assert result["max_logit_difference"] < 1e-4 * result["max_logit"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(logits(merged), logits(built.model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_layers_compute_what_the_quantised_ones_did(saved: Saved, kind: str) -> None:
    built = make(saved("gpt2", lora=Lora(rank=4), quantization=kind), dtype=torch.float32)
    train(built)
    built.model.eval()
    before = logits(built.model)
    dequantize_linears(built.model)
    assert not quantized(built)
    assert torch.allclose(logits(built.model), before, rtol=1e-5, atol=1e-5)


def test_a_layer_whose_codes_do_not_fill_numbers_is_refused(config_folder: Callable[[str], str]) -> None:
    config = {"hidden_size": 6, "intermediate_size": 7, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = Model(
        source=config_folder("llama"),
        weights="random",
        config=config | {"head_dim": 6},
        lora=Lora(rank=2),
        quantization="nf4",
    )
    with pytest.raises(JobError, match="gate_proj, 7 x 6, do not fill"):
        build_model(model, dtype=torch.bfloat16, seed=0)
    odd = model.model_copy(update={"quantization": "int8", "config": config | {"head_dim": 6}})
    with pytest.raises(JobError, match="down_proj, 6 x 7, do not fill"):
        build_model(odd, dtype=torch.bfloat16, seed=0)


def test_a_missing_bitsandbytes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(source="gpt2", lora=Lora(), quantization="int8")
    check_bitsandbytes(model)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    check_bitsandbytes(model.model_copy(update={"quantization": "none"}))
    with pytest.raises(MachineError, match="cannot be imported") as error:
        check_bitsandbytes(model)
    assert error.value.exit_code == 4
    assert "pip install bitsandbytes" in error.value.problems[0].fix


def test_kernels_that_are_not_for_this_machine_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import cextension

    failed = cextension.ErrorHandlerMockBNBNativeLibrary("no such library")
    monkeypatch.setattr(cextension, "lib", failed)
    with pytest.raises(MachineError, match="has no kernels for this machine's CPU"):
        check_bitsandbytes(Model(source="gpt2", lora=Lora(), quantization="nf4"))
