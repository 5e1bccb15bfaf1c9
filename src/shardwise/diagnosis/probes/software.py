"""DeepSpeed's compiled operators (which can be compiled here, and which load), and the Hugging Face hub."""

import importlib.machinery
import importlib.util
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPS = {"cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder", "async_io": "AsyncIOBuilder"}
"""cpu_adam: optimizer offload; async_io: offload to NVMe; fused_adam: DeepSpeed's own AdamW on GPUs."""

HUB_SECONDS = 5.0


def ops(stage: Callable[[str], None]) -> dict[str, Any]:
    """By operator whether it can be compiled, why not, and whether a compiled one loads. Compiles nothing."""
    stage("importing DeepSpeed")
    import torch._dynamo  # before DeepSpeed, as the engine does
    import deepspeed  # isort: skip
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    found: dict[str, Any] = {}
    for name, builder_name in OPS.items():
        stage(f"asking about {name}")
        builder = get_accelerator().create_op_builder(builder_name)
        if builder is None:
            found[name] = {"compatible": False, "why": "not made for this accelerator"}
            continue
        compatible = bool(builder.is_compatible(verbose=False))
        why = "" if compatible else str(getattr(builder, "error_log", None) or "what it needs is missing")
        compiled = _compiled(name, builder, installed=bool(installed_ops.get(name, False)))
        found[name] = {"compatible": compatible, "why": why, **compiled}
    return {
        "version": deepspeed.__version__,
        "accelerator": get_accelerator().device_name(),
        "ninja": shutil.which("ninja"),
        "cuda": _cuda(torch.version.cuda),
        "ops": found,
    }


def build_cpu_adam(stage: Callable[[str], None]) -> dict[str, Any]:
    """Compile cpu_adam where it is not yet, and take one step with it."""
    import torch._dynamo
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # isort: skip
    from shardwise.engines.deepspeed.runtime.extensions import wait_for_locks

    start = time.perf_counter()
    stage("waiting for another process that compiles cpu_adam")
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
    from shardwise.engines.deepspeed.runtime.extensions import extensions_root

    spec = importlib.util.find_spec(builder.absolute_name()) if installed else None
    origin = None if spec is None else spec.origin
    file = Path(origin or "") if installed else extensions_root() / name / f"{name}.so"
    if not file.is_file():
        return {"built": False}
    name = file.name.partition(".")[0]  # an installed one has another name: cpu_adam_op
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, str(file))
        loader.create_module(importlib.machinery.ModuleSpec(name, loader, origin=str(file)))
    except ImportError as error:
        return {"built": True, "loads": False, "file": str(file), "error": str(error)[:300]}
    return {"built": True, "loads": True, "file": str(file)}


def _cuda(wanted: str | None) -> dict[str, Any] | None:
    """The nvcc that DeepSpeed finds, compared with `wanted`, torch's CUDA; None where torch has none."""
    if wanted is None:
        return None
    from deepspeed.ops.op_builder import builder

    found: dict[str, Any] = {"torch": wanted, "nvcc": None, "why": ""}
    try:
        found["nvcc"] = ".".join(map(str, builder.installed_cuda_version()))
        builder.assert_no_cuda_mismatch()
    except builder.CUDAMismatchException:
        found["why"] = "another version than torch's"
    except (builder.MissingCUDAException, OSError, ValueError) as error:
        found["why"] = str(error)[:200]
    return found


def hub(stage: Callable[[str], None]) -> dict[str, Any]:
    """One small request to the hub (HF_ENDPOINT, by the environment's proxies) with the user's token."""
    from huggingface_hub import constants, get_token

    endpoint, token = constants.ENDPOINT, get_token()
    request = urllib.request.Request(f"{endpoint}/api/{'whoami-v2' if token else 'models?limit=1'}")  # noqa: S310
    if token:
        request.add_header("authorization", f"Bearer {token}")
    stage(f"waiting for {endpoint}")
    start = time.perf_counter()
    found: dict[str, Any] = {"endpoint": endpoint, "token": token is not None}
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:  # noqa: S310 - https unless HF_ENDPOINT says otherwise
            found["status"] = answer.status
    except urllib.error.HTTPError as error:
        found["status"] = error.code
    except OSError as error:
        found["failed"] = str(getattr(error, "reason", error))[:200]
    found["seconds"] = time.perf_counter() - start
    return found
