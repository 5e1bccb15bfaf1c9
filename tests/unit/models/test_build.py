"""Building a job's model: where it comes from, what is refused, what is trained."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import JobError, MachineError, ShardwiseError
from shardwise.job.schema import Lora, Model
from shardwise.models import build as build_module
from shardwise.models.build import BuiltModel, build_model, check_length
from shardwise.models.structure import checkpoint_blocks, copied
from tiny_models import tiny_model

CPU = torch.device("cpu")
Saved = Callable[..., Model]


def build(model: Model, **options: Any) -> BuiltModel:
    return build_model(model, dtype=torch.float32, seed=0, **options)


def refused(model: Model) -> ShardwiseError:
    with pytest.raises(ShardwiseError) as caught:
        build(model)
    assert caught.value.problems[0].where
    assert caught.value.problems[0].fix
    return caught.value


def edit_config(model: Model, **changes: Any) -> None:
    path = Path(model.source) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_shape_of_the_catalog_costs_no_memory_and_no_network() -> None:
    built = build(Model(source="meta-llama/Llama-3.1-70B", weights="random"))
    assert built.total == built.trainable == 70_553_706_496
    assert len(built.blocks) == 80
    assert all(parameter.is_meta for parameter in built.model.parameters())
    assert all(buffer.device == CPU for buffer in built.model.buffers())
    assert built.config.use_cache is False


def test_only_planning_leaves_causal_masks_without_values() -> None:
    model = Model(source="gpt-neo-125m", weights="random")
    planned, trained = (dict(build(model, masks=masks).model.named_buffers()) for masks in (False, True))
    assert {name: (b.shape, b.dtype) for name, b in planned.items()} == {
        name: (b.shape, b.dtype) for name, b in trained.items()
    }
    assert {b.is_meta for name, b in planned.items() if name.endswith("attention.bias")} == {True}
    everywhere, local = (trained[f"transformer.h.{layer}.attn.attention.bias"][0, 0] for layer in (0, 1))
    assert everywhere.sum(1).tolist() == list(range(1, 2049))
    assert local.sum(1).tolist() == [min(row, 256) for row in range(1, 2049)]


def test_dtype_and_changes_to_the_shape() -> None:
    built = build_model(
        Model(source="tiny-llama", weights="random", config={"num_hidden_layers": 3, "hidden_size": 32}),
        dtype=torch.bfloat16,
        seed=0,
        vocab_size=1024,
    )
    assert len(built.blocks) == 3
    assert built.model.get_input_embeddings().weight.shape == (1024, 32)
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}


def test_token_ids_of_the_shape_s_tokenizer_are_dropped_with_its_vocabulary() -> None:
    built = build(Model(source="gpt2", weights="random"), vocab_size=768)
    assert built.config.eos_token_id is None
    assert built.config.vocab_size == 768


def test_all_linear_trains_adapters_on_every_linear_but_the_head() -> None:
    built = build(Model(source="llama-3.1-8b", weights="random", lora=Lora(rank=16)))
    assert built.trainable == 41_943_040  # PEFT's count for rank 16 on all linears of this model
    assert built.total == 8_030_261_248 + 41_943_040
    named = dict(built.model.named_parameters())
    assert all(p.requires_grad == (".lora_" in name) for name, p in named.items())
    assert all(p.is_meta for p in named.values())
    assert type(built.model.lm_head) is nn.Linear


@pytest.mark.parametrize("name", ["mixtral", "glm4_moe"])
def test_adapters_of_a_mixture_stay_off_the_experts(saved: Callable[..., Model], name: str) -> None:
    """PEFT takes `all-linear`, and names that experts had in transformers 4, for their stacked weights."""
    built = build(saved(name, lora=Lora(rank=2)))
    adapted = {name.partition(".lora_A.")[0] for name in built.trainable_shapes if ".lora_A." in name}
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert adapted == {f"model.layers.{block}.self_attn.{name}" for block in (0, 1) for name in names}
    assert built.notes[0] == "the experts get no adapter: they are not linear modules"
    assert (len(built.notes) == 2) == (name == "glm4_moe")
    with pytest.raises(JobError) as caught:
        build(saved(name, lora=Lora(rank=2, targets=["q_proj", "down_proj"])))
    assert "down_proj" in str(caught.value.problems)
    assert caught.value.problems[0].fix == "choose from k_proj, o_proj, q_proj, v_proj, or all-linear"


def test_a_model_without_experts_is_told_nothing_of_them() -> None:
    """The weight of Mamba's convolution has three dimensions, as those of stacked experts."""
    assert build(Model(source="tiny-mamba", weights="random", lora=Lora(rank=2))).notes == []


def test_the_published_model_is_built_once_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    construct = build_module._construct
    monkeypatch.setattr(build_module, "_construct", lambda *a: made.append(construct(*a)) or made[-1])
    built = build(Model(source="tiny-llama", weights="random", lora=Lora(rank=2)))
    check_length(built, 8)
    assert made == [built.model], "the plan of a job needs no other"
    built.weights.fill(built.model, torch.device("cpu"))
    assert made == [built.model, built.skeleton]
    assert built.skeleton.config.use_cache, "what training changes is not saved"
    assert not any(".lora_" in name or not p.is_meta for name, p in built.skeleton.named_parameters())


