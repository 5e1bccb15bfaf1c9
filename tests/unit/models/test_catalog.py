"""The model catalog: every shape has exactly the parameters that its publisher states."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardwise.models.catalog import Shape, lookup, nearest, shapes

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "EleutherAI/gpt-neo-1.3B": 1_315_575_808,
    "pythia-160m": 162_322_944,
    "pythia-12b": 11_846_072_320,
    "facebook/opt-1.3b": 1_315_758_080,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "smollm2-135m": 134_515_008,
    "tinyllama": 1_100_048_384,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mistral-nemo-12b": 12_247_782_400,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "olmoe-1b-7b": 6_919_161_856,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "falcon-7b": 6_921_720_704,
    "gpt-j-6b": 6_050_882_784,
    "bloom-176b": 176_247_271_424,
    "olmo-2-7b": 7_298_617_344,
    "smollm3-3b": 3_075_098_624,
}


def built_parameters(shape: Shape) -> int:
    config = CONFIG_MAPPING[shape.model_type].from_dict(dict(shape.config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: shape.name)
def test_a_shape_builds_the_model_it_says(shape: Shape) -> None:
    assert built_parameters(shape) == shape.parameters


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_parameter_counts(name: str, parameters: int) -> None:
    shape = lookup(name)
    assert shape is not None
    assert shape.parameters == parameters


@pytest.mark.parametrize(
    ("size", "layers", "width"),
    [("125m", 12, 768), ("1.3b", 24, 2048), ("13b", 40, 5120), ("175b", 96, 12288)],
)
def test_gpt3_sizes_follow_from_depth_and_width(size: str, layers: int, width: int) -> None:
    shape = lookup(f"gpt3-{size}")
    assert shape is not None
    embeddings = (50257 + 2048) * width
    assert shape.parameters == embeddings + layers * (12 * width**2 + 13 * width) + 2 * width


def test_there_is_a_broad_choice() -> None:
    assert len(shapes()) >= 170
    assert len({shape.name for shape in shapes()}) == len(shapes())


def test_names_hub_ids_and_aliases_in_any_case_find_the_same_shape() -> None:
    found = {
        name: lookup(name)
        for name in ("llama-3.1-8b", "META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct")
    }
    assert found["llama-3.1-8b"] is not None
    assert len({id(shape) for shape in found.values()}) == 1
    assert lookup("llama-3.1-9b") is None


def test_no_two_shapes_share_a_name() -> None:
    keys = [
        key.casefold()
        for shape in shapes()
        for key in {shape.name, *shape.aliases, *([shape.hub] if shape.hub else [])}
    ]
    assert len(keys) == len(set(keys))


def test_a_misspelt_name_brings_its_neighbours() -> None:
    assert nearest("lama-2-7b")[0] == "llama-2-7b"
    assert nearest("HuggingFaceTB/SmolLM2-153M")[0] == "smollm2-135m"
    assert nearest("zzzz") == []


def test_the_catalog_needs_no_torch() -> None:
    code = "import sys, shardwise.models.catalog as c; c.shapes(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
