"""The changes that are tried where nothing fits."""

from __future__ import annotations

import pytest

from shardwise.hardware.catalog import gpus
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Data, Job, Lora, Model, Train
from shardwise.planner import planning
from shardwise.planner.changes import larger_gpus, small_changes

JOB = Job(
    name="a",
    model=Model(source="m"),
    data=Data(train="x", sequence_length=1024),
    train=Train(global_batch=32),
)


def test_the_order_is_rows_lora_more_gpus_larger_gpus() -> None:
    changes = list(small_changes(JOB, parse_hardware("2xRTX4080")))
    assert [c.how for c in changes][:7] == [
        "--sequence 512",
        "--sequence 256",
        "--lora 16",
        "--qlora",
        "--gpus 4xRTX-4080",
        "--gpus 8xRTX-4080",
        "--gpus 2xRTX-4090",
    ]
    named = list(small_changes(JOB.model_copy(update={"strategy": "zero2"}), parse_hardware("2xRTX4080")))
    assert [named[2].how, named[2].job] == ["--set strategy=auto", JOB]
    assert [c.how for c in named[:2] + named[3:]] == [c.how for c in changes]
    assert changes[0].job.data.sequence_length == 512
    assert changes[2].job.model.lora == Lora()
    assert changes[2].job.data == JOB.data, "one change at a time"
    assert changes[3].job.model == Model(source="m", quantization="nf4"), "what the flag gives"
    assert [c.hardware.world_size for c in changes[4:7]] == [4, 8, 2]
    sizes = [c.hardware.gpu.sold_as_gb for c in changes[6:]]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= 141


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_what_is_told_is_what_was_simulated(gpu) -> None:
    """The flag, typed, gives the very hardware."""
    for change in small_changes(JOB, parse_hardware(f"1x{gpu.name.replace(' ', '-')}")):
        if change.how.startswith("--gpus "):
            assert parse_hardware(change.how.removeprefix("--gpus ")) == change.hardware


def test_what_cannot_be_is_not_offered() -> None:
    adapters = JOB.model_copy(update={"model": Model(source="m", lora=Lora())})
    assert not [c for c in small_changes(adapters, parse_hardware("2xT4")) if "lora" in c.how]
    random = JOB.model_copy(update={"model": Model(source="m", weights="random")})
    assert not [c for c in small_changes(random, parse_hardware("2xT4")) if "lora" in c.how]
    few = JOB.model_copy(update={"train": Train(global_batch=12)})
    more = [c.hardware.world_size for c in small_changes(few, parse_hardware("2xT4")) if "GPUs" in c.what]
    assert more == [4], "8 GPUs cannot share 12 rows"
    short = JOB.model_copy(update={"data": Data(train="x", sequence_length=300)})
    assert not [c for c in small_changes(short, parse_hardware("2xT4")) if "sequence" in c.how]


def test_no_adapters_are_offered_on_a_shape_without_published_weights() -> None:
    def offered(source: str) -> list[str]:
        job = JOB.model_copy(update={"model": Model(source=source)})
        return [c.how for c in small_changes(job, parse_hardware("2xT4")) if "lora" in c.how]

    assert offered("7b_mamba") == offered("gpt3-13b") == []
    assert (
        offered("llama-2-7b") == offered("someone/model") == offered("./gpt3-13b") == ["--lora 16", "--qlora"]
    )


def test_below_adapters_the_base_is_quantised_further() -> None:
    def offered(quantization: str) -> list[tuple[str, str]]:
        model = Model(source="m", lora=Lora(rank=8), quantization=quantization)
        changes = small_changes(JOB.model_copy(update={"model": model}), parse_hardware("2xT4"))
        found = [c for c in changes if "quantization" in c.how]
        assert all(c.how == f"--set model.quantization={c.job.model.quantization}" for c in found)
        assert all(c.job.model.lora == Lora(rank=8) for c in found), "one change at a time"
        return [(c.job.model.quantization, c.what) for c in found]

    assert offered("none") == [
        ("int8", "a base in int8 instead of bf16"),
        ("nf4", "a base in nf4 instead of bf16"),
    ]
    assert offered("int8") == [("nf4", "a base in nf4 instead of int8")]
    assert offered("nf4") == []
    assert not [c for c in small_changes(JOB, parse_hardware("2xT4")) if "quantization" in c.how]


