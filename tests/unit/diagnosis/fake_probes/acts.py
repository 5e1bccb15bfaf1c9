"""What a machine with H200s answers, and worse."""

import os
import signal
import subprocess
import sys
import time

GPUS = int(os.environ.get("FAKE_GPUS", "4"))


def torch(stage):
    return {
        "torch": "2.13.0+cu130", "cuda": "13.0", "gpus": GPUS, "said": "", "capabilities": [[9, 0]] * GPUS,
        "compiled_for": ["sm_80", "sm_90", "compute_120"], "nccl": "2.30.4", "peers": [], "threads": 1,
    }  # fmt: skip


def formats(stage):
    right = {"error": 1e-3}
    return {"device": "cuda", "capability": [9, 0], "bf16": right, "fp16": right, "fp8": {"error": 0.03}}


def bitsandbytes(stage):
    return {"version": "0.50.2", "device": "cuda", "error": 0.09}


def cross_entropy(stage):
    return {"device": "cuda", "error": 1e-6, "bound": 2e-3, "seconds": 1.5}


attention = mamba = liger = cross_entropy


def collective(stage):
    size = int(os.environ["WORLD_SIZE"])
    stage(f"rank {os.environ['RANK']} of {size} joins the others")
    return {"backend": "nccl", "ranks": size, "right": True, "bytes": 2**26, "seconds": 0.0004}


def deepspeed(stage):
    ops = {
        name: {"compatible": True, "why": "", "built": False}
        for name in ("cpu_adam", "fused_adam", "async_io")
    }
    cuda = {"torch": "13.0", "nvcc": "13.0", "why": ""}
    return {"version": "0.19.8", "accelerator": "cuda", "ninja": "/usr/bin/ninja", "cuda": cuda, "ops": ops}


def cpu_adam(stage):
    return {"right": True, "seconds": 90.0}


def hub(stage):
    return {"endpoint": "https://huggingface.co", "token": False, "status": 200, "seconds": 0.1}


def loud(stage):
    return {"said": "this"}


def measure(stage):
    """A link of 300 GB/s and 5 us a message, a copy of 50 GB/s and 6 us; rank 1 is a tenth slower."""
    size, slower = int(os.environ["WORLD_SIZE"]), 1.1 if os.environ["RANK"] == "1" else 1.0
    samples = []
    for num_bytes in (2**12, 2**20, 2**28):
        gather = 8.4e-6 + (size - 1) * 5e-6 + num_bytes * (size - 1) / size / 300e9
        copy = 6e-6 + num_bytes / 50e9
        for what, seconds in (
            ("all_reduce", 2 * gather), ("all_gather", gather), ("reduce_scatter", gather),
            ("pinned_to_gpu", copy), ("gpu_to_pinned", copy), ("pageable_to_gpu", 5 * copy),
        ):  # fmt: skip
            samples.append({"what": what, "bytes": num_bytes, "seconds": seconds * slower})
    return {
        "ranks": size, "device": "cuda", "host_call_seconds": 2e-6, "memory_bytes_per_second": 4e12,
        "products": [{"side": 8192, "flops_per_second": 7e14 / slower}], "samples": samples, "skipped": [],
    }  # fmt: skip


def quiet(stage):
    return {"pid": os.getpid()}


def hang(stage):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("pids", os.getpid(), child.pid, flush=True)
    stage("waiting for the others")
    time.sleep(600)


def crash(stage):
    print("a library's last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(stage):
    os._exit(7)


def complain(stage):
    raise RuntimeError("CUDA error: no kernel image\n  is available")


def multiply(stage):
    """A sum that is wrong."""
    return {**collective(stage), "right": False}


def starve(stage):
    """On a core that others of a higher priority keep."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(2):
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.nice(19)
    stage("importing")
    while True:
        pass