def test_a_copy_is_what_deepcopy_makes() -> None:
    built = build(Model(source="tiny-llama", weights="random", lora=Lora(rank=2)))
    module = built.blocks[0]
    module.register_forward_hook(lambda *_: None)
    mine, theirs = copied(built.model, {}), copy.deepcopy(built.model)
    pairs = list(zip(mine.named_modules(), theirs.named_modules(), built.model.modules(), strict=True))
    for (name, one), (other_name, other), original in pairs:
        assert (name, type(one), vars(one).keys()) == (other_name, type(other), vars(other).keys())
        hooks = {key: len(value) for key, value in vars(other).items() if key.endswith("_hooks")}
        assert {key: len(vars(one)[key]) for key in hooks} == hooks
        assert not any(vars(one)[key] is vars(original)[key] for key in hooks)
    assert sum(len(one._forward_hooks) for (_, one), _, _ in pairs) == 1


def test_named_targets_only() -> None:
    built = build(
        Model(source="tiny-llama", weights="random", lora=Lora(rank=2, targets=["q_proj", "v_proj"]))
    )
    assert {name.split(".")[-4] for name in built.trainable_shapes} == {"q_proj", "v_proj"}


def test_adapters_have_the_dtype_of_the_base() -> None:
    model = Model(source="tiny-gpt2", weights="random", lora=Lora(rank=2))
    built = build_model(model, dtype=torch.bfloat16, seed=0)
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (Model(source="lama-2-7b"), JobError, "did you mean llama-2-7b"),
        (Model(source="./nowhere"), JobError, "no folder"),
        (Model(source="gpt3-175b"), JobError, "weights: random"),
        (Model(source="tiny-llama", weights="random", config={"num_layer": 3}), JobError, "did you mean"),
        (
            Model(source="tiny-llama", weights="random", config={"_x_internal": 1}),
            JobError,
            "no config value",
        ),
        (
            Model(source="tiny-llama", weights="random", config={"hidden_act": "nope"}),
            JobError,
            "model.config",
        ),
        (
            Model(source="tiny-llama", weights="random", config={"num_hidden_layers": "two"}),
            JobError,
            "num_hidden_layers",
        ),
        (
            Model(source="tiny-llama", weights="random", lora=Lora(targets=["q_proj", "qkv"])),
            JobError,
            "q_proj, up_proj, v_proj, or all-linear",
        ),
        (
            Model(source="HuggingFaceTB/SmolLM2-135M", weights="random", lora=Lora(rank=577)),
            JobError,
            "no update has rank 577: the largest, of a layer of 1536 x 576, has at most 576",
        ),
        (
            Model(source="gpt2", weights="random", lora=Lora(rank=10**8)),
            JobError,
            "a layer of 3072 x 768, has at most 768 model.lora.rank 768 at most",
        ),
        (
            Model(
                source="HuggingFaceTB/SmolLM2-135M",
                weights="random",
                lora=Lora(rank=193, targets=["v_proj"]),
            ),
            JobError,
            "a layer of 192 x 576, has at most 192",
        ),
    ],
)
def test_what_is_wrong_is_said(model: Model, kind: type[ShardwiseError], words: str) -> None:
    error = refused(model)
    assert isinstance(error, kind)
    problem = error.problems[0]
    assert words in f"{problem.what} {problem.where} {problem.fix}"


def test_a_hub_that_cannot_be_reached_is_the_machine_s_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refused(Model(source="meta-llama/Llama-2-7b-hf"))
    assert isinstance(error, MachineError)
    assert "weights: random" in error.problems[0].fix


@pytest.mark.parametrize("key", ["_attn_implementation_internal", "trust_remote_code"])
def test_private_keys_of_a_config_are_refused(saved: Saved, key: str) -> None:
    model = saved("llama")
    edit_config(model, **{key: "somebody/kernel"})
    assert key in str(refused(model))
    edit_config(model, **{key: None, "inner": {key: "somebody/kernel"}})
    assert key in str(refused(model))