def test_a_cap_is_lifted_instead_of_buying_larger_gpus() -> None:
    changes = list(small_changes(JOB, parse_hardware("8xH200"), memory_cap_bytes=16 << 30))
    assert changes[-1].how == "leave --memory-cap out"
    assert changes[-1].memory_cap_bytes is None
    assert all(c.memory_cap_bytes == 16 << 30 for c in changes[:-1])
    assert not [c for c in changes if "--gpus" in c.how]


def test_a_cap_above_the_card_is_none_and_is_left_out_only_for_a_card_that_it_would_hold_back() -> None:
    cap = 64 << 30
    changes = list(small_changes(JOB, parse_hardware("1xRTX3060"), memory_cap_bytes=cap))
    assert "leave --memory-cap out" not in [c.how for c in changes]
    larger = [c for c in changes if c.what.endswith("instead of RTX 3060")]
    assert larger[-1].hardware.gpu.sold_as_gb > 64
    for change in larger:
        held_back = change.hardware.gpu.memory_bytes > cap
        assert change.memory_cap_bytes == (None if held_back else cap)
        assert change.how.endswith(", and leave --memory-cap out") == held_back


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("2x4xRTX4090+eth100", "2x8xRTX-4090+1xeth100"),
        ("2x4xRTX4090+eth100+256GiB", "2x8xRTX-4090+1xeth100+256GiB"),
        ("4xRTX4090+128GiB", "8xRTX-4090+128GiB"),
        ("4xRTX4080@pcie4x4+64GB", "8xRTX-4080@pcie4x4+64GB"),
        ("2xRTX3090@nvlink", "4xRTX-3090"),  # a bridge joins two
    ],
)
def test_nodes_their_network_and_their_hosts_stay(asked: str, told: str) -> None:
    more = next(c for c in small_changes(JOB, parse_hardware(asked)) if "GPUs instead" in c.what)
    assert more.how == f"--gpus {told}"
    assert more.hardware == parse_hardware(told), "what is told is what was simulated"


def test_the_first_that_fits_is_taken_and_no_other_tried(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    option = toy.plan("4xA100-SXM-80GB").chosen
    tried = []

    def attempt(change, **_):
        tried.append(change.how)
        return option if change.how.startswith("--lora") else None

    monkeypatch.setattr(planning, "_attempt", attempt)
    found = planning.nearest_change(JOB, parse_hardware("2xRTX4080"))
    assert found is not None
    assert (found.how, found.option) == ("--lora 16", option)
    assert tried == ["--sequence 512", "--sequence 256", "--lora 16"]
    monkeypatch.setattr(planning, "_attempt", lambda *_, **__: None)
    assert planning.nearest_change(JOB, parse_hardware("2xRTX4080")) is None


def test_a_small_card_known_by_its_memory_alone_has_the_smallest_of_the_catalog_next() -> None:
    smallest = min(gpu.sold_as_gb for gpu in gpus() if gpu.compute_capability)
    assert larger_gpus(parse_hardware("1x1GiB").gpu)[0].sold_as_gb == smallest
    assert larger_gpus(parse_hardware("1x24GB").gpu)[0].sold_as_gb == 32


def test_larger_gpus_are_of_the_same_kind_where_there_is_one() -> None:
    names = [gpu.name for gpu in larger_gpus(parse_hardware("1xRTX4080").gpu)]
    assert names[0] == "RTX 4090"
    assert all(gpu.compute_capability for gpu in larger_gpus(parse_hardware("1xT4").gpu))
