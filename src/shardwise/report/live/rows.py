"""Samples kept in files: one row a GPU and sample, as CSV or as JSON lines. A machine without GPUs has one row."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import JobError

OF_GPU = (
    "index",
    "uuid",
    "name",
    "memory_used_bytes",
    "memory_bytes",
    "power_watts",
    "power_limit_watts",
    "energy_joules",
    "temperature_celsius",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "utilization_fraction",
    "clocks_held_by",
)
OF_RUN = ("name", "status", "step", "loss", "tokens_per_second", "joules_per_token")
OF_HOST = ("cpu_fraction", "memory_used_bytes")
COLUMNS = (
    "time",  # Unix seconds
    *(f"gpu_{name}" for name in OF_GPU),
    *(f"run_{name}" for name in OF_RUN),
    *(f"host_{name}" for name in OF_HOST),
)


def rows(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """COLUMNS of each GPU of a sample, and `unavailable` with the reasons of those that are None."""
    run, host = sample["run"] or {}, sample["host"]
    shared = {f"run_{name}": run.get(name) for name in OF_RUN}
    shared |= {f"host_{name}": host[name] for name in OF_HOST}
    missing = {f"run_{name}": reason for name, reason in run.get("unavailable", {}).items() if name in OF_RUN}
    if sample["run"] is None:
        missing["run_name"] = sample["run_unavailable"]
    for gpu in sample["gpus"] or [{"unavailable": {"index": sample["gpus_unavailable"]}}]:
        reasons = {f"gpu_{name}": text for name, text in gpu["unavailable"].items() if name in OF_GPU}
        own = {f"gpu_{name}": gpu.get(name) for name in OF_GPU}
        yield {"time": round(sample["time"], 3), **own, **shared, "unavailable": {**reasons, **missing}}


class Csv:
    """Appends to a CSV file with a header; an empty field is a value that cannot be read."""

    def __init__(self, path: Path) -> None:
        """JobError where the file holds something else; OSError where it cannot be written."""
        header = _csv_line(COLUMNS)
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                if file.readline() != header:
                    what, fix = "the file does not begin with the columns of this version", "name a new file"
                    raise JobError(what, where=f"--csv {path}", fix=fix)
            header = ""
        self._file = _opened(path)
        self._file.write(header)
        self._file.flush()

    def write(self, sample: Mapping[str, Any]) -> None:
        for row in rows(sample):
            held = row["gpu_clocks_held_by"]
            row["gpu_clocks_held_by"] = None if held is None else "; ".join(held)
            self._file.write(_csv_line([row[name] for name in COLUMNS]))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class JsonLines:
    """Appends one JSON object a row."""

    def __init__(self, path: Path) -> None:
        """OSError where the file cannot be written."""
        self._file = _opened(path)

    def write(self, sample: Mapping[str, Any]) -> None:
        self._file.writelines(json.dumps(row) + "\n" for row in rows(sample))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _opened(path: Path) -> io.TextIOWrapper:
    """The file to append to, at the beginning of a line: a crash may have cut off its last one."""
    torn = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"
    file = path.open("a", encoding="utf-8", newline="")
    file.write("\n" if torn else "")
    return file


def _csv_line(values: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