def test_code_that_a_repository_brings_does_not_run(saved: Saved) -> None:
    model = saved("llama")
    (Path(model.source) / "modeling_evil.py").write_text("raise SystemExit('ran')")
    edit_config(
        model, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.C"}
    )
    built = build(model)
    assert type(built.model).__name__ == "LlamaForCausalLM"
    assert not hasattr(built.skeleton.config, "auto_map")
    edit_config(model, model_type="evil")
    assert "trust_remote_code" in refused(model).problems[0].fix


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_trusted_code_builds_its_own_model(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = saved("llama")
    (Path(model.source) / "mine.py").write_text(REMOTE)
    auto_map = {"AutoModelForCausalLM": "mine.Mine", "AutoConfig": "mine.MineConfig"}
    edit_config(model, model_type="mine", auto_map=auto_map)
    trusted = Model(
        source=model.source, weights="random", trust_remote_code=True, config={"num_hidden_layers": 3}
    )
    built = build(trusted, vocab_size=64)
    assert type(built.model).__name__ == "Mine"
    assert (len(built.blocks), built.config.vocab_size) == (3, 64)


def test_quantised_weights_are_refused(saved: Saved) -> None:
    model = saved("llama")
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised" in str(refused(model))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3", "mixtral"])
@pytest.mark.parametrize("shared", [3, 8])
def test_heads_that_cannot_share_keys_are_refused_where_they_stand(
    saved: Saved, name: str, shared: int
) -> None:
    model = saved(name)
    edit_config(model, num_key_value_heads=shared)
    error = refused(Model(source=model.source, weights="random"))
    assert isinstance(error, JobError)
    assert error.problems[0].what == f"4 attention heads cannot share {shared} key-value heads evenly"
    assert error.problems[0].where == f"{model.source}/config.json: num_key_value_heads"
    assert error.problems[0].fix == "one of 1, 2, 4, or another num_attention_heads"


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype", "step"),
    [(32, 18, torch.float32, 4), (36, 16, torch.bfloat16, 8), (32, 20, torch.bfloat16, 8)],
)
def test_experts_of_sizes_that_torch_does_not_multiply_in_groups_are_refused(
    tmp_path: Path, hidden: int, inner: int, dtype: torch.dtype, step: int
) -> None:
    """transformers builds them, and its own step fails."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "head_dim": 8}
    tiny_model("qwen3_moe", **sizes).config.save_pretrained(tmp_path)
    with pytest.raises(JobError) as caught:
        build_model(Model(source=str(tmp_path), weights="random"), dtype=dtype, seed=0)
    problem = caught.value.problems[0]
    assert f"hidden_size {hidden} and intermediate_size {inner}" in problem.what
    assert problem.where == f"{tmp_path}/config.json"
    assert problem.fix == f"multiples of {step} for both"
    ids = torch.arange(3, 20)[None]
    with pytest.raises(RuntimeError, match="16 bytes"):
        tiny_model("qwen3_moe", **sizes).to(dtype)(input_ids=ids, labels=ids).loss.backward()


def test_experts_of_sizes_that_fit_the_precision_are_taken(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", moe_intermediate_size=20).config.save_pretrained(tmp_path)
    assert build(Model(source=str(tmp_path), weights="random")).total > 0


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_blocks_is_refused(layers: int) -> None:
    """transformers builds it, and it trains."""
    error = refused(Model(source="tiny-llama", weights="random", config={"num_hidden_layers": layers}))
    assert isinstance(error, JobError)
    assert error.problems[0].what == f"a model of {layers} layers has nothing to train"
    assert error.problems[0].where == "model.config: num_hidden_layers"


def test_heads_that_the_job_changes_are_refused_at_the_job() -> None:
    change = {"num_attention_heads": 8, "num_key_value_heads": 3}
    error = refused(Model(source="tiny-llama", weights="random", config=change))
    assert error.problems[0].where == "model.config: num_key_value_heads"


def test_no_attention_head_at_all_is_refused(saved: Saved) -> None:
    model = saved("llama")
    edit_config(model, num_attention_heads=0)
    error = refused(Model(source=model.source, weights="random"))
    assert isinstance(error, JobError)
    assert "transformers refuses the config" in str(error)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert "config.json" in str(refused(Model(source=str(tmp_path))))
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in str(refused(Model(source=str(tmp_path))))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert "causal language model" in str(refused(Model(source=str(tmp_path), weights="random")))


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
def test_checkpointed_blocks_run_twice_and_give_the_same_gradients(every: int, expected: list[int]) -> None:
    model = Model(source="tiny-llama", weights="random", config={"num_hidden_layers": 4})

    def gradients(n: int) -> tuple[list[int], list[torch.Tensor]]:
        built = build(model)
        built.weights.fill(built.model, CPU)
        calls = [0] * 4
        for index, block in enumerate(built.blocks):

            def count(*_: Any, index: int = index) -> None:
                calls[index] += 1

            block.input_layernorm.register_forward_hook(count)
        checkpoint_blocks(built.blocks, every=n)
        built.model.train()
        ids = torch.arange(16).view(1, 16)
        built.model(ids, labels=ids).loss.backward()
        return calls, [p.grad for p in built.model.parameters() if p.grad is not None]

    calls, mine = gradients(every)
    assert [index for index, times in enumerate(calls) if times == 2] == expected
    _, plain = gradients(0)
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))


def test_checkpointing_is_off_in_evaluation() -> None:
    built = build(Model(source="tiny-llama", weights="random"))
    built.weights.fill(built.model, CPU)
    checkpoint_blocks(built.blocks, every=1)
    built.model.eval()
    calls = []
    built.blocks[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(8).view(1, 8)
    built.model(ids, labels=ids).loss.backward()
    assert len(calls) == 1
