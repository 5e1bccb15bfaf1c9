"""Models that read later tokens are refused; decoders, and encoders made decoders, train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from packed_rows import packed, samples
from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models import causality
from shardwise.models.build import BuiltModel, build_model
from shardwise.objective.causal_lm import CausalLM
from tiny_models import tiny_model

ENCODERS = {"bert": "is_decoder", "ernie": "is_decoder", "roformer": "is_decoder", "xlm": "causal"}


def built(folder: Path, kind: str, *, config: dict[str, Any] | None = None, **values: Any) -> BuiltModel:
    """A model whose config.json has `values` more than the architecture's defaults; `config` is the job's."""
    CONFIG_MAPPING[kind].from_dict(values).save_pretrained(folder)
    model = Model(source=str(folder), weights="random", config=config or {})
    return build_model(model, dtype=torch.float32, seed=0)


def on_meta(kind: str) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.mark.parametrize("kind", [*ENCODERS, "cpmant", "xlnet"])
def test_a_model_that_reads_later_tokens_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(JobError, match=f"{kind!r} models read later tokens") as caught:
        built(tmp_path, kind)
    problem = caught.value.problems[0]
    assert problem.where == "model.source"
    key = ENCODERS.get(kind)
    assert problem.fix == (
        f"set {key}: true in its config, or use a decoder" if key else "use a decoder-only model"
    )
    if key:
        assert built(tmp_path, kind, config={key: True}).total > 1e6


def test_a_decoder_of_the_table_whose_config_asks_for_both_directions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        built(tmp_path, "gemma", use_bidirectional_attention=True)
    assert caught.value.problems[0].fix.startswith("set use_bidirectional_attention: false")


@pytest.mark.parametrize(
    "kind",
    [
        "bart",
        "ctrl",
        "deepseek_v4",
        "gemma4_unified_text",
        "glm_moe_dsa",
        "lfm2",
        "qwen3_next",
        "mpt",
        "rwkv",
    ],
)
def test_decoders_without_a_row_are_tried_and_not_refused(tmp_path: Path, kind: str) -> None:
    """Those of full size: the copy is what costs little."""
    model = on_meta(kind)
    tried = [
        causality._looks_ahead(model, causality._TINY, dtype) for dtype in (torch.float64, torch.float32)
    ]
    assert False in tried, "neither could be tried"
    assert True not in tried
    causality.check_causal(model)


@pytest.mark.parametrize(("kind", "refused"), [("bert", True), ("bart", False), ("lfm2", False)])
def test_where_nothing_can_be_tried_the_config_decides(
    kind: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causality, "_MOST", 0)
    model = on_meta(kind)
    if refused:
        with pytest.raises(JobError, match="later tokens"):
            causality.check_causal(model)
    else:
        causality.check_causal(model)


@pytest.mark.parametrize(("kind", "key"), ENCODERS.items())
def test_an_encoder_made_a_decoder_trains_as_in_transformers(tmp_path: Path, kind: str, key: str) -> None:
    model, pairs = tiny_model(kind, **{key: True}), samples()
    model.save_pretrained(tmp_path)
    logits = [
        model(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in pairs
    ]  # XLM shifts no labels
    targets = torch.cat([labels for _, labels in pairs])
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), targets, reduction="sum")
    made = build_model(Model(source=str(tmp_path)), dtype=torch.float32, seed=0, sequence_length=14)
    made.weights.fill(made.model, torch.device("cpu"))
    rows = packed(pairs, rows=tuple((i,) for i in range(len(pairs))))
    found = CausalLM(made.model, packed=False).train()(rows)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
