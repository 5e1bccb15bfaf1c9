"""The checkpoints of a run: listed, verified, and written into one file."""

from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, JobError
from shardwise.record.manifest import verify
from shardwise.record.read import is_run_folder
from shardwise.report.compare import checkpoints as listed


def checkpoints(
    run: str | Path, step: int | None = None, *, every_byte: bool = False
) -> list[dict[str, Any]]:
    """Those of a run, or of one step, newest first, with what is wrong with each (`problems`).

    Names and sizes are looked at, and with `every_byte` the contents. JobError where there is none.
    """
    folder = Path(run) / "checkpoints"
    found = [one for one in listed(folder, every_byte=every_byte) if step in (None, one["step"])]
    if not found:
        what = f"there is no checkpoint{'' if step is None else f' of step {step}'}"
        fix = "" if is_run_folder(Path(run)) else "name a run folder, such as runs/NAME"
        raise JobError(what, where=str(folder), fix=fix)
    return found


def convert(run: str | Path, out: str | Path, step: int | None = None) -> dict[str, Any]:
    """Write the newest checkpoint's fp32 weights and AdamW state into a new safetensors file.

    For other programs: every strategy and number of processes loads every checkpoint as it is. Raises
    CheckpointError for a damaged one, and for DeepSpeed's own files.
    """
    from shardwise.engines.runtime.state import PICKLED, consolidate

    newest, out = checkpoints(run, step)[0], Path(out)
    path = Path(newest["path"])
    problems = verify(path)
    if (path / "engine" / PICKLED).is_dir():
        problems.append("its state is in DeepSpeed's own files: resume with its strategy, and save again")
    if problems:
        raise CheckpointError(f"it cannot be converted: {'; '.join(problems[:3])}", where=str(path))
    if out.exists():
        raise JobError(f"{out} exists", where="--out", fix="name a new file")
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        tensors = consolidate(path / "engine", partial)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return {"tensors": tensors, "out": str(out), "bytes": out.stat().st_size, "step": newest["step"]}
