"""After training: find a run's newest weights, export them."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shardwise.errors import JobError, MachineError
from shardwise.job.schema import Job
from shardwise.models.export import export
from shardwise.record.card import model_card
from shardwise.record.read import best_step, evaluations_of, read_run
from shardwise.training.checkpoint import Checkpoint, newest_valid

Show = Callable[[str], None]


def export_run(
    run_dir: str | Path,
    out: str | Path,
    *,
    merge: bool = False,
    show: Show = lambda _: None,
    finish: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Write the newest sound checkpoint's weights as Hugging Face safetensors into the new folder `out`.

    LoRA gives the adapter, or with `merge` the full model; the merged logits are compared with the unmerged
    ones. `show` gets what is being done; `finish` may add files before the folder gets its name. Returns what
    was written, its step and, where merged, the largest logit difference.
    """
    show("reading the checkpoint, and verifying its hashes")
    job, checkpoint = newest_checkpoint(run_dir)
    events = read_run(Path(run_dir)).events
    model, base = checkpoint.path / "model", base_of(checkpoint)
    with _complete(Path(out).resolve()) as partial:
        written = export(model, partial, merge=merge, base=job.model, trained_on=base, show=show)
        card = model_card(job, events, checkpoint.manifest, written, out=Path(out).name)
        (partial / "README.md").write_text(card, encoding="utf-8")
        if finish is not None:
            finish(partial)
    best = job.train.patience is not None and checkpoint.step == best_step(_evaluations(events))
    return {**written, "out": str(out), "step": checkpoint.step, "best": best}


def _evaluations(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return evaluations_of(events, until=sys.maxsize)


@contextmanager
def _complete(out: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when it is complete."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.replace(out)
    except (OSError, SafetensorError) as error:
        # shutil.Error is an OSError with a list of what went wrong: from, to, why
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else getattr(error, "strerror", None)
        fix = "make room or give permission, or name another place"
        raise MachineError(f"it cannot be written: {why or error}", where=f"--out {out}", fix=fix) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def newest_checkpoint(run_dir: str | Path) -> tuple[Job, Checkpoint]:
    """The run's job and its newest sound checkpoint, or the best one where `train.patience` keeps it.

    Warns of damaged ones that were passed over on stderr.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, imported by transformers, would warn
    record = read_run(Path(run_dir))
    job = Job.model_validate(record.job)
    found = _evaluations(record.events) if job.train.patience is not None else []
    checkpoint = newest_valid(Path(run_dir) / "checkpoints", best_step(found))
    if checkpoint is None:
        fix = "let `shardwise train` save one"
        raise JobError("the run has no checkpoint yet", where=str(run_dir), fix=fix)
    checkpoint.warn_of_damaged()
    return job, checkpoint


def base_of(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Fingerprint of the base that its adapter was trained on; None without one and in older checkpoints."""
    return checkpoint.manifest.origin.identity.get("base")
