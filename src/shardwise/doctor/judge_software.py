"""From what probes answered to checks: DeepSpeed's operators and the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.doctor.check import Check, Status
from shardwise.doctor.child import Answer
from shardwise.units import duration

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
PURPOSES = {
    "cpu_adam": "offload of the optimizer",
    "async_io": "offload to NVMe",
    "fused_adam": "DeepSpeed's own AdamW, which shardwise does not use",
}


def deepspeed(answer: Answer | None) -> Iterator[Check]:
    """The library and each of its operators; None where it is not installed."""
    name = "DeepSpeed"
    if answer is None:
        finding = "not installed: strategies single and fsdp2 run, ZeRO and tensor parallelism do not"
        yield Check(name, "warning", finding, "pip install 'shardwise[train]'")
        return
    if answer.facts is None:
        fix = "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed, against the installed torch"
        yield Check(name, "problem", f"does not start: {answer.why}", fix)
        return
    facts = answer.facts
    finding = f"{facts['version']} on {facts['accelerator']}"
    yield Check(name, "ok", finding, facts={"version": facts["version"]})
    for op, purpose in PURPOSES.items():
        yield _operator(op, purpose, facts)


def _operator(op: str, purpose: str, facts: Mapping[str, Any]) -> Check:
    found = facts["ops"][op]
    name = f"op: {op}"
    if found.get("built"):
        if found["loads"]:
            return Check(name, "ok", f"compiled and loads ({purpose})", facts=found)
        finding = f"compiled, but does not load ({purpose}): {found['error']}"
        fix = f"delete {Path(found['file']).parent}: it is compiled again where it is used"
        return Check(name, "warning", finding, fix, found)
    why, fix = _cannot_compile(op, found, facts)
    if why:
        # no warning for operators that only special requests need
        lacking: Status = "warning" if op == "cpu_adam" else "skipped"
        return Check(name, lacking, f"cannot be compiled, for {purpose}: {why}", fix, found)
    return Check(name, "ok", f"can be compiled where it is first used ({purpose})", facts=found)


def _cannot_compile(op: str, found: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[str, str]:
    """The reason and its fix; empty where it can."""
    if not found["compatible"]:
        fix = "apt install libaio-dev" if op == "async_io" else "see `python -m deepspeed.env_report`"
        return found["why"], fix
    if facts["ninja"] is None:
        return "ninja is missing", "pip install ninja"
    cuda = facts["cuda"]
    if cuda is None or not cuda["why"]:
        return "", ""
    wanted = cuda["torch"]
    if cuda["nvcc"] is not None:
        return (
            f"nvcc is of CUDA {cuda['nvcc']}, torch of {wanted}",
            f"install CUDA {wanted}'s toolkit and set CUDA_HOME, or unset it; or DS_SKIP_CUDA_CHECK=1",
        )
    if op == "fused_adam":
        return "there is no nvcc", f"install CUDA {wanted}'s toolkit and set CUDA_HOME"
    return "", ""  # without nvcc it is compiled for the CPU alone, which is all it needs


def hub(answer: Answer | None) -> Check:
    """Whether models and data can be fetched; None where the environment says not to."""
    name = "hub"
    if answer is None:
        said = next(filter(_is_set, OFFLINE))
        finding = f"not asked: {said} is set, so models and data come from folders and the cache"
        return Check(name, "skipped", finding)
    facts = answer.facts or {}
    if answer.facts is None or "failed" in facts:
        reason = facts.get("failed", answer.why)
        fix = "set HTTPS_PROXY or HF_ENDPOINT; or use local folders and set HF_HUB_OFFLINE=1"
        return Check(name, "warning", f"no answer: {reason}", fix, facts)
    status, endpoint = facts["status"], facts["endpoint"]
    if status == 401:
        fix = "`hf auth login`, or set a new HF_TOKEN"
        return Check(name, "warning", f"{endpoint} does not accept the token", fix, facts)
    if status >= 400:
        fix = "look at https://status.huggingface.co, or at the proxy"
        return Check(name, "warning", f"{endpoint} answers {status}", fix, facts)
    without = "without a token, which gated models need (`hf auth login`)"
    token = "with a valid token" if facts["token"] else without
    return Check(name, "ok", f"{endpoint} answers, {token}", facts=facts)


def offline() -> bool:
    """Whether the environment forbids Hugging Face's libraries to use the network."""
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
        return Check(name, "warning", f"cannot be used: {why}", fix)
    finding = f"compiled or found in {duration(answer.facts['seconds'])}, its step is right"
    return Check(name, "ok", finding, facts=answer.facts)
