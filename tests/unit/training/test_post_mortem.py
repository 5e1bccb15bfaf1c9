"""The explanation of a failure and the next try, by real plans of a small model on GPUs that are not here."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job
from shardwise.launch.spec import LaunchSpec
from shardwise.record.schema import OutOfMemory
from shardwise.strategy import Strategy
from shardwise.training import post_mortem as module
from shardwise.training.post_mortem import measured, post_mortem, used_bytes

GIB = 2**30
HARDWARE = parse_hardware("2xRTX4080")
TOTAL = 16 * GIB
USED = int(14.4 * GIB)
MORE = int(15.7 * GIB)
"""With a GiB more, both are beyond the 4.4 GiB that are predicted; one more than the GPU has."""
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8000,
}
ZERO2 = Strategy(engine="deepspeed", stage=2, data_parallel=2, micro_batch=4, accumulation=2)
REQUESTED = {"weights": "random", "tokenizer": "train", "tokenizer_vocab": 8000}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all: every test asks for the same plans."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path_factory.getbasetemp() / "post-mortem-cache"))


def evidence(strategy: Strategy = ZERO2, *, used: int = 0, **known: Any) -> OutOfMemory:
    """`used` bytes of the GPU when GIB more were asked for."""
    numbers: dict[str, Any] = dict.fromkeys(OutOfMemory.__dataclass_fields__)
    if used:
        numbers |= {
            "asked_bytes": GIB,
            "allocated_bytes": used - 2 * GIB,
            "reserved_bytes": used - 2 * GIB,
            "process_bytes": used,
            "free_bytes": TOTAL - used,
            "total_bytes": TOTAL,
        }
    numbers |= {
        "rank": 0,
        "ranks": (0,),
        "phase": "backward",
        "step": 3,
        "call": "x.py:1 in f",
        "message": "full",
    }
    return OutOfMemory(**{**numbers, "strategy": strategy.to_json(), "vocab_size": 8000, **known})


def ask(
    *failures: OutOfMemory,
    saved: int | None = None,
    strategy: str | dict[str, Any] = "zero2",
    model: dict[str, Any] | None = None,
    hardware: Hardware | None = HARDWARE,
    on_oom: str = "retry",
) -> dict[str, Any]:
    job = Job.model_validate(
        {
            "name": "run",
            "model": {"source": "llama-3.2-1b", "config": SHAPE, **REQUESTED, **(model or {})},
            "data": {"train": "text.txt", "sequence_length": 4096},
            "train": {"steps": 2, "global_batch": 16, "micro_batch": 4, "checkpointing": "none"},
            "strategy": strategy,
        }
    )
    spec = LaunchSpec(job=job.model_dump(mode="json"), run_dir="runs/run", processes=2, on_oom=on_oom)  # type: ignore[arg-type]
    request = {
        "spec": spec.to_json(),
        "failures": json.loads(json.dumps([asdict(failure) for failure in failures])),
        "saved_step": saved,
    }
    return post_mortem(request, hardware)


def following(answer: dict[str, Any]) -> Strategy:
    return Strategy.from_json(answer["next"]["strategy"])


def test_changes_come_with_what_they_save_and_cost() -> None:
    answer = ask(evidence(used=USED), on_oom="stop")
    rows, checkpointing, kind = answer["changes"]
    assert rows["what"].startswith("zero2 with micro-batch 2, accumulation 4, no checkpointing: ")
    assert rows["fix"] == "--set train.micro_batch=2"
    assert checkpointing["what"].startswith("zero2 with micro-batch 4, accumulation 2, checkpointing")
    assert checkpointing["fix"].startswith("--set train.checkpointing=")
    assert not kind["what"].startswith("zero2 ")
    assert kind["fix"].startswith("--set strategy=")
    for change in answer["changes"]:
        assert " less" in change["what"]
        assert "x the time of a step (predicted)" in change["what"]
    assert answer["next"] is None


def test_with_a_saved_state_a_change_is_the_command_that_goes_on() -> None:
    rows, checkpointing, kind = ask(evidence(used=USED), saved=2, on_oom="stop")["changes"]
    assert rows["fix"] == "shardwise train runs/run --resume --set train.micro_batch=2"
    assert checkpointing["fix"].startswith("shardwise train runs/run --resume --set train.checkpointing=")
    assert kind["fix"].startswith("shardwise train runs/run --resume --set strategy=")


def test_the_terms_above_the_plan_are_named() -> None:
    """10 of 11 GiB in tensors go with the step; of what is beside, one GiB is CUDA's, two are others'."""
    found = evidence(used=13 * GIB, resident_bytes=GIB, free_bytes=TOTAL - 15 * GIB, reserved_bytes=12 * GIB)
    [_, terms] = ask(found, on_oom="stop")["facts"]
    assert terms["what"].startswith("more than predicted: activations and the loss 11.0 GiB, predicted ")
    assert "other processes 2.0 GiB, predicted 0 MiB" in terms["what"]
    assert "fragments 1.0 GiB, predicted" in terms["what"]
    assert "CUDA and NCCL" not in terms["what"]
    assert "for zero2 with micro-batch 4, accumulation 2, no checkpointing" in terms["what"]


def test_a_phase_that_is_not_planned_is_said_to_be_none() -> None:
    [_, terms] = ask(evidence(used=13 * GIB, resident_bytes=GIB, phase="evaluation"), on_oom="stop")["facts"]
    assert terms["what"].endswith("and counts training steps only")


def test_a_retry_keeps_the_kind_that_the_job_names_and_the_global_batch() -> None:
    answer = ask(evidence(used=USED))
    strategy = following(answer)
    assert strategy.name == "zero2"
    assert strategy.global_batch == 16
    assert (strategy.micro_batch, strategy.checkpoint_every) != (4, 0)
    assert answer["next"]["prediction"]["memory"]["peak_reserved_bytes"] > 0
    [why] = answer["next"]["why"]
    assert why.startswith("instead of zero2 with micro-batch 4, accumulation 2, no checkpointing: out of GPU")


def test_what_is_short_by_more_makes_the_next_leaner() -> None:
    def needed(used: int) -> int:
        memory = ask(evidence(used=used))["next"]["prediction"]["memory"]
        return int(memory["peak_reserved_bytes"])

    assert needed(MORE) < needed(12 * GIB)


def test_auto_is_free_with_and_without_a_saved_state() -> None:
    """Every strategy loads what another has saved (decision 0060)."""
    saved = following(ask(evidence(used=MORE), strategy="auto", saved=1))
    free = following(ask(evidence(used=MORE), strategy="auto"))
    assert saved == free
    assert free.name != "zero2"


def test_what_was_tried_is_not_tried_again() -> None:
    first = evidence(used=USED)
    second = following(ask(first))
    third = following(ask(first, evidence(second, used=USED)))
    assert third not in (ZERO2, second)


def test_where_nothing_is_left_the_nearest_change_is_named() -> None:
    smallest = replace(ZERO2, micro_batch=1, accumulation=8, checkpoint_every=1)
    answer = ask(evidence(smallest, used=int(15.9 * GIB)), saved=1)
    assert answer["next"] is None
    assert answer["why_no_next"].startswith("nothing is known to need less")
    assert answer["instead"].startswith(("--sequence ", "--gpus "))
    assert "fits, in" in answer["instead"]


def test_without_hardware_the_ladder_is_tried_rung_by_rung() -> None:
    answer = ask(evidence(), hardware=None, on_oom="stop")
    assert [change["fix"] for change in answer["changes"]] == [
        "--set train.micro_batch=2",
        "--set train.micro_batch=1",
        "--set train.micro_batch=1 --set train.checkpointing=full",
    ]
    assert len(answer["facts"]) == 1
    assert answer["facts"][0]["what"] == "full"
    failures = [evidence()]
    names, following_checkpoints = [], []
    while (answer := ask(*failures, hardware=None))["next"] is not None:
        names.append((following(answer).name, following(answer).micro_batch))
        following_checkpoints.append(following(answer).checkpoint_every)
        failures.append(evidence(following(answer)))
    assert names == [("zero2", 2), ("zero2", 1), ("zero2", 1)]
    assert following_checkpoints == [0, 0, 1]
    assert answer["instead"].startswith("shorter rows")
    assert "another strategy (zero3, zero3-offload)" in answer["instead"]


PARALLEL = Strategy(
    engine="deepspeed", stage=1, tensor_parallel=2, data_parallel=1, micro_batch=4, accumulation=4
)
AUTOTP = {"engine": "deepspeed", "stage": 1, "tensor_parallel": 2}


def test_a_cut_model_is_predicted_as_a_whole_one() -> None:
    answer = ask(evidence(PARALLEL, used=USED), strategy=AUTOTP)
    assert "the plan predicts " in answer["facts"][1]["what"]
    assert answer["changes"][0]["what"].startswith("autotp2-zero1 with micro-batch ")
    assert all("x the time of a step (predicted)" in change["what"] for change in answer["changes"])
    assert following(answer).tensor_parallel == 2, "the kind that the job names"
    assert answer["next"]["prediction"]["memory"]["peak_reserved_bytes"] > 0


def test_a_cut_model_whose_layers_are_gathered_is_not_simulated(tmp_path: Path) -> None:
    """OLMo 2's plan gathers the outputs of layers that it cuts, which no trace knows."""
    olmo = {**SHAPE, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({**olmo, "pad_token_id": 1}))
    model = {"source": str(tmp_path), "config": {}}
    answer = ask(evidence(PARALLEL, used=USED), strategy=AUTOTP, model=model, on_oom="stop")
    assert len(answer["facts"]) == 1
    assert answer["changes"][0] == {
        "what": "autotp2-zero1 with micro-batch 2, accumulation 8, no checkpointing",
        "where": "",
        "fix": "--set train.micro_batch=2",
    }


