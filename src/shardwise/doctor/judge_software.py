"""From what probes answered to checks: DeepSpeed's operators and the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.doctor.check import Check, Status
from shardwise.doctor.child import Answer
from shardwise.units import duration

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def deepspeed(answer: Answer | None) -> Iterator[Check]:
    """The library and each of its operators; None where it is not installed."""
    name = "DeepSpeed"
    if answer is None:
        finding = "not installed: strategies single and fsdp2 run, ZeRO and tensor parallelism do not"
        yield Check(name=name, status="warning", finding=finding, fix="pip install 'shardwise[train]'")
        return
    if answer.facts is None:
        fix = "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed, against the torch that is there"
        yield Check(name=name, status="problem", finding=f"does not start: {answer.why}", fix=fix)
        return
    facts = answer.facts
    finding = f"{facts['version']} on {facts['accelerator']}"
    yield Check(name=name, status="ok", finding=finding, facts={"version": facts["version"]})
    for op, purpose in PURPOSES.items():
        yield _operator(op, purpose, facts)


PURPOSES = {
    "cpu_adam": "offload of the optimizer",
    "async_io": "offload to NVMe",
    "fused_adam": "DeepSpeed's own AdamW, which shardwise does not use",
}


def _operator(op: str, purpose: str, facts: Mapping[str, Any]) -> Check:
    found = facts["ops"][op]
    name = f"op: {op}"
    # what nobody needs unless he asks for it is no warning
    lacking: Status = "warning" if op == "cpu_adam" else "skipped"
    if found.get("built"):
        if found["loads"]:
            return Check(name=name, status="ok", finding=f"compiled and loads ({purpose})", facts=found)
        return Check(
            name=name,
            status="warning",
            finding=f"compiled, but does not load ({purpose}): {found['error']}",
            fix=f"delete {os.path.dirname(found['file'])}: it is compiled again where it is used",  # noqa: PTH120 - a text
            facts=found,
        )
    why, fix = _cannot_compile(op, found, facts)
    if why:
        finding = f"cannot be compiled, for {purpose}: {why}"
        return Check(name=name, status=lacking, finding=finding, fix=fix, facts=found)
    finding = f"can be compiled where it is first used ({purpose})"
    return Check(name=name, status="ok", finding=finding, facts=found)


def _cannot_compile(op: str, found: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[str, str]:
    """Why, and what to do; empty where it can."""
    if not found["compatible"]:
        fix = "apt install libaio-dev" if op == "async_io" else "see `python -m deepspeed.env_report`"
        return found["why"], fix
    if facts["ninja"] is None:
        return "ninja is missing", "pip install ninja"
    cuda = facts["cuda"]
    if cuda is None or not cuda["why"]:
        return "", ""
    wants = cuda["torch"]
    if cuda["nvcc"] is not None:
        return (
            f"nvcc is of CUDA {cuda['nvcc']}, torch of {wants}",
            f"install CUDA {wants}'s toolkit and set CUDA_HOME, or unset it; or DS_SKIP_CUDA_CHECK=1",
        )
    if op == "fused_adam":
        return "there is no nvcc", f"install CUDA {wants}'s toolkit and set CUDA_HOME"
    return "", ""  # without nvcc it is compiled for the CPU alone, which is all it needs


def hub(answer: Answer | None) -> Check:
    """Whether models and data can be fetched; None where the environment says not to."""
    name = "hub"
    if answer is None:
        said = next(key for key in OFFLINE if _is_set(key))
        finding = f"not asked: {said} is set, so models and data come from folders and the cache"
        return Check(name=name, status="skipped", finding=finding)
    if answer.facts is None or "failed" in answer.facts:
        reason = answer.why if answer.facts is None else answer.facts["failed"]
        return Check(
            name=name,
            status="warning",
            finding=f"no answer: {reason}",
            fix="set HTTPS_PROXY or HF_ENDPOINT; or use local folders and set HF_HUB_OFFLINE=1",
            facts=answer.facts or {},
        )
    facts = answer.facts
    status, endpoint = facts["status"], facts["endpoint"]
    if status == 401:
        finding, fix = f"{endpoint} does not accept the token", "`hf auth login`, or set HF_TOKEN anew"
        return Check(name=name, status="warning", finding=finding, fix=fix, facts=facts)
    if status >= 400:
        fix = "look at https://status.huggingface.co, or at the proxy"
        return Check(
            name=name, status="warning", finding=f"{endpoint} answers {status}", fix=fix, facts=facts
        )
    token = (
        "with a valid token"
        if facts["token"]
        else "without a token, which gated models need (`hf auth login`)"
    )
    return Check(name=name, status="ok", finding=f"{endpoint} answers, {token}", facts=facts)


def offline() -> bool:
    """Whether the environment tells Hugging Face's libraries to keep off the network."""
    return any(map(_is_set, OFFLINE))


def _is_set(key: str) -> bool:
    """As huggingface_hub.constants reads it."""
    return os.environ.get(key, "").upper() in {"1", "ON", "YES", "TRUE"}


def cpu_adam(answer: Answer) -> Check:
    """DeepSpeed's optimizer for offload, compiled and stepped."""
    name = "op: cpu_adam, run"
    if answer.facts is None or not answer.facts["right"]:
        why = answer.why if answer.facts is None else "its first step is wrong"
        fix = (
            "see `compilers`, and `python -m deepspeed.env_report`; without it, do not offload the optimizer"
        )
        return Check(name=name, status="warning", finding=f"cannot be used: {why}", fix=fix)
    finding = f"compiled or found in {duration(answer.facts['seconds'])}, its step is right"
    return Check(name=name, status="ok", finding=finding, facts=answer.facts)
