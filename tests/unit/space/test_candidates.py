from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shardwise.engines.facts import Architecture, Facts
from shardwise.errors import JobError
from shardwise.hardware.parse import parse_hardware
from shardwise.job import schema
from shardwise.job.strategies import NAMED
from shardwise.space.candidates import Refused, candidates, micro_batches, predictable
from shardwise.space.rules import broken_rules
from shardwise.strategy import Strategy

PLAN = frozenset({"colwise", "rowwise"})
LLAMA_8B = Architecture(blocks=32, key_value_heads=8, flash_attention=True, plan_styles=PLAN)


def job_of(spec: Any, train: schema.Train | None = None, *, lora: bool = False) -> schema.Job:
    model = {"source": "m", "lora": {}} if lora else {"source": "m"}
    job = schema.Job.model_validate({"name": "a", "model": model, "data": {"train": "t"}})
    return job.model_copy(update={"strategy": spec, "train": train or schema.Train(global_batch=128)})


def planned(
    spec: Any = "auto", architecture: Architecture = LLAMA_8B
) -> tuple[list[Strategy], list[Refused]]:
    return predictable(job_of(spec), parse_hardware("8xH100"), architecture)


def space(
    spec: Any = "auto", *, train: schema.Train | None = None, lora: bool = False, **changes: Any
) -> tuple[list[Strategy], list[Refused]]:
    arguments: dict[str, Any] = {
        "world_size": 8,
        "gpus_per_node": 8,
        "capability": (9, 0),
        "architecture": LLAMA_8B,
        **changes,
    }
    return candidates(job_of(spec, train, lora=lora), **arguments)


def names(strategies: list[Strategy]) -> set[str]:
    return {strategy.name for strategy in strategies}


def test_llama_8b_on_8_gpus_has_260_candidates_besides_tensor_parallelism() -> None:
    found = [one for one in space()[0] if one.tensor_parallel == 1]
    assert len(found) == len(set(found)) == 13 * 4 * 5  # shapes, checkpointing, rows 1 2 4 8 16
    assert {s.micro_batch for s in found} == {1, 2, 4, 8, 16}
    assert {s.checkpoint_every for s in found} == {0, 1, 2, 4}
    assert names(found) == {
        "ddp-zero1",
        "zero0",
        "zero1",
        "zero2",
        "zero3",
        "zero3-noreshard",
        "zero1-offload",
        "zero2-offload",
        "zero3-offload-optimizer",
        "zero3-offload",
        "fsdp2",
        "fsdp2-noreshard",
        "fsdp2-offload",
    }


def test_one_gpu_has_the_single_engine_besides_and_no_tensor_parallelism() -> None:
    found, refused = space(world_size=1, gpus_per_node=1, train=schema.Train(global_batch=4))
    assert len(found) == 13 * 4 * 3
    assert "single" in names(found)
    assert refused == []


def test_ddp_is_considered_for_adapters_on_several_gpus() -> None:
    assert "ddp" in names(space(lora=True)[0])
    assert "ddp" not in names(space()[0])
    assert "ddp" not in names(space(lora=True, world_size=1, gpus_per_node=1)[0])


def test_replicas_that_share_the_optimizer_are_considered_for_all_weights_on_several_gpus() -> None:
    assert "ddp-zero1" in names(space()[0])
    assert "ddp-zero1" not in names(space(lora=True)[0])
    assert "ddp-zero1" not in names(space(world_size=1, gpus_per_node=1)[0])


@pytest.mark.parametrize(("gpus", "per_node"), [(16, 8), (8, 2), (8, 8), (4, 1)])
def test_on_several_nodes_with_several_gpus_weights_may_be_shared_within_each(
    gpus: int, per_node: int
) -> None:
    accepted, refused = space(world_size=gpus, gpus_per_node=per_node)
    found = names(accepted)
    assert names([one.strategy for one in refused]) == {"single"}
    expected = {f"fsdp2-hsdp{per_node}", f"fsdp2-hsdp{per_node}-noreshard"} if 1 < per_node < gpus else set()
    assert {name for name in found if "hsdp" in name} == expected
    assert "ddp" not in found
    named = ("hpz", "qwz", "qgz", "reduce")  # what changes losses, or was not measured, has to be named
    assert not any(part in name for name in found for part in named)


