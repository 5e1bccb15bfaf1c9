"""What other estimators say: their formulas as their authors print them, and the arithmetic of errors."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

import accuracy

GIB = 1024**3


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    return accuracy.module("peers")


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads((accuracy.FOLDER / "results" / "peers.json").read_text())
    return content


# Pythia 6.9B, as in the README's example without its tensor parallelism, and Llama 3.2 1B.
PYTHIA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_layers": 32,
    "vocab_size": 51200,
    "ffn_expansion_factor": 4.0,
    "num_mlp_linears": 2,
    "kv_size_ratio": 1.0,
    "sequence_length": 2048,
    "batch_size_per_gpu": 8,
}
LLAMA = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_layers": 16,
    "vocab_size": 128256,
    "ffn_expansion_factor": 4.0,
    "num_mlp_linears": 3,
    "kv_size_ratio": 0.25,
    "sequence_length": 2048,
    "batch_size_per_gpu": 4,
}


@pytest.mark.parametrize(
    ("sizes", "gpus", "stage", "checkpointing", "printed"),
    [
        (PYTHIA, 128, 1, True, "107.93"),
        (PYTHIA, 1, 0, False, "343.19"),
        (LLAMA, 1, 0, True, "33.69"),
        (LLAMA, 4, 0, True, "33.69"),
        (LLAMA, 2, 2, False, "63.43"),
        (LLAMA, 4, 3, True, "17.59"),
        (LLAMA, 1, 3, True, "33.69"),
    ],
)
def test_the_cookbook_is_what_its_script_prints(
    peers: ModuleType, sizes: dict[str, Any], gpus: int, stage: int, checkpointing: bool, printed: str
) -> None:
    """`printed`: "Per-GPU Memory Required for Training" of the script at the commit that peers.py names."""
    arguments = peers.CookbookArguments(
        **sizes, num_gpus=gpus, zero_stage=stage, checkpoint_activations=checkpointing
    )
    assert f"{peers.cookbook_bytes(arguments) / GIB:.2f}" == printed


def test_every_row_has_an_entry(peers: ModuleType, recorded: dict[str, Any]) -> None:
    """peers.json is made anew when rows.toml changes."""
    assert list(recorded) == [row.id for row in peers.known_rows()]


def test_a_missing_number_has_a_reason(peers: ModuleType, recorded: dict[str, Any]) -> None:
    for entry in recorded.values():
        for tool in peers.TOOLS:
            assert (entry[f"{tool}_bytes"] is None) == (f"{tool}_why_not" in entry)


def test_recorded_numbers_are_the_tools_arithmetic(recorded: dict[str, Any]) -> None:
    """By hand, from the published number of parameters."""
    # ZeRO-2 on 4 GPUs: 2 bytes a parameter, and a quarter of 18
    llama = recorded["llama-2-7b.4gpu.zero2.full.s2048.b2x1.ck0"]
    assert llama["deepspeed_bytes"] == int(6_738_415_616 * 6.5)
    # offloaded ZeRO-2: 2 bytes a parameter
    offloaded = recorded["tinyllama-1.1b.1gpu.zero2-offload.full.s2048.b4x1.ck1"]
    assert offloaded["deepspeed_bytes"] == 2 * 1_100_048_384
    # ZeRO-3 with everything offloaded: 4 bytes for each value of the embedding, the largest module
    offloaded = recorded["tinyllama-1.1b.2gpu.zero3-offload.full.s2048.b2x2.ck1"]
    assert offloaded["deepspeed_bytes"] == 4 * 32000 * 2048
    # accelerate: twice the fp32 model, four times in fp32; without the output layer, and with two buffers of
    # rotary frequencies
    model = 4 * (6_738_415_616 - 32000 * 4096 + 2 * 64)
    assert llama["accelerate_bytes"] == 2 * model
    assert llama["accelerate_float32_bytes"] == 4 * model


def test_tools_are_not_asked_what_they_cannot_be_told(recorded: dict[str, Any]) -> None:
    lora = recorded["llama-2-7b.2gpu.zero2.lora16.s2048.b2x1.ck0"]
    assert lora["deepspeed_bytes"] is lora["accelerate_bytes"] is lora["cookbook_bytes"] is None
    stage_1 = recorded["pythia-1b.1gpu.zero1.full.s2048.b2x1.ck0"]
    assert stage_1["deepspeed_why_not"] == "has no estimator for ZeRO stage 1"
    assert stage_1["cookbook_bytes"] > 0
    offload = recorded["llama-3.2-1b.1gpu.fsdp2-offload.full.s2048.b2x1.ck1"]
    assert offload["cookbook_why_not"] == "has no word for offloading"
    assert offload["accelerate_bytes"] > 0


def test_errors_are_relative_to_the_measured_peak(peers: ModuleType) -> None:
    said: dict[str, dict[str, Any]] = {
        row: {f"{tool}_bytes": None for tool in peers.TOOLS} | {"cookbook_bytes": number}
        for row, number in {"a": 150, "b": 80, "c": 30, "d": None, "failed": 1}.items()
    }
    measured = [{"id": row, "error": None, "peak_reserved_bytes": 100} for row in "abcd"]
    measured.append({"id": "failed", "error": "out of memory", "peak_reserved_bytes": None})
    found = peers.errors(said, measured)
    assert set(found) == {"cookbook"}
    assert found["cookbook"] == {
        "rows": 3,
        "mean_absolute": pytest.approx((0.5 + 0.2 + 0.7) / 3),
        "median": pytest.approx(-0.2),
        "worst": pytest.approx(-0.7),
        "worst_row": "c",
    }
