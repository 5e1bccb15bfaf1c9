"""From what probes answered to checks."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from shardwise.diagnosis import Check, Status
from shardwise.diagnosis.child import Answer
from shardwise.diagnosis.gpus import Gpus
from shardwise.units import duration

LEAST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
"""By CUDA's major version, on Linux: CUDA Toolkit 13.0 release notes, minor version compatibility."""

# a rounding of each factor to 8, 11 or 4 bits, with a margin
FORMAT_ERROR = {"bf16": 1e-2, "fp16": 2e-3, "fp8": 1e-1}
NF4_ERROR = 0.15
BF16_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)  # with matrix units for the format: Ampere; Ada
KERNELS = {"cross_entropy": "kernel: loss", "attention": "kernel: attention", "mamba": "kernel: Mamba"}
KERNELS["liger"] = "kernels: Liger"
GPU_FIX = "run again; if it stays, GPU or driver are damaged: see Xid in `dmesg`, `nvidia-smi -q -d ECC`"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
PURPOSES = {
    "cpu_adam": "offload of the optimizer",
    "async_io": "offload to NVMe",
    "fused_adam": "DeepSpeed's own AdamW, which shardwise does not use",
}


BUSY_FIX = "run `shardwise doctor` again when the machine is less busy"


def _failed(name: str, status: Status, what: str, answer: Answer, fix: str) -> Check:
    """The check of a probe without facts. On a busy machine that proves nothing."""
    if answer.busy:
        return Check(name, "unclear", answer.failure, BUSY_FIX)
    return Check(name, status, f"{what}: {answer.why}", fix)


def torch_build(answer: Answer, gpus: Gpus) -> Check:
    """Whether torch, its CUDA, the driver and the GPUs match."""
    name = "torch and driver"
    if answer.facts is None:
        fix = "install torch again (https://pytorch.org/get-started); `python -c 'import torch'` shows more"
        return _failed(name, "problem", "torch does not start", answer, fix)
    facts, built = answer.facts, f"torch {answer.facts['torch']}"
    wrong = _mismatch(facts, gpus)
    if wrong is not None:
        return Check(name, "problem", f"{built}: {wrong[0]}", wrong[1], facts)
    with_cuda = f" with CUDA {facts['cuda']} and NCCL {facts['nccl']}, driver {gpus.driver}"
    on_gpus = facts["cuda"] is not None and facts["gpus"]
    return Check(name, "ok", built + (with_cuda if on_gpus else ", on the CPU"), facts=facts)


def _mismatch(facts: Mapping[str, Any], gpus: Gpus) -> tuple[str, str] | None:
    present, seen, cuda = gpus.count, facts["gpus"], facts["cuda"]
    if seen and gpus.failure:
        fix = "install the driver's utilities; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return f"it sees {seen} GPUs, but {gpus.failure}, by which shardwise counts them", fix
    if not present:
        return None
    if cuda is None:
        fix = "install torch with CUDA: https://pytorch.org/get-started"
        return f"it is built without CUDA, so {present} GPUs would stand idle", fix
    least = LEAST_DRIVER.get(int(cuda.split(".")[0]))
    if not seen and least is not None and gpus.driver is not None and Version(gpus.driver) < Version(least):
        fix = "update the driver, or install a torch for an older CUDA: https://pytorch.org/get-started"
        return f"driver {gpus.driver} is too old for CUDA {cuda}, which requires {least} or newer", fix
    if seen < present:
        said = f": {facts['said']}" if facts["said"] else ""
        fix = "restart the driver's services (nvidia-persistenced, on NVSwitch machines "
        fix += "nvidia-fabricmanager), look for Xid in `dmesg`, check the permissions of /dev/nvidia*"
        return f"CUDA shows {seen} of the {present} GPUs that the driver shows{said}", fix
    for major, minor in facts["capabilities"]:
        if not _runs_on(facts["compiled_for"], (major, minor)):
            fix = "install a torch for a newer CUDA; for GPUs that it has dropped, an older one"
            made = ", ".join(facts["compiled_for"])
            return f"it has code for {made}, not for these GPUs (sm_{major}{minor})", fix
    return None