@pytest.mark.parametrize(
    ("gpus", "per_node", "global_batch"), [(1, 1, 7), (4, 4, 16), (6, 6, 36), (16, 8, 96), (512, 8, 1024)]
)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("capability", [(7, 0), (9, 0)])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_candidate_breaks_a_rule_and_each_refused_one_breaks_the_rule_it_names(
    gpus: int, per_node: int, global_batch: int, lora: bool, capability: Any, precision: Any
) -> None:
    train = schema.Train(global_batch=global_batch, precision=precision)
    found, refused = space(
        world_size=gpus, gpus_per_node=per_node, train=train, lora=lora, capability=capability
    )

    def broken(strategy: Strategy) -> set[str]:
        facts = Facts(
            strategy=strategy,
            devices="cuda",
            world_size=gpus,
            global_batch=global_batch,
            lora=lora,
            architecture=LLAMA_8B,
            capability=capability,
        )
        return {rule.name for rule, _ in broken_rules(facts)}

    assert all(broken(strategy) == set() for strategy in found)
    told: dict[Strategy, set[str]] = {}
    for one in refused:
        told.setdefault(one.strategy, set()).add(one.rule)
    assert len(refused) == sum(map(len, told.values()))
    assert all(broken(strategy) == rules for strategy, rules in told.items())
    assert names(found).isdisjoint(names(list(told)))
    assert {s.world_size for s in found} <= {gpus}
    assert {s.global_batch for s in found} <= {global_batch}
    assert bool(found) == (capability == (9, 0))


def test_what_is_refused_says_so_once_for_every_rule() -> None:
    few_heads = Architecture(blocks=24, key_value_heads=2, flash_attention=True, plan_styles=PLAN)
    found, refused = space(world_size=4, gpus_per_node=4, lora=True, architecture=few_heads)
    count = Counter((one.strategy.name, one.rule) for one in refused)
    assert max(count.values()) == 1
    assert {rule for name, rule in count if name == "single"} == {"single-is-one-process"}
    assert {rule for name, rule in count if name == "autotp4-zero1"} == {
        "tensor-parallel-and-lora",
        "tensor-parallel-divides-key-value-heads",
    }
    assert not any(strategy.tensor_parallel > 1 for strategy in found)
    assert all(one.reason and one.fix for one in refused)


def test_tensor_parallelism_is_tried_within_a_node_and_where_it_divides_one() -> None:
    def degrees(world_size: int, gpus_per_node: int) -> set[int]:
        train = schema.Train(global_batch=8 * world_size)
        found, _ = space(world_size=world_size, gpus_per_node=gpus_per_node, train=train)
        return {one.tensor_parallel for one in found} - {1}

    assert degrees(8, 8) == {2, 4, 8}
    assert degrees(16, 4) == {2, 4}
    assert degrees(6, 6) == {2}


def test_tensor_parallelism_is_planned_thinly_by_auto_and_in_full_where_it_is_named() -> None:
    found, refused = planned()
    parallel = [one for one in found if one.tensor_parallel > 1]
    assert refused == [one for one in refused if one.strategy.tensor_parallel == 1]
    assert [*dict.fromkeys(one.name for one in parallel)] == [
        "autotp2-zero1",
        "autotp2-zero2",
        "autotp4-zero1",
        "autotp4-zero2",
        "autotp8-zero1",  # one group: nothing is left for stage 2 to shard
    ]
    assert {s.checkpoint_every for s in parallel} == {0, 1}
    # of the 32, 64 and 128 rows of a group
    sizes = {d: sorted({s.micro_batch for s in parallel if s.tensor_parallel == d}) for d in (2, 4, 8)}
    assert sizes == {2: [1, 4, 16], 4: [1, 4, 16], 8: [1, 4, 16]}
    assert all(s.global_batch == 128 and s.world_size == 8 for s in parallel)

    spec = schema.StrategySpec(engine="deepspeed", stage=2, tensor_parallel=8)
    named, _ = planned(spec)
    assert names(named) == {"autotp8-zero2"}
    assert {s.checkpoint_every for s in named} == {0, 1, 2, 4}
    assert {s.micro_batch for s in named} == {1, 2, 4, 8, 16, 32, 64, 128}
    train = schema.Train(global_batch=128, micro_batch=2, checkpointing=4)
    fixed = [one for one in space(train=train)[0] if one.tensor_parallel > 1]
    assert {(s.micro_batch, s.checkpoint_every) for s in fixed} == {(2, 4)}