def test_used_is_what_the_gpu_held_and_what_was_asked_for() -> None:
    assert used_bytes(evidence()) == 0
    assert used_bytes(evidence(used=12 * GIB)) == 13 * GIB
    fragmented = evidence(used=12 * GIB, reserved_bytes=10 * GIB + GIB // 2)
    assert used_bytes(fragmented) == 12 * GIB + GIB // 2
    others = evidence(used=12 * GIB, free_bytes=0)
    assert used_bytes(others) == 17 * GIB
    assert used_bytes(replace(others, allowed_bytes=11 * GIB)) == 13 * GIB, "the cap is on this process alone"


def test_the_process_answers_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "detect_hardware", lambda: None)
    seen = {}
    monkeypatch.setattr(
        module, "post_mortem", lambda request, hardware: seen.update(request) or {"a": hardware}
    )
    path, answer = tmp_path / "request.json", tmp_path / "answer.json"
    path.write_text(json.dumps({"spec": {"processes": 2}, "answer": str(answer)}))
    assert module.main([str(path)]) == 0
    assert json.loads(answer.read_text()) == {"a": None}


def test_the_terms_add_up_and_those_not_measured_are_left_out() -> None:
    memory = module.predict_strategy(
        Job.model_validate(
            {
                "name": "run",
                "model": {"source": "llama-3.2-1b", "config": SHAPE, **REQUESTED},
                "data": {"train": "text.txt", "sequence_length": 4096},
                "train": {"global_batch": 16},
            }
        ),
        HARDWARE,
        ZERO2,
        vocab_size=8000,
    ).prediction.memory
    assert measured(evidence(), memory) == []
    every = evidence(used=12 * GIB, resident_bytes=GIB)
    terms = measured(every, memory)
    assert sum(predicted for _, _, predicted in terms) == memory.needed_bytes
    assert sum(now for _, now, _ in terms) == 12 * GIB + GIB, "all that is in use, and what was asked for"
