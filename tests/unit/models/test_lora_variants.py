"""DoRA, rsLoRA, LoRA+ and modules trained in full are what PEFT makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from packed_rows import packed, samples
from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.runtime.protocol import Engine, World, build_engine
from shardwise.errors import JobError
from shardwise.job.schema import Lora, Model, Optimizer
from shardwise.models.adapters import quiet_peft, saved_names
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.export import export, load_with_adapter, save_weights
from shardwise.objective.causal_lm import CausalLM
from shardwise.strategy import Strategy
from tiny_models import tiny_model

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, local_rank=0, device=CPU, data_rank=0, data_size=1)
PLUS = Optimizer(learning_rate=1e-2, beta2=0.999, lora_plus=16.0, clip_norm=0.5)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"variants": ["dora"]},
    "rslora": {"variants": ["rslora"]},
    "both-and-modules": {
        "variants": ["dora", "rslora"],
        "modules_to_save": ["embed_tokens", "lm_head", "norm"],
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    return folder


def ours(base: Path, **lora: Any) -> tuple[Engine, BuiltModel]:
    built = build_model(Model(source=str(base), lora=Lora(rank=4, **lora)), dtype=torch.float32, seed=1)
    strategy = Strategy(engine="single", precision="fp32", clip_norm=PLUS.clip_norm)
    module = CausalLM(built.model, packed=False)
    return build_engine(strategy, module, built.blocks, built.weights.fill, PLUS, WORLD), built


def plain(base: Path, engine: Engine, built: BuiltModel, **lora: Any) -> PeftModel:
    """PEFT's own model with the same initial adapters."""
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        use_dora="dora" in lora.get("variants", ()),
        use_rslora="rslora" in lora.get("variants", ()),
        modules_to_save=[f"{'model.' * (n != 'lm_head')}{n}" for n in lora.get("modules_to_save", ())],
    )
    with quiet_peft():
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base), config, autocast_adapter_dtype=False
        )
    started = dict(engine.weights())
    for name, parameter in model.get_base_model().named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            parameter.data.copy_(started[name])
        elif ".lora_magnitude_vector." in name:
            torch.testing.assert_close(parameter.data, started[name], rtol=0, atol=0)
    assert {n for n, _ in model.get_base_model().named_parameters()} >= {
        name for name in started if ".lora_" in name
    }
    return model


def batches() -> list[MicroBatch]:
    pairs = samples()
    return [packed(pairs, rows=((i,), (i + 1,))) for i in range(3)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradient_norms_are_those_of_plain_peft(base: Path, variant: str) -> None:
    engine, built = ours(base, **VARIANTS[variant])
    model = plain(base, engine, built, **VARIANTS[variant])
    adamw = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16.0, betas=(0.9, 0.999), eps=1e-8
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    for batch in batches():
        targets = int((batch.labels != IGNORED).sum())
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, PLUS.clip_norm)
        adamw.step()
        adamw.zero_grad()
        found = engine.step([batch], target_tokens=targets, learning_rate=1e-2)
        assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)
        assert found.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<unk>": 0, **{str(n): n for n in range(1, 32)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<unk>")), unk_token="<unk>")


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 13)[None]).logits


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_what_is_saved_loads_here_merges_and_loads_in_peft(
    base: Path, tmp_path: Path, quantization: str
) -> None:
    spec = Model(
        source=str(base), lora=Lora(rank=4, **VARIANTS["both-and-modules"]), quantization=quantization
    )  # type: ignore[arg-type]
    built = build_model(spec, dtype=torch.float32, seed=1)
    built.weights.fill(built.model, CPU)
    with torch.no_grad():
        for name in built.trainable_shapes:
            built.model.get_parameter(name).add_(0.02)
    save_weights(
        built,
        ((n, built.model.get_parameter(n)) for n in built.trainable_shapes),
        tmp_path / "a",
        tokenizer(),
    )
    expected = logits(built.model.eval())
    again = load_with_adapter(tmp_path / "a", spec, CPU)
    torch.testing.assert_close(logits(again.model), expected, rtol=0, atol=0)
    report = export(tmp_path / "a", tmp_path / "m", merge=True, base=spec)
    assert report["max_logit_difference"] < 1e-5
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "m")), expected, atol=1e-5, rtol=0
    )
    if quantization == "none":
        with quiet_peft():
            theirs = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(base), tmp_path / "a"
            ).eval()
        torch.testing.assert_close(logits(theirs), expected, atol=1e-6, rtol=0)


def test_a_tied_weight_is_named_twice_and_saved_under_both_names(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)

    def build(names: list[str]) -> BuiltModel:
        spec = Model(source=str(tmp_path), weights="random", lora=Lora(rank=2, modules_to_save=names))
        return build_model(spec, dtype=torch.float32, seed=0)

    with pytest.raises(JobError, match="are one weight") as caught:
        build(["lm_head"])
    assert caught.value.problems[0].fix == "name embed_tokens as well"
    built = build(["lm_head", "embed_tokens"])
    saved = saved_names(built.skeleton, built.trainable_shapes)
    twins = {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"}
    assert {saved[name] for name in twins} == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["q_proj"], "'q_proj' has adapters"),
        (["layers"], "'layers' has adapters"),
        (["wte"], "'wte' is no module"),
    ],
)
def test_what_cannot_be_trained_in_full_is_refused(base: Path, names: list[str], what: str) -> None:
    with pytest.raises(JobError, match=what):
        ours(base, modules_to_save=names)
