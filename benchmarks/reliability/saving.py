"""How long training stands still for a checkpoint: written at once, and in the background. One GPU.

    python benchmarks/reliability/saving.py --folder DIR [--out FILE] [--rows ROW,...]

Rows: `copy` compares files, written while the next steps are computed, with the state that was to be saved,
bit for bit; `full` trains a model of 1 billion parameters, `lora` adapters of the shape of Llama-3.1-8B. Each
row runs in a process of its own, and is one line of JSON. In all about three minutes, 14 GB of disk in DIR,
90 GB of GPU memory. `--tiny` rehearses it on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SWITCH = "SHARDWISE_BACKGROUND_SAVES"
ROWS = ("copy", "lora waiting", "lora background", "full waiting", "full background")
WARM_UP, AFTER = 3, 6  # Steps: not counted, and seen after the save
TURNS = 3  # Copies of each engine's state that are compared
LAUNCH = """
import json, sys
from shardwise.launch.local import launch
from shardwise.launch.spec import LaunchSpec
sys.exit(launch(LaunchSpec.from_json(json.load(open(sys.argv[1])))))
"""
MODELS: dict[str, dict[str, Any]] = {
    "full": {"model": {"source": "tinyllama-1.1b"}, "batch": 32, "micro": 8, "every": 40},
    "lora": {"model": {"source": "llama-3.1-8b", "lora": {"rank": 16}}, "batch": 8, "micro": 4, "every": 8},
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def job(kind: str, folder: Path, *, tiny: bool) -> dict[str, Any]:
    asked = MODELS[kind]
    words = random.Random(0).choices([f"w{number}" for number in range(5000)], k=3_000 if tiny else 100_000)
    (folder / "text.txt").write_text(" ".join(words))
    config = {**TINY, "num_key_value_heads": 2} if tiny else {}
    tokenizer = {"tokenizer": "train", "tokenizer_vocab": 512 if tiny else 4096}
    return {
        "name": "run",
        "output": str(folder),
        "model": {**asked["model"], **tokenizer, "weights": "random", "config": config},
        "data": {
            "train": str(folder / "text.txt"),
            "sequence_length": 32 if tiny else 2048,
            "eval_fraction": 0.0,
        },
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
        "train": {
            "steps": 100_000,
            "global_batch": 2 if tiny else asked["batch"],
            "micro_batch": 2 if tiny else asked["micro"],
            "checkpointing": "none",
            "precision": "fp32" if tiny else "bf16",
            "eval_every": 0,
            "save_every": every_of(kind, tiny=tiny),
            "keep": 1,
            "worst_case_first": False,
        },
        "strategy": "single",
        "tracking": [],
    }


def every_of(kind: str, *, tiny: bool) -> int:
    """Steps before the save; as many come after it at most."""
    return 100 if tiny else int(MODELS[kind]["every"])


def events_of(run: Path) -> list[dict[str, Any]]:
    """Those written so far; a line that is still being written is left for later."""
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def enough(events: list[dict[str, Any]], every: int) -> bool:
    """The save is over, and steps came after it; a second save would need the disk again."""
    steps = [event["step"] for event in events if event["kind"] == "step"]
    saved = [event for event in events if event["kind"] == "save"]
    last = max(steps, default=0)
    return last >= 2 * every - 1 or bool(saved and last >= every + AFTER)


def train(kind: str, folder: Path, *, background: bool, tiny: bool) -> dict[str, Any]:
    from shardwise.job.schema import Job
    from shardwise.launch.spec import LaunchSpec
    from shardwise.record.manifest import verify

    values, run, every = job(kind, folder, tiny=tiny), folder / "run", every_of(kind, tiny=tiny)
    spec = LaunchSpec(job=Job.model_validate(values).model_dump(mode="json"), run_dir=str(run), processes=1)
    (folder / "spec.json").write_text(json.dumps(spec.to_json()))
    # Not `shardwise train`: it refuses adapters on random weights, which nobody could load again.
    command = [sys.executable, "-c", LAUNCH, str(folder / "spec.json")]
    caches = {"SHARDWISE_CACHE": str(folder / "cache"), SWITCH: "1" if background else "0"}
    process = subprocess.Popen(
        command, stdout=sys.stderr, env={**os.environ, **caches}, start_new_session=True
    )
    try:
        while process.poll() is None and not enough(events_of(run), every):
            time.sleep(0.05 if tiny else 0.3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = measured(events_of(run), every)
    problems = verify(run / "checkpoints" / f"step-{every:06d}") if found["save"] else ["not finished"]
    trainable = events_of(run)[0]["trainable_parameters"]
    predicted = predicted_bytes(trainable) if background else 0
    return {**found, "damaged": problems, "trainable": trainable, "predicted_copy_bytes": predicted}


def measured(events: list[dict[str, Any]], every: int) -> dict[str, Any]:
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    save = next((event for event in events if event["kind"] == "save"), None)
    background = save is not None and save["background_seconds"] is not None
    seconds = {step: event["seconds"] for step, event in steps.items()}
    usual = statistics.median(s for step, s in seconds.items() if WARM_UP < step <= every)
    result = {"step_seconds": usual, "saving_step_seconds": None, "ratio": None}
    if save is not None:
        # The step after a copy contains it; while nothing goes on, a save comes on top of its step.
        took = seconds[every + 1] if background else seconds[every] + save["seconds"]
        result |= {"saving_step_seconds": took, "ratio": took / usual}
        wrote = save["background_seconds"] if background else save["seconds"]
        result |= {"bytes": save["bytes"], "bytes_per_second": save["bytes"] / wrote}
        result["copy_seconds_of_the_host"] = save["seconds"] if background else None
    later = [s for step, s in seconds.items() if every + 1 < step < 2 * every]
    result["later_steps"] = {"median": statistics.median(later), "longest": max(later)} if later else None
    result["steps_after"] = [round(s, 4) for step, s in seconds.items() if step > every]
    memory = {
        "pinned_bytes": steps[1]["pinned_memory_bytes"],
        "resident_bytes": steps[1]["host_memory_bytes"],
    }
    return {**result, "save": save, **memory}


def predicted_bytes(trainable: int) -> int:
    """Host memory for the copy: 12 bytes a trained parameter, in blocks."""
    from shardwise.engines.runtime.host_copy import BLOCK

    return -(-12 * trainable // BLOCK) * BLOCK


def copies(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Of each engine: elements of a file that are not those of the state when the copy was asked for."""
    sys.path.insert(0, str(HERE.parent / "resume"))
    import torch
    import torch.distributed as dist

    import gpu
    from shardwise.engines.runtime.host_copy import HostCopy
    from shardwise.engines.runtime.protocol import World
    from shardwise.engines.runtime.state import path_of

    cuda = torch.cuda.is_available()
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ[key] = value
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    world = World(rank=0, size=1, local_rank=0, device=device, data_rank=0, data_size=1)
    shape = gpu.SHAPE | (gpu.TINY if tiny else {"num_hidden_layers": 1})
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    data = {"vocabulary": shape["vocab_size"], "length": 64 if tiny else 1024}
    rows = {}
    for name in ("single", "zero2", "zero3", "fsdp2"):
        gpu._free()
        engine, unequal, total = gpu.engine_for(gpu.CHAIN[name], folder / "model", world), 0, 0
        copy = HostCopy(world)
        gpu.losses(engine, range(2), **data)
        for turn in range(TURNS):
            state, parts = engine.named_state()  # type: ignore[misc]
            expected = {key: tensor.detach().clone() for key, tensor in state.items()}
            copy.take(state, parts)
            gpu.losses(engine, range(2 + turn, 4 + turn), **data)  # reads each loss: the steps are done
            copy.write(folder)
            unequal += differing(path_of(folder, 0), expected)
            total += sum(tensor.numel() for tensor in expected.values())
        rows[name] = {"unequal_elements": unequal, "elements": total}
        del engine, state, expected
    dist.destroy_process_group()
    return {"engines": rows}


