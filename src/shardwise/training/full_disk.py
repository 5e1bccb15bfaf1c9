"""What is said where a checkpoint found no room: bytes needed and free, or what else may stop the writing."""

from pathlib import Path

from shardwise.errors import FULL, Problem, what_of
from shardwise.units import size

UNUSABLE_BYTES = 64 << 20  # What a full file system may count as free, for its own tables and rounding

_TEXTS = ["No space left on device", "Disk quota exceeded", "File too large", "file write failed"]
_TEXTS += ["inline_container.cc"]  # torch's archive, when less was written than it gave


def is_full(error: Exception) -> bool:
    """Whether the disk or the quota is full; libraries that write themselves hide the error number."""
    by_number = isinstance(error, OSError) and error.errno in FULL
    return by_number or any(text in what_of(error) for text in _TEXTS)


def unwritten(folder: Path, rank: int, text: str, *, known: int, written: int, free: int) -> Problem:
    """The problem of a checkpoint that was removed again.

    Args:
        folder: that of the checkpoints.
        rank: the first one that failed.
        text: how it failed.
        known: bytes of the checkpoint before; 0 without one.
        written: bytes of this one, so far.
        free: bytes, after it was removed.
    """
    goes_on = "go on with --resume: the checkpoints before it are untouched"
    there = f"{size(free)} ({free} bytes)"
    if max(known, written) >= free:
        needed = f"{size(known)} ({known}" if known >= free else f"more than {size(written)} ({written}"
        what = f"the disk is full: a checkpoint needs {needed} bytes), free are {there}"
    elif free <= 2 * written + UNUSABLE_BYTES:
        what = f"the disk is full: a checkpoint needs more than {there}, which is all that is free"
    else:
        what = f"a checkpoint could not be written, and {there} are free: {text}"
        what += f"; {size(written)} ({written} bytes) were written"
        fix = f"look for a limit of files (df -i; ulimit -f) and for a quota (quota -s), then {goes_on}"
        return Problem(what=what, where=f"rank {rank}, {folder}", fix=fix)
    return Problem(what=what, where=str(folder), fix=f"make room there, then {goes_on}")
