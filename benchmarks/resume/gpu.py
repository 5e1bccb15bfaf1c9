"""One GPU: a model of 1.1 billion parameters in bf16 goes from single to ZeRO-2, ZeRO-3, FSDP2 and back.

    python benchmarks/resume/gpu.py [--folder DIR] [--out FILE]

Each engine loads what the one before it saved, and takes the next steps. Its losses are compared with those
of a single process that never stopped: in bf16 they differ by rounding. What it loaded must have the saved
bits. Takes about three minutes, 13.3 GB of disk in DIR at a time, and 45 GB of GPU memory. `--tiny` rehearses
it on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.protocol import Engine, World, build_engine
from shardwise.engines.runtime.state import Part, SavedState
from shardwise.job.schema import Model, Optimizer
from shardwise.models.build import build_model
from shardwise.models.structure import checkpoint_blocks
from shardwise.objective.causal_lm import CausalLM
from shardwise.strategy import Strategy

RESULTS = Path(__file__).parent / "results" / "gpu.json"
SHAPE = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CHAIN = {
    "single": Strategy(engine="single"),
    "zero2": Strategy(engine="deepspeed", stage=2),
    "zero3": Strategy(engine="deepspeed", stage=3),
    "fsdp2": Strategy(engine="fsdp2"),
    "back to single": Strategy(engine="single"),
}
STEPS, ROWS, RATE = 4, 2, 1e-4


def engine_for(strategy: Strategy, source: Path, world: World) -> Engine:
    built = build_model(Model(source=str(source), weights="random"), dtype=torch.bfloat16, seed=3)
    checkpoint_blocks(built.blocks, every=1)
    strategy = replace(strategy, micro_batch=ROWS, precision="bf16", checkpoint_every=1)
    optimizer = Optimizer(learning_rate=RATE, weight_decay=0.1)
    return build_engine(strategy, CausalLM(built.model), built.blocks, built.weights.fill, optimizer, world)


def losses(engine: Engine, steps: range, *, vocabulary: int, length: int) -> list[float]:
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        # few different tokens: there is something to learn
        tokens = torch.randint(vocabulary // 8, (ROWS, length + 1), generator=generator)
        batch = MicroBatch(
            input_ids=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            position_ids=torch.arange(length).expand(ROWS, length).contiguous(),
            cu_seqlens=torch.arange(0, (ROWS + 1) * length, length, dtype=torch.int32),
            max_seqlen=length,
        ).to(engine.world.device)
        result = engine.step([batch], target_tokens=ROWS * length, learning_rate=RATE)
        found.append(result.loss.item())
    return found


def live_state(engine: Any) -> tuple[dict[str, torch.Tensor], dict[str, Part]]:
    """What the engine has of each element, by name."""
    named = getattr(engine, "_named", None)
    if named is not None:
        return named.tensors(), named.parts()
    return engine._optimizer.state(), engine._parts()


def unequal(engine: Engine, folder: Path) -> int:
    """Elements of fp32 weights and moments that are not those in the files, to the bit."""
    saved, wrong = SavedState(folder), 0
    tensors, parts = live_state(engine)
    for key, tensor in tensors.items():
        name = key.partition("/")[2]
        if name not in parts or key.startswith("step/"):
            continue
        flat, at = tensor.detach().reshape(-1), 0
        for chunk in saved.read(key, parts[name], flat.numel()):
            wrong += int((flat[at : at + len(chunk)] != chunk.to(flat.device)).sum())
            at += len(chunk)
    return wrong


def timed(action: Callable[[], object]) -> float:
    _settle()
    began = time.monotonic()
    action()
    _settle()
    return round(time.monotonic() - began, 2)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where checkpoints are written for a moment")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="rehearse with a tiny model")
    asked = parser.parse_args()
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ[key] = value
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World(rank=0, size=1, local_rank=0, device=device, data_rank=0, data_size=1)
    shape = SHAPE | (TINY if asked.tiny else {})
    data: dict[str, Any] = {"vocabulary": shape["vocab_size"], "length": 64 if asked.tiny else 1024}
    with tempfile.TemporaryDirectory(dir=asked.folder) as work:
        rows = run(Path(work), shape, world, data)
    result = {
        "command": "python benchmarks/resume/gpu.py" + (" --tiny" if asked.tiny else ""),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "shape": shape,
        "precision": "bf16",
        "rows": ROWS,
        "sequence_length": data["length"],
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "hops": rows,
    }
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    dist.destroy_process_group()


def run(work: Path, shape: dict[str, Any], world: World, data: dict[str, Any]) -> list[dict[str, Any]]:
    source, saved = work / "model", work / "state"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(shape))
    straight = losses(engine_for(CHAIN["single"], source, world), range(STEPS * len(CHAIN)), **data)
    rows: list[dict[str, Any]] = []
    for number, (name, strategy) in enumerate(CHAIN.items()):
        _free()
        engine = engine_for(strategy, source, world)
        row: dict[str, Any] = {"strategy": name}
        if number:
            row["load_seconds"] = timed(partial(engine.load, saved))
            row["unequal_elements"] = unequal(engine, saved)
            shutil.rmtree(saved)
        steps = range(STEPS * number, STEPS * (number + 1))
        row["losses"] = losses(engine, steps, **data)
        row["losses_not_stopped"] = straight[steps.start : steps.stop]
        both = zip(row["losses"], row["losses_not_stopped"], strict=True)
        row["largest_relative_difference"] = max(abs(loss / expected - 1) for loss, expected in both)
        if number < len(CHAIN) - 1:
            saved.mkdir()
            row["save_seconds"] = timed(partial(engine.save, saved))
            row["state_bytes"] = sum(file.stat().st_size for file in saved.iterdir())
        row["gpu_peak_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        rows.append(row)
        print(json.dumps(row), flush=True)
        del engine
    return rows


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
