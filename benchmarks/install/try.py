"""Build the wheel and the sdist, install them in clean environments, and run what a newcomer runs.

    python benchmarks/install/try.py [--pythons 3.11 3.12 3.13] [--without-demo] [--out FILE]

Needs `uv`, git, the Pythons on PATH, and the network unless uv has every package in its cache. The packages
are the newest that pyproject.toml allows, not those of constraints.txt. Nothing of this checkout is imported:
every environment, job and run is in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
TORCH = "torch is not installed\n  fix: pip install shardwise"
EXTRA = "deepspeed is not installed\n  fix: pip install 'shardwise[train]'"
PLAN = ["plan", "--model", "EleutherAI/gpt-neo-2.7B", "--lora", "16", "--gpus", "4xRTX4080"]
TINY = ["check", "ds.json", "--run-tiny"]
FIRST = ["train", "job.yaml", "--processes", "1", "--max-steps", "2"]
KINDS = ("no torch", "base", "train")
# Exit code of a command, and what it has to print: everywhere, or by what is installed.
COMMANDS: list[tuple[list[str], dict[str, tuple[int, str]]]] = [
    (["--help"], dict.fromkeys(KINDS, (0, "Usage: shardwise"))),
    (["--show-completion", "bash"], dict.fromkeys(KINDS, (0, "complete"))),
    (["init", "demo"], dict.fromkeys(KINDS, (0, "wrote job.yaml"))),
    (["config", "job.yaml"], dict.fromkeys(KINDS, (0, "hidden_size"))),
    (["check", "job.yaml"], dict.fromkeys(KINDS, (0, "nothing found"))),
    (["check", "ds.json"], dict.fromkeys(KINDS, (0, "ds.json"))),
    (["monitor", "--once"], dict.fromkeys(KINDS, (0, "CPU"))),
    (PLAN, {"no torch": (4, TORCH), "base": (0, "zero2"), "train": (0, "zero2")}),
    ([*FIRST, "--set", "strategy=single"], {"no torch": (4, TORCH), "base": (0, "loss")}),
    ([*FIRST, "--set", "name=zero2"], {"base": (4, EXTRA)}),
    (["demo"], {"train": (0, "Your own job")}),
    # After the demo, in which DeepSpeed compiles an operator: that alone can outlast the limit of --run-tiny.
    (TINY, {"no torch": (4, "deepspeed is not"), "base": (4, "deepspeed is not"), "train": (0, "ds.json")}),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="on the first Python")
    parser.add_argument("--without-demo", action="store_true", help="leave out what trains")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardwise-install-") as folder:
        place = Path(folder)
        result: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "files": build(place / "dist"),
            "environments": [],
        }
        wanted = [(options.pythons[0], kind) for kind in options.kinds]
        for python, kind in wanted + [(python, "train") for python in options.pythons[1:]]:
            row = environment(place, python, kind, demo=not options.without_demo)
            result["environments"].append(row)
            if options.out is not None:
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result["environments"]))
    return int(not all(one["ok"] for row in result["environments"] for one in row["commands"]))


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def build(dist: Path) -> dict[str, Any]:
    """The sdist, and the wheel made from the sdist: both hold every file of the package that git knows."""
    output("uv", "build", "--quiet", "--out-dir", str(dist), str(ROOT))
    wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))
    known = set(output("git", "-C", str(ROOT), "ls-files", "src/shardwise").split())
    wheel_files = {f"src/{name}" for name in zipfile.ZipFile(wheel).namelist()}
    with tarfile.open(sdist) as archive:
        sdist_files = {name.partition("/")[2] for name in archive.getnames()}
    missing = sorted((known - wheel_files) | (known - sdist_files))
    if missing:
        sys.exit(f"the wheel or the sdist lacks {', '.join(missing)}")
    sizes = {path.name: path.stat().st_size for path in (wheel, sdist)}
    return {"bytes": sizes, "files_of_the_package": len(known), "missing": missing}


def environment(place: Path, python: str, kind: str, *, demo: bool) -> dict[str, Any]:
    """One clean environment: what was installed, how long that took, and what every command did."""
    name = f"{python}-{kind.replace(' ', '-')}"
    home, work = place / name, place / f"{name}-work"
    output("uv", "venv", "--quiet", "--python", python, str(home))
    wheel = str(next((place / "dist").glob("*.whl")))
    arguments = [f"{wheel}[train]" if kind == "train" else wheel]
    if kind == "no torch":
        never = place / "no-torch.txt"
        never.write_text("torch ; python_version < '3'\n", encoding="utf-8")
        arguments += ["--override", str(never)]
    begin = time.perf_counter()
    output("uv", "pip", "install", "--quiet", "--python", str(home / "bin" / "python"), *arguments)
    installing = time.perf_counter() - begin
    listed = json.loads(
        output("uv", "pip", "list", "--format", "json", "--python", str(home / "bin" / "python"))
    )
    shown = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes", "numpy", "pydantic", "typer")
    row: dict[str, Any] = {
        "python": output(str(home / "bin" / "python"), "-V").split()[1],
        "kind": kind,
        "install_seconds": round(installing, 1),
        "packages": len(listed),
        "versions": {one["name"]: one["version"] for one in listed if one["name"] in shown},
        "commands": [],
    }
    work.mkdir()
    (work / "ds.json").write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    for command, wanted in COMMANDS:
        if kind in wanted and (demo or command[0] not in ("demo", "train")):
            one = run(home, work, command, *wanted[kind])
            row["commands"].append(one)
            print(f"{name}: {one['command']}: {'ok' if one['ok'] else 'NOT AS WANTED'}", flush=True)
            if not one["ok"]:
                print(one["said"], flush=True)
    return row


def run(home: Path, work: Path, command: list[str], code: int, words: str) -> dict[str, Any]:
    """One command in the environment, with neither this checkout nor its environment in reach."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TERM") if name in os.environ}
    path = f"{home / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    begin = time.perf_counter()
    done = subprocess.run(
        [str(home / "bin" / "shardwise"), *command],
        cwd=work,
        env={**kept, "PATH": path, "SHARDWISE_CACHE": str(work / "cache"), "VIRTUAL_ENV": str(home)},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=900,
    )
    said = done.stdout + done.stderr
    errors = len(re.findall(r"^error:", said, re.MULTILINE))
    ok = done.returncode == code and words in said and "Traceback" not in said and errors == int(code != 0)
    return {
        "command": " ".join(["shardwise", *command]),
        "exit_code": done.returncode,
        "wanted": code,
        "seconds": round(time.perf_counter() - begin, 1),
        "ok": ok,
        "said": said[-2000:] if code or not ok else "",
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| Python | installed | torch | command | exit code | seconds | as wanted |", "| --- " * 7 + "|"]
    for row in rows:
        torch = row["versions"].get("torch", "none")
        for one in row["commands"]:
            cells = [row["python"], row["kind"], torch, f"`{one['command']}`", str(one["exit_code"])]
            lines.append(
                "| " + " | ".join([*cells, str(one["seconds"]), "yes" if one["ok"] else "NO"]) + " |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
