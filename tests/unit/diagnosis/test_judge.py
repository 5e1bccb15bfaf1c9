"""From what probes answered to what a person is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.device import Card
from shardwise.diagnosis import judge
from shardwise.diagnosis.child import Answer
from shardwise.diagnosis.gpus import Gpus

CARDS = [Card(index=i, uuid=f"GPU-{i}", name="NVIDIA H200") for i in range(4)]
FOUR = Gpus(cards=CARDS, driver="580.95.05", count=4)
NONE = Gpus(failure="there is no NVIDIA driver")
BUILD: dict[str, Any] = {
    "torch": "2.13.0+cu130", "cuda": "13.0", "gpus": 4, "said": "", "capabilities": [[9, 0]] * 4,
    "compiled_for": ["sm_80", "sm_90", "compute_90"], "nccl": "2.30.4",
}  # fmt: skip


def build(machine: Gpus = FOUR, **changed: Any) -> tuple[str, str, str]:
    check = judge.torch_build(Answer(facts={**BUILD, **changed}), machine)
    return check.status, check.finding, check.fix


def test_torch_and_driver_that_match() -> None:
    status, finding, _ = build()
    assert (status, finding) == ("ok", "torch 2.13.0+cu130 with CUDA 13.0 and NCCL 2.30.4, driver 580.95.05")


def test_a_machine_without_gpus_needs_no_cuda() -> None:
    assert build(NONE, cuda=None, gpus=0, torch="2.13.0+cpu")[:2] == ("ok", "torch 2.13.0+cpu, on the CPU")


@pytest.mark.parametrize(
    ("driver", "cuda", "old"),
    [
        ("470.199.02", "12.8", True),
        ("525.60.13", "12.8", False),
        ("570.124.06", "13.0", True),
        ("580.65.06", "13.0", False),
    ],
)
def test_a_driver_too_old_names_the_one_it_takes(driver: str, cuda: str, old: bool) -> None:
    status, finding, fix = build(replace(FOUR, driver=driver), cuda=cuda, gpus=0, capabilities=[], said="no")
    assert status == "problem"
    assert (f"driver {driver} is too old for CUDA {cuda}" in finding) is old
    assert ("update the driver" in fix) is old


def test_an_old_driver_that_works_with_a_compatibility_package_is_right() -> None:
    assert build(replace(FOUR, driver="535.104.05"))[0] == "ok"


@pytest.mark.parametrize(
    ("changed", "told", "fix"),
    [
        ({"cuda": None, "gpus": 0}, "built without CUDA, so 4 GPUs would stand idle", "torch with CUDA"),
        ({"gpus": 3}, "CUDA shows 3 of the 4 GPUs", "nvidia-fabricmanager"),
        ({"gpus": 0, "said": "Error 802: system not yet initialized"}, "system not yet", "fabricmanager"),
        ({"capabilities": [[12, 0]] * 4, "compiled_for": ["sm_80", "sm_90a"]}, "sm_120", "newer CUDA"),
        ({"capabilities": [[7, 0]] * 4, "compiled_for": ["sm_80", "compute_90"]}, "sm_70", "dropped"),
    ],
)
def test_what_does_not_match_is_a_problem(changed: dict[str, Any], told: str, fix: str) -> None:
    status, finding, shown = build(**changed)
    assert status == "problem"
    assert told in finding
    assert fix in shown


@pytest.mark.parametrize(
    ("compiled_for", "capability"),
    [(["sm_80"], [8, 9]), (["compute_90"], [12, 0]), (["sm_100"], [10, 3]), (["sm_90a"], [9, 0])],
)
def test_code_that_runs_on_newer_gpus(compiled_for: list[str], capability: list[int]) -> None:
    assert build(compiled_for=compiled_for, capabilities=[capability] * 4)[0] == "ok"


def test_gpus_that_only_torch_sees_would_not_be_used() -> None:
    """A container without the driver's utilities: the launcher counts with NVML."""
    status, finding, fix = build(NONE, gpus=1, capabilities=[[9, 0]])
    assert status == "problem"
    assert "sees 1 GPUs, but there is no NVIDIA driver" in finding
    assert "NVIDIA_DRIVER_CAPABILITIES" in fix


def test_a_torch_that_does_not_start() -> None:
    answer = Answer(failure="ImportError: libcudart.so.13: cannot open shared object file")
    check = judge.torch_build(answer, NONE)
    assert (check.status, check.finding) == ("problem", f"torch does not start: {answer.failure}")


def formats(capability: list[int] | None, **changed: Any) -> dict[str, str]:
    right = {"error": 1e-3}
    facts = {"capability": capability, "bf16": right, "fp16": right, "fp8": {"error": 0.03}, **changed}
    return {check.name: check.status for check in judge.formats(Answer(facts=facts))}


def test_formats() -> None:
    assert formats([9, 0]) == {"bf16": "ok", "fp16": "ok", "fp8": "ok"}
    assert formats([8, 0]) == {"bf16": "ok", "fp16": "ok", "fp8": "skipped"}
    assert formats([7, 5]) == {"bf16": "warning", "fp16": "ok", "fp8": "skipped"}
    assert formats(None)["bf16"] == "ok"
    assert formats([9, 0], bf16={"error": 0.2})["bf16"] == "problem"
    assert formats([9, 0], bf16={"error": float("nan")})["bf16"] == "problem"
    assert formats([9, 0], fp8={"failed": "not compiled with"})["fp8"] == "warning"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Answer(facts={"device": "cuda", "error": 1e-5, "bound": 2e-3}), "ok"),
        (Answer(facts={"device": "cuda", "error": 3e-3, "bound": 2e-3}), "problem"),
        (Answer(facts={"device": "cuda", "error": float("nan"), "bound": 2e-3}), "problem"),
        (Answer(failure="crashed with SIGSEGV"), "problem"),
    ],
)
def test_kernels(answer: Answer, status: str) -> None:
    answers = dict.fromkeys(("cross_entropy", "attention", "mamba"), answer)
    checks = list(judge.kernels(answers, liger=False))
    assert [check.status for check in checks] == [status] * 3 + ["skipped"]
    assert all(check.fix for check in checks if check.status == "problem")


