"""Saved weights: transformers and PEFT load what was trained; merging changes nothing but rounding."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, LoraModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from shardwise.errors import CheckpointError, JobError
from shardwise.job.schema import Lora, Model
from shardwise.kernels.fused import fuse_gelu
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.export import export, load_with_adapter, save_weights
from shardwise.models.fingerprint import fingerprint
from shardwise.models.tokenizer import load_tokenizer, rows_for

CPU = torch.device("cpu")
TOKENS = torch.arange(40).view(2, 20) * 2 + 3
Saved = Callable[..., Model]


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    model = Model(source="tiny-llama", weights="random", tokenizer="train", tokenizer_vocab=320)
    texts = ["hello world, how are you today? " * 30]
    return load_tokenizer(model, corpus=lambda: iter(texts), cache=tmp_path / "cache")


def make_trained(model: Model, *, dtype: torch.dtype = torch.float32, **options: Any) -> BuiltModel:
    """A model whose trainable weights were moved, as training does."""
    built = build_model(model, dtype=dtype, seed=0, **options)
    built.weights.fill(built.model, CPU)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in built.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return built


def weights(built: BuiltModel) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach()) for name, p in built.model.named_parameters() if p.requires_grad]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-tied",
        "qwen2-tied",
        "qwen3",
        "mistral",
        "phi3",
        "gemma3",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "opt",
        "mixtral",
    ],
)
def test_a_trained_model_is_loaded_by_transformers(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str
) -> None:
    built = make_trained(saved(name))
    out = tmp_path / "model"
    save_weights(built, weights(built), out, tokenizer)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    fuse_gelu(loaded)
    assert torch.equal(logits(loaded), logits(built.model))
    assert loaded.config.use_cache
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tokenizer.get_vocab()


def test_a_pretrained_model_is_saved_with_its_special_tokens(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = Model(source="gpt2", weights="random", tokenizer="train", config={"n_layer": 1, "n_embd": 24})
    built = make_trained(model, vocab_size=rows_for(model, len(tokenizer)))
    save_weights(built, weights(built), tmp_path / "model", tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.vocab_size == 320
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert loaded.generation_config.pad_token_id == tokenizer.pad_token_id


def test_the_generation_config_of_the_pretrained_model_is_kept(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = saved("llama")
    # Llama-2's is like this: transformers would refuse to write it
    text = json.dumps({"do_sample": False, "temperature": 0.9, "eos_token_id": [2, 7]})
    (Path(model.source) / "generation_config.json").write_text(text)
    built = make_trained(model)
    save_weights(built, weights(built), tmp_path / "model", tokenizer)
    assert (tmp_path / "model" / "generation_config.json").read_text() == text
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [2, 7]


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["whole", "adapter"])
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_all_files_may_be_read_by_whom_the_umask_lets(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, lora: Lora | None, umask: int, mode: int
) -> None:
    model = saved("llama", lora=lora)
    built = make_trained(model)
    before = os.umask(umask)
    try:
        save_weights(built, weights(built), tmp_path / "model", tokenizer)
        for file in (tmp_path / "model").glob("*.safetensors"):
            assert stat.S_IMODE(file.stat().st_mode) == mode
            file.chmod(0o600)  # as checkpoints had it
        export(tmp_path / "model", tmp_path / "out", merge=False, base=model)
        if lora is not None:
            export(tmp_path / "model", tmp_path / "merged", merge=True, base=model)
    finally:
        os.umask(before)
    written = [file for folder in ("out", "merged") for file in (tmp_path / folder).glob("*")]
    assert len([file for file in written if file.suffix == ".safetensors"]) == (1 if lora is None else 2)
    assert {stat.S_IMODE(file.stat().st_mode) for file in written} == {mode}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's own loading
@pytest.mark.parametrize("name", ["llama", "mixtral", "glm4_moe"])
def test_an_adapter_is_loaded_by_peft(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str
) -> None:
    model = saved(name, lora=Lora(rank=4))
    built = make_trained(model)
    out = tmp_path / "model"
    save_weights(built, weights(built), out, tokenizer)
    base = AutoModelForCausalLM.from_pretrained(model.source)
    before = logits(base)
    loaded = PeftModel.from_pretrained(base, out)
    assert torch.equal(logits(loaded), logits(built.model))
    assert not torch.allclose(logits(loaded), before, atol=1e-2)
    assert loaded.peft_config["default"].base_model_name_or_path == model.source
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".safetensors") == [
        "adapter_model.safetensors"
    ]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-tied", "gemma2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_answers_like_base_and_adapter(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    model = saved(name, lora=Lora(rank=4))
    built = make_trained(model, dtype=dtype)
    save_weights(built, weights(built), tmp_path / "model", tokenizer)
    result = export(tmp_path / "model", tmp_path / "out", merge=True, base=model)
    assert (result["kind"], result["dtype"]) == ("merged", str(dtype).removeprefix("torch."))
    assert (
        0
        <= result["max_logit_difference"]
        <= (1e-4 if dtype == torch.float32 else 6e-2) * result["max_logit"]
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=dtype, attn_implementation=built.config._attn_implementation
    )
    largest = logits(built.model).abs().max().item()
    difference = (logits(loaded) - logits(built.model)).abs().max().item()
    assert difference <= (1e-5 if dtype == torch.float32 else 6e-2) * largest
    assert loaded.dtype == dtype


def test_a_wrong_merge_is_noticed(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved("llama", lora=Lora(rank=4))
    built = make_trained(model)
    save_weights(built, weights(built), tmp_path / "model", tokenizer)
    merge = LoraModel.merge_and_unload

    def wrong(self: LoraModel, **options: Any) -> torch.nn.Module:
        for module in self.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] *= 1.1
        return merge(self, **options)

    monkeypatch.setattr(LoraModel, "merge_and_unload", wrong)
    with pytest.raises(CheckpointError, match="merging changed the logits"):
        export(tmp_path / "model", tmp_path / "out", merge=True, base=model)
    assert not (tmp_path / "out").exists()


def test_the_ranks_that_do_not_write_only_take_part(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    built = make_trained(saved("llama"))
    left = iter(weights(built))
    save_weights(built, left, tmp_path / "model", tokenizer, rank=1)
    assert next(left, None) is None
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("fault", ["missing", "empty", "cut", "extra"])
@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_weights_that_were_not_gathered_are_not_written(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, fault: str, lora: Lora | None
) -> None:
    built = make_trained(saved("llama", lora=lora))
    tensors = dict(weights(built))
    name = list(tensors)[3]
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        tensors["another.weight"] = tensors[name]
    else:
        tensors[name] = tensors[name][: 0 if fault == "empty" else 1]
    with pytest.raises(CheckpointError) as caught:
        save_weights(built, tensors.items(), tmp_path / "model", tokenizer)
    assert ("another.weight" if fault == "extra" else name) in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_export_copies_a_model_and_an_adapter(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for kind, lora in (("model", None), ("adapter", Lora(rank=4))):
        model = saved("llama", lora=lora)
        built = make_trained(model)
        save_weights(built, weights(built), tmp_path / kind, tokenizer)
        out = tmp_path / f"{kind}-out"
        written = {"kind": kind, "dtype": "float32", "out": str(out)}
        assert export(tmp_path / kind, out, merge=False, base=model) == written
        assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in (tmp_path / kind).iterdir())


def test_merging_a_whole_model_is_refused(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = saved("llama")
    built = make_trained(model)
    save_weights(built, weights(built), tmp_path / "model", tokenizer)
    with pytest.raises(JobError, match="no adapter to merge"):
        export(tmp_path / "model", tmp_path / "out", merge=True, base=model)


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_without_values_is_refused(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, merge: bool
) -> None:
    model = saved("llama", lora=Lora(rank=4))
    built = make_trained(model)
    save_weights(built, weights(built), tmp_path / "model", tokenizer)
    file = tmp_path / "model" / "adapter_model.safetensors"
    save_file({name: tensor[:0].clone() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match="holds no values"):
        export(tmp_path / "model", tmp_path / "out", merge=merge, base=model)
    file.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        export(tmp_path / "model", tmp_path / "out", merge=merge, base=model)


def test_on_another_base_than_it_was_trained_on_an_adapter_is_not_used(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = saved("llama", lora=Lora(rank=4))
    built = make_trained(model)
    save_weights(built, weights(built), tmp_path / "model", tokenizer)
    trained_on = fingerprint(model, built.found)
    load_with_adapter(tmp_path / "model", model, CPU, trained_on)
    export(tmp_path / "model", tmp_path / "out", merge=True, base=model, trained_on=trained_on)

    file = Path(model.source) / "model.safetensors"
    base = load_file(file)
    next(iter(base.values()))[-1, -1] += 0.5
    save_file(base, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"base, {model.source}, is not the one"):
        export(tmp_path / "model", tmp_path / "new", merge=True, base=model, trained_on=trained_on)
    with pytest.raises(CheckpointError, match="is not the one"):
        load_with_adapter(tmp_path / "model", model, CPU, trained_on)
    assert not (tmp_path / "new").exists()
    export(tmp_path / "model", tmp_path / "new", merge=False, base=model, trained_on=trained_on)
    load_with_adapter(tmp_path / "model", model, CPU)  # an older checkpoint does not name its base


def test_an_adapter_of_another_model_is_refused(
    saved: Saved, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = saved("llama", lora=Lora(rank=4))
    built = make_trained(model)
    save_weights(built, weights(built), tmp_path / "model", tokenizer)
    with pytest.raises(CheckpointError):
        export(tmp_path / "model", tmp_path / "out", merge=True, base=saved("mixtral", lora=Lora(rank=4)))
