"""Filling a model from the meta device: the file's values, or a proper initialisation, in any order."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from shardwise.errors import CheckpointError, JobError
from shardwise.job.schema import Lora, Model
from shardwise.kernels.fused import fuse_gelu
from shardwise.models.build import BuiltModel, build_model

CPU = torch.device("cpu")
ARCHITECTURES = (
    "llama",
    "llama-tied",
    "qwen2-tied",
    "qwen3",
    "mistral",
    "phi3",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "opt",
    "mixtral",
)
TOKENS = torch.arange(40).view(2, 20) * 2 + 3
Saved = Callable[..., Model]


def build(model: Model, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> BuiltModel:
    return build_model(model, dtype=dtype, seed=seed)


def fill(built: BuiltModel, *, by_block: bool = False) -> dict[str, torch.Tensor]:
    parts = (*reversed(built.blocks), built.model) if by_block else (built.model,)
    for part in parts:
        built.weights.fill(part, CPU)
    built.model.eval()
    return built.model.state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_file_weights_are_what_from_pretrained_loads(saved: Saved, name: str, dtype: torch.dtype) -> None:
    model = saved(name)
    built = build(model, dtype=dtype)
    mine = fill(built, by_block=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        model.source, dtype=dtype, attn_implementation=built.config._attn_implementation
    ).eval()
    assert equal(mine, theirs.state_dict())
    for (buffer_name, mine_buffer), (_, buffer) in zip(
        built.model.named_buffers(), theirs.named_buffers(), strict=True
    ):
        assert torch.equal(mine_buffer, buffer), buffer_name
    with torch.no_grad():
        fuse_gelu(theirs)
        assert torch.equal(built.model(TOKENS).logits, theirs(TOKENS).logits)
    assert built.weights.verify(built.model.named_parameters()) == len(list(theirs.parameters()))
    kept = [weakref.ref(tensor) for tensor in (getattr(built.weights.source, "_state", None) or {}).values()]
    assert bool(kept) == (name in ("gpt_neox", "mixtral")), "what transformers converts is kept whole"
    built.weights.source.release()
    gc.collect()
    assert [ref for ref in kept if ref() is not None] == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_do_not_depend_on_the_order(config_folder: Callable[[str], str], name: str) -> None:
    model = Model(source=config_folder(name), weights="random")
    state = torch.random.get_rng_state()
    whole = fill(build(model))
    torch.manual_seed(7)
    assert equal(whole, fill(build(model), by_block=True))
    assert not equal(whole, fill(build(model, seed=1)))
    rounded = {key: value.bfloat16() for key, value in whole.items()}
    assert equal(rounded, fill(build(model, dtype=torch.bfloat16)))
    torch.random.set_rng_state(state)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_have_the_architecture_s_distribution(
    config_folder: Callable[[str], str], name: str
) -> None:
    built = build(Model(source=config_folder(name), weights="random"))
    mine = fill(built)
    torch.manual_seed(3)
    theirs = type(built.skeleton)._from_config(built.skeleton.config).state_dict()
    for key, value in theirs.items():
        std, mean = value.std().item(), value.mean().item()
        assert mine[key].std().item() == pytest.approx(std, rel=0.2, abs=1e-6), key
        assert mine[key].mean().item() == pytest.approx(mean, abs=0.2 * std + 1e-6), key
        if value.ndim == 2:  # the padding token's embedding is zero, also where it is tied
            assert torch.equal(mine[key].eq(0).all(1), value.eq(0).all(1)), key
    with torch.no_grad():
        loss = built.model(TOKENS, labels=TOKENS).loss.item()
    assert loss == pytest.approx(math.log(320), rel=0.05)


def test_filling_a_block_initialises_no_other(config_folder: Callable[[str], str]) -> None:
    built = build(Model(source=config_folder("llama"), weights="random"))
    initialise, seen = built.skeleton.model._init_weights, []

    def record(module: nn.Module) -> None:
        seen.append(module)
        initialise(module)

    built.skeleton.model._init_weights = record
    built.weights.fill(built.blocks[1], CPU)
    assert set(seen) == set(built.skeleton.model.layers[1].modules())


def test_a_seed_leaves_the_global_generator_alone(config_folder: Callable[[str], str]) -> None:
    built = build(Model(source=config_folder("llama"), weights="random", lora=Lora(rank=2)))
    before = torch.random.get_rng_state()
    fill(built)
    assert torch.equal(before, torch.random.get_rng_state())


def test_blocks_hold_values_only_once_filled(saved: Saved) -> None:
    built = build(saved("llama-tied"))
    assert all(p.is_meta for p in built.model.parameters())
    built.weights.fill(built.blocks[1], CPU)
    assert not any(p.is_meta for p in built.blocks[1].parameters())
    assert all(p.is_meta for p in built.blocks[0].parameters())
    first = next(built.blocks[1].parameters())
    fill(built)
    assert next(built.blocks[1].parameters()) is first
    assert built.model.lm_head.weight is built.model.model.embed_tokens.weight


def test_filling_the_head_alone_fills_the_embedding_it_is_tied_to(saved: Saved) -> None:
    built = build(saved("qwen2-tied"))
    built.weights.fill(built.model.lm_head, CPU)
    assert built.model.model.embed_tokens.weight is built.model.lm_head.weight
    assert not built.model.lm_head.weight.is_meta


def test_what_another_engine_object_wraps_is_filled_too(saved: Saved) -> None:
    built = build(saved("gpt2"))
    built.weights.fill(nn.ModuleDict({"inner": built.model}), CPU)
    assert not any(p.is_meta for p in built.model.parameters())


@pytest.mark.parametrize("way", ["without", "twice"])
def test_the_base_model_s_prefix_may_be_missing_or_doubled(saved: Saved, way: str) -> None:
    model = saved("gpt2")
    expected = fill(build(model))
    file = Path(model.source) / "model.safetensors"
    stored = load_file(file)
    if way == "without":
        save_file({key.removeprefix("transformer."): value for key, value in stored.items()}, file)
    else:
        save_file({f"transformer.{key}": value for key, value in stored.items()}, file)
    assert equal(expected, fill(build(model)))


def test_weights_in_several_files_are_found_through_the_index(saved: Saved) -> None:
    model = saved("llama")
    expected = fill(build(model))
    folder = Path(model.source)
    stored = load_file(folder / "model.safetensors")
    names = sorted(stored)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: stored[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    assert equal(expected, fill(build(model)))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_a_damaged_checkpoint(saved: Saved, text: str) -> None:
    model = saved("llama")
    (Path(model.source) / "model.safetensors").rename(Path(model.source) / "model.safetensors.index.json")
    (Path(model.source) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index of the weights cannot be read"):
        build(model)


def test_a_missing_and_a_misshapen_tensor_are_named(saved: Saved) -> None:
    model = saved("llama")
    file = Path(model.source) / "model.safetensors"
    stored = load_file(file)
    del stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.norm.weight"] = torch.zeros(7)
    save_file(stored, file)
    with pytest.raises(CheckpointError) as caught:
        build(model)
    text = "\n".join(problem.what for problem in caught.value.problems)
    assert "model.layers.1.mlp.up_proj.weight of shape [48, 32] is missing" in text
    assert "model.norm.weight has the shape [7], the model needs [32]" in text


def test_a_truncated_file_is_a_damaged_checkpoint(saved: Saved) -> None:
    model = saved("llama")
    file = Path(model.source) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError) as caught:
        build(model)
    assert caught.value.problems[0].where == str(file)


def test_tied_weights_that_differ_in_the_file_are_refused(saved: Saved) -> None:
    model = saved("llama-tied")
    file = Path(model.source) / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight"):
        fill(build(model))


def test_tensors_without_a_place_are_reported(saved: Saved) -> None:
    model = saved("llama")
    file = Path(model.source) / "model.safetensors"
    save_file({**load_file(file), "model.extra.weight": torch.zeros(1)}, file)
    assert build(model).notes == [
        "the model has no place for 1 of the files' tensors, e.g. model.extra.weight"
    ]


def test_verify_notices_a_single_changed_value(saved: Saved) -> None:
    built = build(saved("llama"))
    fill(built)
    with torch.no_grad():
        built.model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    with pytest.raises(CheckpointError) as caught:
        built.weights.verify(built.model.named_parameters())
    assert caught.value.problems[0].where == "model.layers.1.mlp.up_proj.weight"


def test_adapters_start_as_peft_starts_them_and_change_nothing(saved: Saved) -> None:
    plain = saved("llama")
    lora = plain.model_copy(update={"lora": Lora(rank=4)})
    built = build(lora)
    mine = fill(built, by_block=True)
    assert equal(mine, fill(build(lora)))
    assert not equal(mine, fill(build(lora, seed=1)))
    layer = built.model.model.layers[0].mlp.up_proj
    assert isinstance(layer, LoraLayer)
    a = layer.lora_A["default"].weight.detach().clone()
    layer.reset_lora_parameters("default", True)
    assert a.std().item() == pytest.approx(layer.lora_A["default"].weight.std().item(), rel=0.2)
    assert a.abs().max().item() == pytest.approx(1 / math.sqrt(32), rel=0.1)
    base = build(plain)
    fill(base)
    with torch.no_grad():
        assert torch.equal(built.model(TOKENS).logits, base.model(TOKENS).logits)


def test_gpt2_with_adapters_keeps_its_scaled_residual_projections(
    config_folder: Callable[[str], str],
) -> None:
    source = config_folder("gpt2")
    plain = fill(build(Model(source=source, weights="random")))
    lora = fill(build(Model(source=source, weights="random", lora=Lora(rank=2))))
    assert torch.equal(
        plain["transformer.h.1.mlp.c_proj.weight"], lora["transformer.h.1.mlp.c_proj.base_layer.weight"]
    )


def test_pickled_weights_are_refused(saved: Saved) -> None:
    model = saved("llama")
    folder = Path(model.source)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(JobError, match=r"pytorch_model\.bin, which can run code"):
        build(model)
