"""Run `check` on configurations of public repositories and issues, and ask DeepSpeed what it says of them.

`python benchmarks/check/run.py FOLDER benchmarks/check/results/public.json`

FOLDER holds a folder OWNER__NAME for each repository, as `git clone` makes it at the commit in `cases.json`,
and a folder `issues/OWNER__NAME__NUMBER` with the files that the issue shows. This repository holds none.
"""

import io
import json
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from shardwise.app.check import check
from shardwise.errors import JobError
from shardwise.lint.setup import Setup
from shardwise.lint.text import read_json
from shardwise.lint.tiny import tiny_of

os.environ["DS_ACCELERATOR"] = "cpu"
CASES = json.loads((Path(__file__).parent / "cases.json").read_text(encoding="utf-8"))
COMMAND = re.compile(
    r"^\s*(\w+=\S+ +)*(deepspeed|torchrun|accelerate launch|python3? -m torch.distributed)", re.MULTILINE
)
SIGNS = {".json": re.compile(r'zero_optimization|train_micro_batch|"fp16"'), ".sh": COMMAND}
SIGNS |= dict.fromkeys((".yaml", ".yml"), re.compile("distributed_type"))


def findings(files: list[Path], **flags: Any) -> list[dict[str, Any]]:
    """Errors and warnings, as JSON; an input error is a row of its own."""
    try:
        report = check(files, **flags)
    except JobError as error:
        return [{"severity": "input", "rule": "", "file": str(files[0]), "line": 1, "what": str(error)}]
    return [
        {name: getattr(one, name) for name in ("severity", "rule", "file", "line")}
        for one in report.findings
        if one.severity != "note"
    ]


def of_deepspeed(file: Path) -> str:
    """What DeepSpeed's parser says of a JSON whose `auto` is filled in; empty if it accepts it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        document = read_json(file.read_text(encoding="utf-8"), str(file))
        tiny = tiny_of(Setup(documents=(document,)))
        assert tiny is not None
        fp16, values = document.section("fp16"), dict(tiny.config)
        if fp16 and fp16.get("enabled") != "auto":
            values["fp16"] = fp16  # which the tiny run switches off
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            DeepSpeedConfig(values)
    except (Exception, AssertionError) as error:  # noqa: BLE001 (its errors have no common kind)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def main(folder: Path, out: Path) -> None:
    rows = []
    for name, commit in CASES["repositories"].items():
        top = folder / name.replace("/", "__")
        os.chdir(top)
        for file in sorted(path.relative_to(top) for path in top.rglob("*") if path.suffix in SIGNS):
            text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
            if SIGNS[file.suffix].search(text):
                row = {"repository": name, "commit": commit, "path": str(file), "findings": findings([file])}
                if file.suffix == ".json":
                    row["deepspeed"] = of_deepspeed(file)
                rows.append(row)
    issues = []
    for case in CASES["issues"]:
        place = folder / "issues" / case["issue"].replace("/", "__").replace("#", "__")
        os.chdir(place)
        found = findings([Path(file) for file in case["files"]], **case.get("flags", {}))
        issues.append({**case, "findings": found, "named": case["rule"] in [one["rule"] for one in found]})
    lines = {name: ",\n".join(map(json.dumps, part)) for name, part in (("files", rows), ("issues", issues))}
    parts = ",\n".join(f'"{name}": [\n{part}\n]' for name, part in lines.items())
    out.write_text(f"{{\n{parts}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