def test_gathered_outputs_are_trained_with_and_not_planned() -> None:
    gathers = Architecture(
        blocks=32,
        key_value_heads=8,
        flash_attention=True,
        plan_styles=PLAN | {"colwise_gather_output"},
    )
    spec = schema.StrategySpec(engine="deepspeed", stage=1, tensor_parallel=2)
    found, refused = space(spec, architecture=gathers)
    assert names(found) == {"autotp2-zero1"}
    assert refused == []
    left, [only] = planned(spec, gathers)
    assert left == []
    assert (only.strategy, only.rule) == (found[0], "gathered-layers-are-not-simulated")


def test_a_global_batch_that_cannot_be_shared_leaves_tensor_parallelism() -> None:
    found, refused = space(train=schema.Train(global_batch=12))
    assert names(found) == {
        "autotp2-zero1",
        "autotp2-zero2",
        "autotp4-zero1",
        "autotp4-zero2",
        "autotp8-zero1",
    }
    plain = {one.rule for one in refused if one.strategy.name == "zero2"}
    assert plain == {"global-batch-divides"}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_strategy_is_kept(name: str) -> None:
    gpus = 1 if name == "single" else 8
    found, refused = space(name, world_size=gpus, gpus_per_node=gpus, train=schema.Train(global_batch=8))
    assert names(found) == {name}
    assert refused == []
    assert {s.checkpoint_every for s in found} == {0, 1, 2, 4}


def test_parts_are_kept_with_what_the_job_fixes() -> None:
    spec = schema.StrategySpec(
        engine="deepspeed",
        stage=3,
        offload_optimizer="nvme",
        offload_parameters="nvme",
        nvme_path="/nvme",
        bucket=50_000_000,
    )
    train = schema.Train(global_batch=64, micro_batch=4, checkpointing=3, precision="fp16")
    [only], refused = space(spec, train=train)
    assert only.to_json() == {
        "name": "zero3-nvme",
        "engine": "deepspeed",
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_parameters": "nvme",
        "nvme_path": "/nvme",
        "reshard": True,
        "shard_group": 0,
        "quantized_weights": False,
        "quantized_gradients": False,
        "powersgd": 0,
        "reduce_dtype": "auto",
        "tensor_parallel": 1,
        "pipeline": 1,
        "pipeline_schedule": "1f1b",
        "data_parallel": 8,
        "micro_batch": 4,
        "accumulation": 2,
        "precision": "fp16",
        "checkpoint_every": 3,
        "clip_norm": 1.0,
        "optimizer": "adamw",
        "bucket": 50_000_000,
        "overlap_comm": True,
    }
    assert refused == []


@pytest.mark.parametrize(("asked", "every"), [("none", {0}), ("full", {1}), (5, {5})])
def test_checkpointing_that_the_job_names_is_kept(asked: Any, every: set[int]) -> None:
    found, _ = space("zero2", train=schema.Train(global_batch=8, checkpointing=asked))
    assert {s.checkpoint_every for s in found} == every


@pytest.mark.parametrize(("blocks", "every"), [(1, {0, 1}), (2, {0, 1}), (4, {0, 1, 2}), (5, {0, 1, 2, 4})])
def test_a_shallow_model_has_fewer_ways_to_checkpoint(blocks: int, every: set[int]) -> None:
    shallow = Architecture(blocks=blocks, key_value_heads=8, flash_attention=True)
    found, _ = space("zero2", architecture=shallow)
    assert {s.checkpoint_every for s in found} == every


def test_a_micro_batch_that_does_not_divide_is_refused_with_the_jobs_number() -> None:
    found, refused = space("zero2", train=schema.Train(global_batch=32, micro_batch=8))
    assert found == []
    [only] = refused
    assert (only.rule, only.strategy.micro_batch) == ("global-batch-divides", 8)
    assert "train.micro_batch: 4" in only.fix


def test_a_contradiction_within_the_parts_is_an_error() -> None:
    with pytest.raises(JobError, match="the strategy does not work"):
        space(schema.StrategySpec(engine="fsdp2", stage=3))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, [1]),
        (12, [1, 2, 3, 4, 6, 12]),
        (24, [1, 2, 3, 4, 6, 8, 12, 24]),
        (96, [1, 2, 4, 8, 16, 32, 96]),
        (128, [1, 2, 4, 8, 16, 32, 64, 128]),
        (1024, [1, 2, 4, 8, 16, 32, 64, 128]),
        (45, [1, 3, 5, 9, 15, 45]),
        (131, [1]),
        (0, []),
    ],
)
def test_micro_batches(rows: int, expected: list[int]) -> None:
    assert micro_batches(rows) == expected


def test_there_are_never_more_than_8_micro_batches() -> None:
    assert max(len(micro_batches(rows)) for rows in range(1, 3000)) == 8
