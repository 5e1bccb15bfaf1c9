"""What a checkpoint carries beside the engine's state, and whom it belongs to."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shardwise.engines.runtime.host_copy import HostCopy
from shardwise.engines.runtime.protocol import World
from shardwise.errors import CheckpointError, render
from shardwise.record.manifest import Manifest, Origin
from shardwise.strategy import Strategy
from shardwise.training.checkpoint import Checkpoint, CheckpointStore
from shardwise.training.snapshot import (
    Snapshots,
    TrainerState,
    check_origin,
    load_rng,
    load_state,
    rng_state,
    save_state,
    seed_rng,
)

CPU = torch.device("cpu")


def draw() -> tuple[object, ...]:
    """Some of every generator, the cached second Gaussian of python and numpy included."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randperm(9).tolist(),
    )


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.randn()  # leaves a cached value behind
    (tmp_path / "rng-rank3.json").write_text(rng_state(CPU))
    expected = [draw() for _ in range(3)]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    load_rng(tmp_path, rank=3, device=CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_missing_or_foreign_generator_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="random number generators"):
        load_rng(tmp_path, rank=1, device=CPU)
    (tmp_path / "rng-rank1.json").write_text(json.dumps({**json.loads(rng_state(CPU)), "cuda": "AAAA"}))
    with pytest.raises(CheckpointError, match="saved with a GPU"):
        load_rng(tmp_path, rank=1, device=CPU)


@pytest.mark.parametrize("size", [2, 3])
def test_generators_go_on_with_the_rows_that_they_were_drawn_for(tmp_path: Path, size: int) -> None:
    """Saved by a pipeline of two stages, on two shares of the rows; two shares go on, three begin anew."""
    drawn = {}
    for rank in range(4):
        seed_rng(rank)
        (tmp_path / f"rng-rank{rank}.json").write_text(rng_state(CPU))
        drawn[rank] = draw()
    pipeline = origin(Strategy(engine="pipeline", pipeline=2, data_parallel=2), seed=7)
    manifest = Manifest(step=5, origin=pipeline, files={})
    found = []
    for rank in range(size):
        world = World(rank=rank, size=size, local_rank=rank, device=CPU, data_rank=rank, data_size=size)
        snapshots = Snapshots(
            store=CheckpointStore(tmp_path, keep=1),
            origin=origin(replace(SAVED, data_parallel=size), seed=7),
            engine=SimpleNamespace(world=world),  # type: ignore[arg-type]
            stream=None,  # type: ignore[arg-type]
            write_weights=lambda *_: None,
            weight_dtypes={},
            copy=HostCopy(world),
            total_steps=9,
        )
        for _ in range(2):
            snapshots._restore_rng(Checkpoint(step=5, path=tmp_path, manifest=manifest))
            found.append(draw())
    assert found[::2] == found[1::2]
    assert len(set(map(str, found))) == size
    assert (found[::2] == [drawn[0], drawn[1]]) == (size == 2)


def test_the_trainer_state_comes_back_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    state = TrainerState(step=3, total_steps=9, tokens=12, target_tokens=10, data={"epoch": 1, "row": 4})
    save_state(tmp_path, state)
    assert load_state(tmp_path) == state
    (tmp_path / "state.json").write_text('{"step": 3}')
    with pytest.raises(CheckpointError):
        load_state(tmp_path)


SAVED = Strategy(engine="deepspeed", stage=2, data_parallel=2, micro_batch=4)
IDENTITY = {"model": {"source": "a", "lora": None}, "seed": 1, "betas": (0.9, 0.95)}


def origin(strategy: Strategy = SAVED, **changes: object) -> Origin:
    return Origin(
        world_size=strategy.world_size,
        strategy=strategy.to_json(),
        identity={**IDENTITY, **changes},
        versions={},
    )


def stored(**changes: object) -> Manifest:
    """A manifest as it is after the way through its file."""
    return Manifest.from_json(json.loads(Manifest(step=1, origin=origin(**changes), files={}).to_text()))


def test_the_same_run_may_resume_with_other_micro_batches_and_libraries() -> None:
    other = replace(SAVED, micro_batch=1, accumulation=4)
    check_origin(stored(), replace(origin(other), versions={"torch": "9"}), where="x")


def test_a_checkpoint_from_before_groups_of_ranks_has_none() -> None:
    older = {key: value for key, value in SAVED.to_json().items() if key != "shard_group"}
    saved = Manifest(step=1, origin=replace(origin(), strategy=older), files={})
    check_origin(saved, origin(), where="x", named=False)
    with pytest.raises(CheckpointError, match="in DeepSpeed's own files"):
        check_origin(saved, origin(replace(SAVED, shard_group=2)), where="x", named=False)


def test_every_differing_field_is_named_with_both_values() -> None:
    expected = origin(seed=2, model={"source": "b", "lora": None}, new=True)
    with pytest.raises(CheckpointError) as error:
        check_origin(stored(), expected, where="runs/a/checkpoints/step-000001")
    block = render(error.value)
    assert "model.source is 'b', the checkpoint's is 'a'" in block
    assert "seed is 2, the checkpoint's is 1" in block
    assert "new is True, the checkpoint's is None" in block
    assert "betas" not in block
    assert "lora" not in block


def test_other_data_is_told_in_words_not_in_hashes() -> None:
    with pytest.raises(CheckpointError) as error:
        check_origin(stored(), origin(data="0123abcd"), where="x")
    block = render(error.value)
    assert "the content of the data" in block
    assert "data.train" in block
    assert "0123abcd" not in block


