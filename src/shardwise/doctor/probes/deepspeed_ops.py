"""DeepSpeed's compiled operators: which of them this machine can compile, and whether those it has load."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before DeepSpeed, as in engines/deepspeed/runtime/engine.py

from shardwise.engines.deepspeed.runtime.extensions import extensions_root, wait_for_locks

OPS = {"cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder", "async_io": "AsyncIOBuilder"}
"""cpu_adam: optimizer offload; async_io: offload to NVMe; fused_adam: DeepSpeed's own AdamW on GPUs."""


def ops(stage: Callable[[str], None]) -> dict[str, Any]:
    """By operator whether it can be compiled, why not, and whether a compiled one loads. Compiles nothing."""
    stage("importing DeepSpeed")
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    found = {}
    for name, builder_name in OPS.items():
        stage(f"asking about {name}")
        builder = get_accelerator().create_op_builder(builder_name)
        if builder is None:
            found[name] = {"compatible": False, "why": "not made for this accelerator"}
            continue
        compatible = bool(builder.is_compatible(verbose=False))
        found[name] = {
            "compatible": compatible,
            "why": ""
            if compatible
            else str(getattr(builder, "error_log", None) or "what it needs is missing"),
            **_compiled(name, builder, installed=bool(installed_ops.get(name, False))),
        }
    return {
        "version": deepspeed.__version__,
        "accelerator": get_accelerator().device_name(),
        "ninja": shutil.which("ninja"),
        "cuda": _cuda(),
        "ops": found,
    }


def build_cpu_adam(stage: Callable[[str], None]) -> dict[str, Any]:
    """Compiles cpu_adam where it is not yet, and takes one step with it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    start = time.perf_counter()
    stage("waiting for whoever compiles cpu_adam")
    wait_for_locks(["cpu_adam"])
    stage("compiling cpu_adam")
    weight = torch.nn.Parameter(torch.ones(1024))
    optimizer = DeepSpeedCPUAdam([weight], lr=0.5)
    seconds = time.perf_counter() - start
    weight.grad = torch.ones(1024)
    optimizer.step()
    # the first step of AdamW: lr times the sign of the gradient
    right = bool(torch.allclose(weight.detach(), torch.full((1024,), 0.5), atol=1e-3))
    return {"right": right, "seconds": seconds}


def _compiled(name: str, builder: Any, *, installed: bool) -> dict[str, Any]:
    """Whether it is compiled already, and loads; loading by DeepSpeed itself might compile."""
    if installed:
        spec = importlib.util.find_spec(builder.absolute_name())
        file = Path(spec.origin) if spec is not None and spec.origin else None
    else:
        file = extensions_root() / name / f"{name}.so"
    if file is None or not file.is_file():
        return {"built": False}
    name = file.name.partition(".")[0]  # an installed one is called otherwise: cpu_adam_op
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, str(file))
        spec = importlib.util.spec_from_file_location(name, file, loader=loader)
        assert spec is not None
        importlib.util.module_from_spec(spec)
    except ImportError as error:
        return {"built": True, "loads": False, "file": str(file), "error": str(error)[:300]}
    return {"built": True, "loads": True, "file": str(file)}


def _cuda() -> dict[str, Any] | None:
    """The compiler beside torch's CUDA; None where torch has none."""
    if torch.version.cuda is None:
        return None
    from deepspeed.ops.op_builder import builder

    try:
        major, minor = builder.installed_cuda_version()
        nvcc = f"{major}.{minor}"
    except (builder.MissingCUDAException, OSError, ValueError) as error:
        return {"torch": torch.version.cuda, "nvcc": None, "why": str(error)[:200]}
    try:
        builder.assert_no_cuda_mismatch()
    except builder.CUDAMismatchException:
        return {"torch": torch.version.cuda, "nvcc": nvcc, "why": "another version than torch's"}
    return {"torch": torch.version.cuda, "nvcc": nvcc, "why": ""}