def _runs_on(compiled_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Code for the same major and no newer minor version, as sm_90 and sm_90a; or PTX for any older one."""
    for entry in compiled_for:
        kind, _, digits = entry.rstrip("af").partition("_")
        made = (int(digits[:-1]), int(digits[-1]))
        if made <= capability and (kind == "compute" or made[0] == capability[0]):
            return True
    return not compiled_for


def formats(answer: Answer) -> Iterator[Check]:
    """bf16 and fp16, which training uses, and fp8."""
    if answer.facts is None:
        yield _failed("bf16", "problem", "matrix products fail", answer, GPU_FIX)
        return
    facts = answer.facts
    capability = tuple(facts["capability"]) if facts["capability"] else None
    where = "the CPU" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
    yield _format("bf16", facts["bf16"], where, native=capability is None or capability >= BF16_CAPABILITY)
    yield _format("fp16", facts["fp16"], where, native=True)
    if capability is None or capability < FP8_CAPABILITY:
        yield Check("fp8", "skipped", f"no matrix units for it on {where}", facts=facts["fp8"])
    else:
        yield _format("fp8", facts["fp8"], where, native=True)


def _format(name: str, found: Mapping[str, Any], where: str, *, native: bool) -> Check:
    if "failed" in found:
        finding = f"products fail on {where}: {found['failed']}"
    elif not found["error"] <= FORMAT_ERROR[name]:  # not a number, too
        return Check(name, "problem", f"products on {where} are {found['error']:.1%} off", GPU_FIX, found)
    elif not native:
        finding = f"emulated on {where}, slowly"
    else:
        return Check(name, "ok", f"products right on {where}", facts=found)
    other = "fp16" if name == "bf16" else "bf16"
    return Check(name, "warning", finding, f"train with `train.precision: {other}`", found)


def kernels(answers: Mapping[str, Answer], *, liger: bool) -> Iterator[Check]:
    """Each kernel, run and compared; `liger`: it is installed."""
    for name, title in KERNELS.items():
        if name == "liger" and not liger:
            finding = "not installed: norms, MLPs and rotary embeddings are PyTorch's, slower on a GPU"
            yield Check(title, "skipped", finding, "on a GPU: pip install 'shardwise[train]'")
        else:
            yield _kernel(name, title, answers[name])


def _kernel(name: str, title: str, answer: Answer) -> Check:
    fix = "Triton compiles with gcc and Python.h: see `compilers`; clear ~/.triton/cache; see that torch and "
    fix += "liger-kernel fit each other" if name == "liger" else "triton fit each other (`pip check`)"
    if answer.facts is None:
        return _failed(title, "problem", "fails", answer, fix)
    facts, error = answer.facts, answer.facts.get("error")
    if error is None:
        return Check(title, "skipped", "for GPUs only", facts=facts)
    side = "on the GPU" if facts["device"] == "cuda" else "the CPU's side"
    if error <= facts["bound"]:  # false if it is not a number
        by = f", by {facts['kernel']}" if facts.get("kernel") else ""
        return Check(title, "ok", f"{side}, right to {error:.0e}{by}", facts=facts)
    finding = f"{side}: {error:.1e} off float64, more than {facts['bound']:.0e}"
    return Check(title, "problem", finding, fix, facts)


def collective(answers: Sequence[Answer]) -> Check:
    """The all-reduce that every rank has run."""
    name = "all-reduce"
    failed = {rank: answer for rank, answer in enumerate(answers) if answer.facts is None}
    if failed:
        # those that only waited for another come last
        order = sorted(failed, key=lambda rank: ("hung" in failed[rank].failure, rank))
        finding = "; ".join(f"rank {rank} {failed[rank].why}" for rank in order)
        if any(answer.busy for answer in failed.values()):
            return Check(name, "unclear", finding[:600], BUSY_FIX)
        return Check(name, "problem", finding[:600], _collective_fix(failed))
    every = [answer.facts for answer in answers if answer.facts is not None]
    facts = {**every[0], "seconds": max(one["seconds"] for one in every)}
    wrong = [str(rank) for rank, one in enumerate(every) if not one["right"]]
    backend, who, plural = ("NCCL", "GPU", "s") if facts["backend"] == "nccl" else ("gloo", "process", "es")
    if wrong:
        fix = "run again with NCCL_P2P_DISABLE=1: if it is right then, peer access is broken (IOMMU, ACS)"
        return Check(name, "problem", f"{backend}'s sum is wrong on ranks {', '.join(wrong)}", fix, every[0])
    number = f"{facts['ranks']} {who}{'' if facts['ranks'] == 1 else plural}"
    amount = f"{facts['bytes'] / 2**20:.0f} MiB in {facts['seconds'] * 1e3:.2g} ms"
    return Check(name, "ok", f"{backend} over {number}: {amount}, sums right", facts=facts)


def _collective_fix(failed: Mapping[int, Answer]) -> str:
    if not all("hung" in answer.failure for answer in failed.values()):
        return "NCCL_DEBUG=INFO shows more; see `shared memory` and `torch and driver`"
    if all("meets" in answer.failure for answer in failed.values()):
        return "ranks meet on 127.0.0.1: see `ports`; unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    fix = "try NCCL_P2P_DISABLE=1 (IOMMU or ACS in the way of peer access), then NCCL_SHM_DISABLE=1 "
    return fix + "(/dev/shm); NCCL_DEBUG=INFO shows where it waits"


def bitsandbytes(answer: Answer | None) -> Check:
    """For 4 and 8 bit bases; None where it is not installed, which is no fault."""
    name = "bitsandbytes"
    if answer is None:
        finding = "not installed: only bases of 4 and 8 bits need it"
        return Check(name, "skipped", finding, "pip install bitsandbytes")
    if answer.facts is None:
        fix = "install a version for this CUDA; `python -m bitsandbytes` shows more"
        return _failed(name, "warning", "fails", answer, fix)
    facts = answer.facts
    where = "the GPU" if facts["device"] == "cuda" else "the CPU"
    if facts["error"] <= NF4_ERROR:
        return Check(name, "ok", f"{facts['version']}, NF4 right on {where}", facts=facts)
    finding = f"{facts['version']}: NF4 on {where} is {facts['error']:.0%} off"
    return Check(name, "warning", finding, "install another version", facts)


def deepspeed(answer: Answer | None) -> Iterator[Check]:
    """The library and each of its operators; None where it is not installed."""
    name = "DeepSpeed"
    if answer is None:
        finding = "not installed: strategies single and fsdp2 run, ZeRO and tensor parallelism do not"
        yield Check(name, "warning", finding, "pip install 'shardwise[train]'")
        return
    if answer.facts is None:
        fix = "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed, against the installed torch"
        yield _failed(name, "problem", "does not start", answer, fix)
        return
    facts, version = answer.facts, answer.facts["version"]
    yield Check(name, "ok", f"{version} on {facts['accelerator']}", facts={"version": version})
    for op, purpose in PURPOSES.items():
        yield _operator(op, purpose, facts)


def _operator(op: str, purpose: str, facts: Mapping[str, Any]) -> Check:
    found, name = facts["ops"][op], f"op: {op}"
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
        see = "see `python -m deepspeed.env_report`"
        return found["why"], "apt install libaio-dev" if op == "async_io" else see
    if facts["ninja"] is None:
        return "ninja is missing", "pip install ninja"
    cuda = facts["cuda"]
    if cuda is None or not cuda["why"]:
        return "", ""
    wanted = cuda["torch"]
    if cuda["nvcc"] is not None:
        fix = f"install CUDA {wanted}'s toolkit and set CUDA_HOME, or unset it; or DS_SKIP_CUDA_CHECK=1"
        return f"nvcc is of CUDA {cuda['nvcc']}, torch of {wanted}", fix
    if op == "fused_adam":
        return "there is no nvcc", f"install CUDA {wanted}'s toolkit and set CUDA_HOME"
    return "", ""  # without nvcc it is compiled for the CPU alone, which is all it needs


def hub(answer: Answer | None) -> Check:
    """Whether models and data can be fetched; None where the environment says not to."""
    name = "hub"
    if answer is None:
        finding = f"not asked: {offline()} is set, so models and data are local or cached"
        return Check(name, "skipped", finding)
    facts = answer.facts or {}
    fix = "set HTTPS_PROXY or HF_ENDPOINT; or use local folders and set HF_HUB_OFFLINE=1"
    if answer.facts is None:
        return _failed(name, "warning", "no answer", answer, fix)
    if "failed" in facts:
        return Check(name, "warning", f"no answer: {facts['failed']}", fix, facts)
    status, endpoint = facts["status"], facts["endpoint"]
    if status == 401:
        fix = "`hf auth login`, or set a new HF_TOKEN"
        return Check(name, "warning", f"{endpoint} does not accept the token", fix, facts)
    if status >= 400:
        fix = "see https://status.huggingface.co, or the proxy"
        return Check(name, "warning", f"{endpoint} answers {status}", fix, facts)
    without = "without a token, which gated models need (`hf auth login`)"
    token = "with a valid token" if facts["token"] else without
    return Check(name, "ok", f"{endpoint} answers, {token}", facts=facts)


def offline() -> str:
    """The variable that forbids the use of the network, as huggingface_hub.constants reads it; or nothing."""
    return next((key for key in OFFLINE if os.environ.get(key, "").upper() in {"1", "ON", "YES", "TRUE"}), "")


def cpu_adam(answer: Answer) -> Check:
    """DeepSpeed's optimizer for offload, compiled and stepped."""
    name = "op: cpu_adam, run"
    if answer.facts is None or not answer.facts["right"]:
        fix = "see `compilers`, and `python -m deepspeed.env_report`; without it, do not offload the "
        fix += "optimizer"
        if answer.facts is None:
            return _failed(name, "warning", "cannot be used", answer, fix)
        return Check(name, "warning", "cannot be used: its first step is wrong", fix)
    finding = f"compiled or found in {duration(answer.facts['seconds'])}, its step is right"
    return Check(name, "ok", finding, facts=answer.facts)
