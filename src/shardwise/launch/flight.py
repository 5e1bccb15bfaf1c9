"""PyTorch's flight recorder: the collectives that each rank began last, kept when a run hangs.

A thread of the rank waits for the launcher to open a pipe; it runs while the main thread waits in C++. After
NCCL's own time-out, torch writes the same file. `torch.distributed.flight_recorder.fr_trace` reads them.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

FILES = "flight-*"
_RECORDERS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}  # As torch 2.11 and 2.13 call them
_LARGEST = 256 << 20  # Bytes that are read of a file


def variables(folder: Path) -> dict[str, str]:
    """What switches the recorders of a rank on."""
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(_file(folder, "nccl", "")),  # torch adds the rank
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def begin(folder: Path, rank: int) -> None:
    """In a rank: write the records once the launcher asks for them."""
    with suppress(OSError):  # a file system without pipes: then there is no record
        os.mkfifo(_pipe(folder, rank), mode=0o600)
        threading.Thread(target=_answer, args=(folder, rank), daemon=True).start()


def _answer(folder: Path, rank: int) -> None:
    _pipe(folder, rank).open("rb").close()  # returns when the launcher opens it
    torch = sys.modules.get("torch._C._distributed_c10d")
    for kind, name in _RECORDERS.items():
        with suppress(Exception):  # it is one more hint, and must not be another failure
            file = _file(folder, kind, rank)
            file.with_suffix(".tmp").write_bytes(getattr(torch, name)())
            file.with_suffix(".tmp").rename(file)
    _pipe(folder, rank).unlink()


def ask(folder: Path, ranks: Iterable[int], *, seconds: float) -> None:
    """Have the records of these ranks written; wait for that, but no longer than `seconds`."""
    asked = [_pipe(folder, rank) for rank in ranks]
    for pipe in asked:
        with suppress(OSError):  # nobody reads there
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    until = time.monotonic() + seconds
    while any(pipe.exists() for pipe in asked) and time.monotonic() < until:
        time.sleep(0.05)


def last_collective(folder: Path, rank: int) -> str:
    """`gloo:all_reduce, number 12 of default_pg, is not finished`: the newest, of those first; or nothing."""
    found: list[dict[str, Any]] = []
    for kind in _RECORDERS:
        # The file may be torn, or have another format.
        with suppress(Exception), _file(folder, kind, rank).open("rb") as file:
            if os.fstat(file.fileno()).st_size < _LARGEST:
                found += _Plain(file).load()["entries"]
    try:
        newest = max(found, key=lambda one: (not _is_over(one), one["time_created_ns"]))
        state = "finished" if _is_over(newest) else "not finished"
        number, group = newest["collective_seq_id"], newest["process_group"][1]
        return f"{newest['profiling_name']}, number {number} of {group}, is {state}"
    except (KeyError, IndexError, TypeError, ValueError):
        return ""


def last_collectives(folder: Path) -> list[str]:
    """The same of all ranks that have a record here, with their numbers."""
    ranks = sorted({int(path.name.rpartition("-")[2]) for path in folder.glob("flight-*-rank-[0-9]*")})
    return [f"rank {rank}: {text}" for rank in ranks if (text := last_collective(folder, rank))]


def _is_over(entry: dict[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, texts and numbers, of which torch's records consist."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a record")


def _file(folder: Path, kind: str, rank: int | str) -> Path:
    return folder / f"flight-{kind}-rank-{rank}"


def _pipe(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.ask"
