"""Samples kept in files: one row a GPU and sample, or one a sample where there is no GPU."""

import csv
import json
import os
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


class RowFile:
    """Appends the rows of samples: as CSV with a header, an empty field for None; or as JSON lines."""

    def __init__(self, path: Path, *, as_csv: bool) -> None:
        """JobError where a CSV file has other columns; OSError where the file cannot be written."""
        size = path.stat().st_size if path.exists() else 0
        header = ",".join(COLUMNS) + "\n"
        if as_csv and size:
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                if file.readline() != header:
                    what, fix = "the file does not begin with the columns of this version", "name a new file"
                    raise JobError(what, where=f"--csv {path}", fix=fix)
        torn = False  # by a crash in its last line
        if size:
            with path.open("rb") as before:
                before.seek(-1, os.SEEK_END)
                torn = before.read() != b"\n"
        self._file = path.open("a", encoding="utf-8", newline="")
        self._file.write("\n" if torn else header if as_csv and not size else "")
        self._file.flush()
        table = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        self._table = table if as_csv else None

    def write(self, sample: Mapping[str, Any]) -> None:
        """A sample's rows are in the file when this returns."""
        for row in rows(sample):
            if self._table is None:
                self._file.write(json.dumps(row) + "\n")
            else:
                held = "; ".join(row["gpu_clocks_held_by"] or ())
                self._table.writerow(row | {"gpu_clocks_held_by": held})
        self._file.flush()

    def close(self) -> None:
        self._file.close()
