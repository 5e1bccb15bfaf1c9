"""The real worker on CPUs, with a border for memory that CPUs do not have: so many rows at a time fit.

`OOM_BORDER`, JSON: `rows`, the most that fit; `phase`, where more do not; `from_step`, the first step in
which they do not; `rank`, the only one to run out (null: all). Rows trained on are noted in `OOM_ROWS`.RANK.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.runtime.adamw import AdamW
from shardwise.objective.causal_lm import CausalLM
from shardwise.training import checkpoint as store
from shardwise.training import oom, run
from shardwise.training.loop import Loop
from shardwise.training.worker import main

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.19 "
    "GiB is free. Including non-PyTorch memory, this process has 77.91 GiB memory in use. Of the allocated "
    "memory 71.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)
GIB = 2**30
COUNTERS = {"reserved_bytes": 76 * GIB, "free_bytes": int(1.19 * GIB), "total_bytes": int(79.1 * GIB)}
"""What torch would say of the GPU that the message is about."""
RANK = int(os.environ["RANK"])
BORDER: dict[str, Any] = json.loads(os.environ.get("OOM_BORDER", "{}"))


class State:
    step = 0
    rows = 0


def reached(phase: str, step: int | None = None) -> None:
    """Runs out of memory, if this is where it is to happen. `step`: if it is another than the newest."""
    if not BORDER or BORDER["phase"] != phase or BORDER.get("rank") not in (None, RANK):
        return
    if (State.step if step is None else step) >= BORDER["from_step"] and State.rows > BORDER["rows"]:
        if BORDER.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.OutOfMemoryError(MESSAGE)


class Border(torch.autograd.Function):
    """Changes nothing; is passed forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        reached("forward" if torch.is_grad_enabled() or hidden.requires_grad else "evaluation")
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        reached("backward")
        return gradient


def watch() -> None:
    """Puts the border into the real parts."""
    whole_forward, issue, step = CausalLM.forward, Loop._issue, AdamW.step
    checkpoint_blocks, save_weights = run.checkpoint_blocks, run.save_weights

    def forward(self: CausalLM, batch: MicroBatch) -> torch.Tensor:
        State.rows = batch.input_ids.shape[0]
        if self.training:
            note(batch)
        return whole_forward(self, batch)

    def issued(self: Loop) -> None:
        State.step = self.progress.step + 1
        issue(self)

    def building(blocks: Any, *, every: int) -> None:
        mlp = blocks[1].mlp
        inner = mlp.forward
        mlp.forward = wraps(inner)(lambda hidden: inner(Border.apply(hidden)))
        checkpoint_blocks(blocks, every=every)

    def saving(built: Any, weights: Any, folder: Path, *rest: Any, **options: Any) -> Any:
        reached("saving", int(folder.parent.name.rpartition("-")[2]))
        return save_weights(built, weights, folder, *rest, **options)

    def stepped(self: AdamW, *arguments: Any, **options: Any) -> Any:
        reached("optimizer")
        return step(self, *arguments, **options)

    CausalLM.forward = forward  # type: ignore[method-assign]
    Loop._issue = issued  # type: ignore[method-assign]
    AdamW.step = stepped  # type: ignore[method-assign]
    oom.counters = lambda _: COUNTERS
    run.checkpoint_blocks = building  # type: ignore[assignment]
    run.save_weights = saving  # type: ignore[assignment]
    store.ANSWER_SECONDS = 2.0  # of ranks that wait in a collective of the engine's, and will not answer


def note(batch: MicroBatch) -> None:
    with Path(f"{os.environ['OOM_ROWS']}.{RANK}").open("a") as file:
        for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
            end = max(place for place, label in enumerate(labels) if label != IGNORED) + 1
            digest = hashlib.sha256(json.dumps(ids[:end]).encode()).hexdigest()
            file.write(json.dumps([State.step, digest]) + "\n")


if __name__ == "__main__":
    with Path(f"{os.environ['OOM_ROWS']}.{RANK}").open("a") as file:
        file.write("null\n")  # another try begins
    watch()
    os._exit(main())
