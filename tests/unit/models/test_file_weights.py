"""Files that do not hold a model's values are refused by name, and all readers take the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import CheckpointError, JobError
from shardwise.inference.load import _from_folder
from shardwise.job.schema import Lora, Model
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.fingerprint import fingerprint
from shardwise.models.source import find_source

Saved = Callable[..., Model]
Change = Callable[[torch.Tensor], torch.Tensor]


def filled(model: Model) -> BuiltModel:
    built = build_model(model, dtype=torch.float32, seed=0)
    built.weights.fill(built.model, torch.device("cpu"))
    return built


def changed(model: Model, changes: dict[str, Change]) -> Path:
    """Change tensors of the model's file."""
    file = Path(model.source) / "model.safetensors"
    tensors = load_file(file)
    tensors |= {name: change(tensors[name]).contiguous() for name, change in changes.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def refused(model: Model) -> str:
    with pytest.raises(CheckpointError) as failure:
        filled(model)
    return str(failure.value)


def configure(model: Model, **values: object) -> None:
    file = Path(model.source) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("name", ["llama", "mixtral", "glm4_moe", "gpt_neox"])
def test_a_head_that_the_config_ties_and_the_file_does_not_is_refused(saved: Saved, name: str) -> None:
    model = saved(name)
    configure(model, tie_word_embeddings=True)
    assert "two different tensors" in refused(model)
    with pytest.raises(CheckpointError, match=r"ties (lm_head|embed_out)\.weight to .*two different tensors"):
        _from_folder(Path(model.source))  # `chat` reads what `train` does
    head, embedding = (
        ("embed_out", "gpt_neox.embed_in") if name == "gpt_neox" else ("lm_head", "model.embed_tokens")
    )
    stored = load_file(Path(model.source) / "model.safetensors")
    same = stored[f"{embedding}.weight"]
    changed(model, {f"{head}.weight": lambda _: same.clone()})
    assert torch.equal(filled(model).model.get_output_embeddings().weight, same)
    assert torch.equal(_from_folder(Path(model.source)).get_output_embeddings().weight, same)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_single_file_counts_before_an_index(saved: Saved, name: str) -> None:
    model = saved(name, lora=Lora(rank=2))
    folder = Path(model.source)
    expected, print_ = load_file(folder / "model.safetensors"), fingerprint(model, find_source(model))
    others = {key: value + 1 for key, value in expected.items()}
    save_file(others, folder / "shard.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(expected, "shard.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert torch.equal(filled(model).model.lm_head.weight, expected["lm_head.weight"])
    assert fingerprint(model, find_source(model)) == print_
    (folder / "model.safetensors").unlink()
    assert torch.equal(filled(model).model.lm_head.weight, others["lm_head.weight"])
    assert fingerprint(model, find_source(model)) != print_


def test_a_config_that_names_another_file_is_refused(saved: Saved) -> None:
    model = saved("llama")
    configure(model, transformers_weights="model.safetensors")
    filled(model)
    configure(model, transformers_weights="other.safetensors")
    with pytest.raises(JobError, match=r"names another file, 'other\.safetensors'"):
        filled(model)
    build_model(model.model_copy(update={"weights": "random"}), dtype=torch.float32, seed=0)


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(("name", "key"), [("llama", "model.norm.weight"), ("mixtral", EXPERT)])
@pytest.mark.parametrize(
    ("dtype", "said"),
    [(torch.bool, "BOOL"), (torch.int64, "I64"), (torch.uint8, "U8"), (torch.complex64, "C64")],
)
def test_values_that_are_no_floating_point_numbers_are_refused(
    saved: Saved, name: str, key: str, dtype: torch.dtype, said: str
) -> None:
    model = saved(name)
    changed(model, {key: lambda tensor: tensor.to(dtype)})
    assert f"{key} has the dtype {said}, which is no floating-point format" in refused(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_floating_point_numbers_of_any_size_are_read(saved: Saved, name: str, dtype: torch.dtype) -> None:
    model = saved(name)
    stored = load_file(changed(model, {"lm_head.weight": lambda tensor: tensor.to(dtype)}))
    assert torch.equal(filled(model).model.lm_head.weight, stored["lm_head.weight"].float())


def test_a_mask_of_a_published_file_is_no_weight(saved: Saved) -> None:
    """Pythia's files hold GPT-NeoX's causal masks, which no model takes from them any more."""
    model = saved("gpt_neox")
    file = Path(model.source) / "model.safetensors"
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool)}
    save_file({**load_file(file), **mask}, file, metadata={"format": "pt"})
    filled(model)


@pytest.mark.parametrize("end", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize(
    ("name", "key"), [("llama", "model.layers.0.mlp.up_proj.weight"), ("mixtral", EXPERT)]
)
def test_scales_of_fp8_that_nothing_reads_are_refused(saved: Saved, name: str, key: str, end: str) -> None:
    model = saved(name)
    file = changed(model, {key: lambda tensor: tensor.to(torch.float8_e4m3fn)})
    scales = f"{key.removesuffix('weight')}{end}"
    save_file({**load_file(file), scales: torch.ones(1, 1)}, file, metadata={"format": "pt"})
    assert f"{scales} scales weights in fp8" in refused(model)


@pytest.mark.parametrize(
    ("name", "key"), [("llama", "model.layers.0.mlp.up_proj.weight"), ("mixtral", EXPERT)]
)
def test_a_weight_in_fp8_is_answered_with_if_it_has_its_scale(saved: Saved, name: str, key: str) -> None:
    """On a CPU transformers unpacks it, and takes a weight without a scale as it is: up to 448."""
    model = saved(name)
    folder, file = Path(model.source), Path(model.source) / "model.safetensors"
    tensors = load_file(file)
    before = {name: tensor.clone() for name, tensor in _from_folder(folder).state_dict().items()}
    for one in [
        one for one in tensors if ".layers." in one and tensors[one].dim() == 2 and "gate.w" not in one
    ]:
        scale = tensors[one].abs().max() / 448
        tensors[one] = (tensors[one] / scale).to(torch.float8_e4m3fn)
        tensors[f"{one}_scale_inv"] = scale.reshape(1, 1)
        tensors[f"{one.removesuffix('weight')}activation_scale"] = torch.ones(())
    save_file(tensors, file, metadata={"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate"]}
    configure(model, quantization_config=how)
    for one, tensor in _from_folder(folder).state_dict().items():
        assert torch.allclose(tensor.float(), before[one], rtol=0.07, atol=1e-3), one
    del tensors[f"{key}_scale_inv"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as failure:
        _from_folder(folder)
    (problem,) = failure.value.problems
    assert (problem.what, problem.where) == (f"{key} is in fp8, and nothing scales it", str(file))


def test_an_expert_of_another_shape_is_named(saved: Saved) -> None:
    model = saved("mixtral")
    changed(model, {EXPERT: lambda tensor: tensor[:8]})
    assert f"{EXPERT} has the shape [8, 32], the model needs [48, 32]" in refused(model)


def test_an_expert_that_lacks_one_of_its_tensors_is_named(saved: Saved) -> None:
    model = saved("mixtral")
    file = Path(model.source) / "model.safetensors"
    tensors = load_file(file)
    del tensors[EXPERT]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "experts.gate_up_proj is made of 4 tensors" in refused(model)
    assert "the files hold 3" in refused(model)


def test_an_index_without_metadata_is_read_or_named(saved: Saved) -> None:
    """transformers, which converts a mixture's weights, does not read it."""
    for name in ("llama", "mixtral"):
        model = saved(name)
        folder = Path(model.source)
        expected = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        index = {"weight_map": dict.fromkeys(expected, "shard.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if name == "llama":
            assert torch.equal(filled(model).model.lm_head.weight, expected["lm_head.weight"])
        else:
            assert 'add it to the file: "metadata": {}' in refused(model)
        with pytest.raises(CheckpointError, match='needs "metadata"'):
            _from_folder(folder)


def test_a_tensor_in_two_files_is_refused(saved: Saved) -> None:
    model = saved("llama")
    folder = Path(model.source)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "b.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    index["weight_map"]["model.norm.weight"] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.norm.weight is also in a.safetensors" in refused(model)


def test_weights_whose_quantization_transformers_does_not_know_are_refused(saved: Saved) -> None:
    model = saved("llama")
    key = "model.layers.0.mlp.up_proj.weight"
    file = changed(model, {key: lambda tensor: tensor.to(torch.float8_e4m3fn)})
    save_file({**load_file(file), f"{key}_scale": torch.ones(1)}, file, metadata={"format": "pt"})
    configure(model, quantization_config={"quant_method": "modelopt"})
    with pytest.raises(CheckpointError, match="scales weights in fp8"):
        _from_folder(Path(model.source))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_no_answer_comes_from_values_that_are_no_weights(saved: Saved, name: str) -> None:
    model = saved(name)
    _from_folder(Path(model.source))
    changed(model, {"model.norm.weight": lambda tensor: tensor.to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the dtype I8"):
        _from_folder(Path(model.source))