def test_other_tokens_of_the_same_data_are_refused_and_explained() -> None:
    saved = stored(data="0123", tokens="00aa")
    block = told(saved, data="0123", tokens="00bb")
    assert "the same files and settings give other tokens" in block
    assert "strftime_now" in block
    assert "00bb" not in block
    assert "the content of the data" in told(saved, data="4567", tokens="00bb")
    check_origin(saved, origin(data="4567", tokens="00aa"), where="x")  # a template with the date of that day
    check_origin(stored(data="0123"), origin(data="0123", tokens="00bb"), where="an older checkpoint")


def test_another_tokenizer_is_refused_although_the_tokens_are_the_same() -> None:
    """It would be saved with the model."""
    now = {"data": "4567", "tokens": "00aa", "tokenizer": "22"}
    assert "the tokenizer's files are not" in told(stored(data="0123", tokens="00aa", tokenizer="11"), **now)
    check_origin(stored(data="0123", tokens="00aa"), origin(**now), where="an older checkpoint")


def base(sha256: str, commit: str | None = None) -> dict[str, str | None]:
    return {"sha256": sha256, "commit": commit}


def told(saved: Manifest, **changes: object) -> str:
    with pytest.raises(CheckpointError) as error:
        check_origin(saved, origin(**changes), where="x")
    return render(error.value)


def test_another_base_is_refused_with_its_name_and_the_way_back() -> None:
    block = told(stored(base=base("00aa")), base=base("00bb"))
    assert "the frozen base, a, is not the one that the adapter was trained on" in block
    assert "at:  model.source" in block
    assert "put its config.json and safetensors files back" in block
    assert "00bb" not in block

    block = told(stored(base=base("00aa", "c0ffee")), base=base("00bb", "decaf"))
    assert "it is commit decaf, was c0ffee" in block
    assert "write `revision: c0ffee` below `model` in the run folder's job.yaml" in block


def test_the_same_base_may_be_called_by_its_commit() -> None:
    called = {"source": "a", "lora": None, "revision": "c0ffee"}
    check_origin(
        stored(base=base("00aa", "c0ffee")), origin(base=base("00aa", "c0ffee"), model=called), where="x"
    )
    assert "model.revision is 'c0ffee'" in told(stored(), model=called)


def test_a_checkpoint_that_names_no_base_is_still_resumed() -> None:
    check_origin(stored(), origin(base=base("00bb")), where="x")


@pytest.mark.parametrize("change", [{"stage": 3}, {"data_parallel": 1}, {"offload_optimizer": "cpu"}])
def test_another_strategy_is_refused_for_deepspeeds_files_only(change: dict[str, object]) -> None:
    other = origin(replace(SAVED, **change))  # type: ignore[arg-type]
    check_origin(stored(), other, where="x")
    with pytest.raises(CheckpointError) as error:
        check_origin(stored(), other, where="x", named=False)
    block = render(error.value)
    assert "saved by zero2 on 2 processes in DeepSpeed's own files, and this run is" in block
    assert "--set strategy=zero2 --processes 2" in block


def test_a_strategy_without_a_name_in_jobs_is_shown_by_its_parts() -> None:
    """`--set strategy=zero3-offload-parameters` is refused: no job knows that name."""
    saved = origin(replace(SAVED, stage=3, offload_parameters="cpu"))
    with pytest.raises(CheckpointError) as error:
        check_origin(Manifest(step=1, origin=saved, files={}), origin(), where="x", named=False)
    parts = '{"engine": "deepspeed", "stage": 3, "offload_parameters": "cpu"}'
    assert f"resume with --set strategy='{parts}' --processes 2" in render(error.value)


LENGTHS = [
    ({"steps": 60, "epochs": None}, {"steps": 90, "epochs": None}, True),
    ({"steps": 60, "epochs": None}, {"steps": 59, "epochs": None}, False),
    ({"steps": None, "epochs": None}, {"steps": None, "epochs": 2.0}, True),
    ({"steps": None, "epochs": None}, {"steps": None, "epochs": 0.5}, False),
    ({"steps": None, "epochs": 2.0}, {"steps": 900, "epochs": None}, False),
]


@pytest.mark.parametrize(("then", "now", "fine"), LENGTHS)
def test_a_run_may_become_longer(then: dict[str, object], now: dict[str, object], fine: bool) -> None:
    if fine:
        check_origin(stored(**then), origin(**now), where="x")
    else:
        with pytest.raises(CheckpointError, match=r"steps|epochs"):
            check_origin(stored(**then), origin(**now), where="x")


def test_a_checkpoint_from_before_a_key_had_its_default() -> None:
    now = {"optimizer": {"learning_rate": 1e-4, "name": "adamw", "lora_plus": 1.0}}
    before = Origin(world_size=1, strategy={}, identity={"optimizer": {"learning_rate": 1e-4}}, versions={})
    same = Origin(world_size=1, strategy={}, identity=now, versions={})
    check_origin(Manifest(step=1, origin=before, files={}), same, where="x")
    other = Origin(world_size=1, strategy={}, identity={"optimizer": {"name": "adamw8bit"}}, versions={})
    with pytest.raises(CheckpointError) as caught:
        check_origin(Manifest(step=1, origin=before, files={}), other, where="x")
    assert "optimizer.name is 'adamw8bit', the checkpoint's is 'adamw'" in render(caught.value)
