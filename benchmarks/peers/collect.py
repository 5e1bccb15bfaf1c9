"""Put the rows of one session on one machine into one file: `collect.py rows.jsonl > result.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    rows: list[dict[str, Any]] = []
    machines: list[dict[str, Any]] = []
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        environment = row.pop("environment")
        row["command"] = environment.pop("command")
        row["allocator"] = environment.pop("allocator")
        rows.append(row)
        machines.append(environment)
    if len({machine["gpu"] for machine in machines}) != 1:
        sys.exit("the rows come from different machines")
    # a program that does not run with the others' packages names its own
    common = machines[0]["versions"]
    for row, machine in zip(rows, machines, strict=True):
        own = {name: version for name, version in machine["versions"].items() if common.get(name) != version}
        if own:
            row["versions"] = own
    json.dump({"schema": 1, **machines[0], "rows": rows}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
