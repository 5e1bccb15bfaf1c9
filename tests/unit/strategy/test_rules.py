from __future__ import annotations

from typing import Any

import pytest

from shardwise.strategy.rules import RULES, Facts, violations
from shardwise.strategy.strategy import Strategy


def facts(*, devices: Any = "cuda", world_size: int = 4, lora: bool = False, **parts: Any) -> Facts:
    values = {"engine": "deepspeed", "stage": 2, "data_parallel": world_size, **parts}
    strategy = Strategy(**values)
    return Facts(
        strategy=strategy,
        devices=devices,
        world_size=world_size,
        global_batch=strategy.global_batch,
        lora=lora,
    )


BROKEN = {
    "single-is-one-process": facts(engine="single", stage=0),
    "single-does-not-offload": facts(engine="single", stage=0, world_size=1, offload_optimizer="cpu"),
    "parameter-offload-needs-stage-3": facts(offload_parameters="cpu"),
    "optimizer-offload-needs-zero": facts(stage=0, offload_optimizer="cpu"),
    "nvme-needs-stage-3": facts(offload_optimizer="nvme", nvme_path="/nvme"),
    "nvme-needs-a-path": facts(stage=3, offload_optimizer="nvme"),
    "path-needs-nvme": facts(nvme_path="/nvme"),
    "fsdp-offloads-everything-to-the-host": facts(engine="fsdp2", stage=0, offload_optimizer="cpu"),
    "reshard-is-for-sharded-parameters": facts(reshard=False),
    "keeping-parameters-defeats-their-offload": facts(stage=3, reshard=False, offload_parameters="cpu"),
    "tensor-parallel-is-deepspeed": facts(engine="fsdp2", stage=0, tensor_parallel=2, data_parallel=2),
    "tensor-parallel-divides-the-processes": facts(tensor_parallel=3, data_parallel=1),
    "tensor-parallel-and-lora": facts(tensor_parallel=2, data_parallel=2, lora=True),
    "fp16-needs-a-gpu": facts(precision="fp16", devices="cpu"),
    "fp16-needs-zero": facts(stage=0, precision="fp16"),
    "global-batch-divides": Facts(
        strategy=Strategy(engine="deepspeed", stage=2, data_parallel=4, micro_batch=2),
        devices="cuda",
        world_size=4,
        global_batch=9,
        lora=False,
    ),
}


def test_there_is_a_case_for_every_rule() -> None:
    assert BROKEN.keys() == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_refuses_its_case_and_no_other_rule_does(name: str) -> None:
    assert [rule.name for rule in RULES if rule.broken(BROKEN[name])] == [name]


@pytest.mark.parametrize(
    "good",
    [
        facts(engine="single", stage=0, world_size=1, precision="fp16"),
        facts(stage=0),
        facts(stage=1, precision="fp16"),
        facts(stage=2, offload_optimizer="cpu"),
        facts(stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path="/nvme"),
        facts(stage=3, offload_parameters="cpu"),
        facts(stage=3, reshard=False, lora=True),
        facts(stage=1, tensor_parallel=4, data_parallel=1),
        facts(engine="fsdp2", stage=0, reshard=False),
        facts(engine="fsdp2", stage=0, offload_optimizer="cpu", offload_parameters="cpu"),
        facts(devices="cpu", precision="bf16"),
    ],
    ids=lambda good: good.strategy.name,
)
def test_what_works_is_not_refused(good: Facts) -> None:
    assert violations(good) == []


@pytest.mark.parametrize(
    ("rows", "ranks", "micro", "what", "fix"),
    [
        (16, 3, None, "cannot be shared equally by 3 processes", "global_batch: 15 or 18, or --processes 2"),
        (2, 4, None, "cannot be shared equally by 4 processes", "global_batch: 4, or --processes 2"),
        (17, 2, None, "by 2 processes", "global_batch: 16 or 18, or --processes 1"),
        (16, 4, 8, "micro_batch 8 does not divide 4", "32, or train.micro_batch: 4, or --processes 2"),
    ],
)
def test_an_uneven_batch_is_told_in_the_numbers_that_were_written(
    rows: int, ranks: int, micro: int | None, what: str, fix: str
) -> None:
    strategy = Strategy(engine="deepspeed", stage=2, data_parallel=ranks, micro_batch=micro or 1)
    [problem] = violations(
        Facts(
            strategy=strategy,
            devices="cpu",
            world_size=ranks,
            global_batch=rows,
            lora=False,
            micro_batch=micro,
        )
    )
    assert what in problem.what
    assert problem.fix.endswith(fix)


def test_all_violations_come_at_once_each_with_key_and_fix() -> None:
    found = violations(facts(stage=0, offload_optimizer="nvme", reshard=False, precision="fp16"))
    assert len(found) == 5
    assert all(problem.where and problem.fix for problem in found)