def differing(path: Path, expected: dict[str, Any]) -> int:
    from safetensors.torch import load_file

    found = load_file(path)
    path.unlink()
    assert found.keys() == expected.keys()
    return sum(int((found[key].view(t.shape) != t.cpu()).sum()) for key, t in expected.items())


def row(name: str, folder: Path, *, tiny: bool) -> dict[str, Any]:
    kind, _, how = name.partition(" ")
    if kind == "copy":
        return copies(folder, tiny=tiny)
    return train(kind, folder, background=how == "background", tiny=tiny)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where runs are written, and removed")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results" / "saving.jsonl", help="lines are appended"
    )
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--timeout", type=float, default=75.0, help="seconds for each row")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models")
    parser.add_argument("--alone", action="store_true", help="this process runs the one row")
    asked = parser.parse_args()
    if asked.alone:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            print(json.dumps(row(asked.rows, Path(folder), tiny=asked.tiny)))
        return
    for name in asked.rows.split(","):
        line = {**in_a_process(name, asked), **about(asked)}
        print(json.dumps(line), flush=True)
        asked.out.parent.mkdir(exist_ok=True)
        with asked.out.open("a") as out:
            out.write(json.dumps(line) + "\n")


def in_a_process(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """A row, or why there is none. What it started ends with it."""
    flags = ["--alone", "--rows", name] + (["--tiny"] if asked.tiny else [])
    flags += ["--folder", str(asked.folder)] if asked.folder else []
    began = time.monotonic()
    command = [sys.executable, __file__, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate(timeout=asked.timeout)
        found = json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"error": process.returncode}
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends the run, and removes the folder
        process.wait()
        found = {"error": f"more than {asked.timeout:g} s"}
    return {"row": name, **found, "seconds": round(time.monotonic() - began, 1)}


def about(asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {
        "command": "python benchmarks/reliability/saving.py" + (" --tiny" if asked.tiny else ""),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
    }


if __name__ == "__main__":
    main()
