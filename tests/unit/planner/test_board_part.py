"""A plan on the board: its strategies in numbers, and a dot for each."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from shardwise.board.pages import PlanForm, plan_part
from shardwise.planner.plan import Nearest


def test_a_plan_shows_its_choice_its_numbers_and_a_dot_for_each_strategy(toy: Any) -> None:
    plan = toy.plan("4xRTX4080")
    text = plan_part(plan, "shardwise plan").replace("\u202f", " ")
    assert f"▶ {plan.chosen.strategy.name}" in text
    memory = plan.chosen.prediction.memory
    near = [o for o in plan.options if o.prediction.memory.needed_bytes < 1.5 * memory.capacity_bytes]
    assert len(re.findall("<circle", text)) >= len(near)
    assert f"{memory.needed_bytes / 2**30:.1f} GiB<small>" in text
    assert f"{plan.chosen.prediction.time.tokens_per_second_per_gpu:,.0f}</td>" in text


def test_names_are_text_and_what_does_not_fit_says_what_would(toy: Any) -> None:
    plan = toy.plan("4xRTX4080")
    near = Nearest(what="shorter rows", how="--sequence 9", option=plan.chosen)
    job = replace(plan.job, model="<script>")
    none = replace(plan, chosen=None, alternatives=plan.options, nearest=near, job=job)
    text = plan_part(none, "shardwise plan")
    assert "<script>" not in text
    assert "<h2>Nothing fits</h2>" in text
    assert "nothing fits: " in text
    assert "--sequence 9 (shorter rows): " in text


def test_a_form_is_a_command() -> None:
    form = PlanForm(model="a/b", gpus="4x24GB", method="qlora", rank=8, sequence=512)
    changes = ["model.lora.rank=8", "data.sequence_length=512", "model.quantization=nf4"]
    assert form.changes() == changes
    assert PlanForm(model="a/b", gpus="4x24GB", method="full").changes() == ["model.lora=null"]
    assert form.command().startswith("shardwise plan --model a/b --gpus 4x24GB --set model.lora.rank=8")