def test_a_kernel_that_liger_has_for_gpus_only() -> None:
    right = Answer(facts={"device": "cpu", "error": 1e-7, "bound": 1e-4})
    answers = {
        "cross_entropy": right,
        "attention": right,
        "mamba": right,
        "liger": Answer(facts={"device": "cpu"}),
    }
    assert [check.status for check in judge.kernels(answers, liger=True)] == ["ok", "ok", "ok", "skipped"]


def summed(**changed: Any) -> Answer:
    facts = {"backend": "nccl", "ranks": 4, "right": True, "bytes": 2**26, "seconds": 4e-4}
    return Answer(facts={**facts, **changed})


def test_an_all_reduce_that_is_right() -> None:
    check = judge.collective([summed()] * 3 + [summed(seconds=8e-4)])
    assert (check.status, check.facts["seconds"]) == ("ok", 8e-4)
    assert check.finding == "NCCL over 4 GPUs: 64 MiB in 0.8 ms, sums right"


@pytest.mark.parametrize(
    ("answers", "told", "fix"),
    [
        ([summed(), summed(right=False)], "wrong on ranks 1", "NCCL_P2P_DISABLE=1"),
        (
            [Answer(failure="hung for 60 s while rank 0 of 2 sums 67108864 bytes")] * 2,
            "rank 1 hung for 60 s",
            "NCCL_P2P_DISABLE=1",
        ),
        (
            [summed(), Answer(failure="hung for 60 s while rank 1 of 2 meets the others")],
            "meets",
            "NCCL_SOCKET_IFNAME",
        ),
        (
            [Answer(failure="hung for 60 s while rank 0 of 2 connects over nccl")] * 2,
            "connects",
            "P2P_DISABLE",
        ),
        ([summed(), Answer(failure="crashed with SIGBUS")], "rank 1 crashed with SIGBUS", "shared memory"),
    ],
)
def test_an_all_reduce_that_is_not(answers: list[Answer], told: str, fix: str) -> None:
    check = judge.collective(answers)
    assert check.status == "problem"
    assert told in check.finding
    assert fix in check.fix


def test_bitsandbytes_is_optional() -> None:
    assert judge.bitsandbytes(None).status == "skipped"
    assert judge.bitsandbytes(Answer(failure="OSError: libcusparse")).status == "warning"
    facts = {"version": "0.50.2", "device": "cuda", "error": 0.09}
    assert judge.bitsandbytes(Answer(facts=facts)).status == "ok"
    assert judge.bitsandbytes(Answer(facts={**facts, "error": 0.9})).status == "warning"


def deepspeed(op: dict[str, Any], **changed: Any) -> tuple[str, str]:
    possible = {"compatible": True, "why": "", "built": False}
    facts = {
        "version": "0.19.8", "accelerator": "cuda", "ninja": "/usr/bin/ninja",
        "cuda": {"torch": "13.0", "nvcc": "13.0", "why": ""},
        "ops": {"cpu_adam": {**possible, **op}, "async_io": possible, "fused_adam": possible}, **changed,
    }  # fmt: skip
    found = {check.name: check for check in judge.deepspeed(Answer(facts=facts))}
    check = found["op: cpu_adam"]
    return check.status, f"{check.finding} | {check.fix}"


@pytest.mark.parametrize(
    ("op", "changed", "status", "told"),
    [
        ({}, {}, "ok", "can be compiled"),
        ({"built": True, "loads": True}, {"ninja": None}, "ok", "compiled and loads"),
        (
            {"built": True, "loads": False, "file": "/x/a.so", "error": "undefined symbol"},
            {},
            "warning",
            "delete /x",
        ),
        ({"compatible": False, "why": "no g++"}, {}, "warning", "no g++"),
        ({}, {"ninja": None}, "warning", "pip install ninja"),
        (
            {},
            {"cuda": {"torch": "13.0", "nvcc": "12.4", "why": "another"}},
            "warning",
            "nvcc is of CUDA 12.4, torch of 13.0",
        ),
        ({}, {"cuda": {"torch": "13.0", "nvcc": None, "why": "no CUDA_HOME"}}, "ok", "can be compiled"),
    ],
)
def test_cpu_adam(op: dict[str, Any], changed: dict[str, Any], status: str, told: str) -> None:
    found = deepspeed(op, **changed)
    assert found[0] == status
    assert told in found[1]


def test_deepspeed_missing_and_broken() -> None:
    assert [check.status for check in judge.deepspeed(None)] == ["warning"]
    (broken,) = judge.deepspeed(Answer(failure="ImportError: cannot import name"))
    assert broken.status == "problem"


def hub(**facts: Any) -> tuple[str, str]:
    check = judge.hub(Answer(facts={"endpoint": "https://huggingface.co", "token": False, **facts}))
    return check.status, f"{check.finding} | {check.fix}"


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub(status=200) == ("ok", "https://huggingface.co answers, without a token, which gated models need (`hf auth login`) | ")  # fmt: skip # noqa: E501
    assert hub(status=200, token=True)[0] == "ok"
    assert "does not accept the token" in hub(status=401, token=True)[1]
    assert hub(status=503)[0] == "warning"
    assert "Name or service not known" in hub(failed="Name or service not known")[1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert not judge.offline()
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert judge.offline()
    assert "TRANSFORMERS_OFFLINE is set" in judge.hub(None).finding
