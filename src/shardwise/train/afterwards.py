"""What is done with a run after training: export its weights, let it speak."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import JobError
from shardwise.job.schema import Job
from shardwise.models.export import export
from shardwise.models.generate import generate
from shardwise.record.read import read_run
from shardwise.train.checkpoint.store import newest_valid


def export_run(run_dir: str | Path, out: str | Path, *, merge: bool = False) -> dict[str, Any]:
    """Writes the newest checkpoint's weights as Hugging Face safetensors into the new folder `out`.

    LoRA gives the adapter, or with `merge` the whole model; the merged logits are compared with the
    unmerged ones. Returns what was written, with the largest logit difference where merged.
    """
    job, weights = _weights(run_dir)
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise JobError(f"{out} exists and is not empty", where="--out", fix="name a new folder")
    return export(weights, out, merge=merge, base=job.model)


def generate_run(
    run_dir: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """Text that the run's newest checkpoint answers to `prompt`; greedy at temperature 0."""
    job, weights = _weights(run_dir)
    return generate(
        weights,
        base=job.model,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        system=job.data.system,
    )


def _weights(run_dir: str | Path) -> tuple[Job, Path]:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, imported by transformers, would warn
    record = read_run(Path(run_dir))
    checkpoint = newest_valid(Path(run_dir) / "checkpoints")
    if checkpoint is None:
        raise JobError(
            "the run has no checkpoint yet", where=str(run_dir), fix="let `shardwise train` save one"
        )
    return Job.model_validate(record.job), checkpoint.path / "model"
