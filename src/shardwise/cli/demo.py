"""`shardwise demo`: trains a small model on packaged text, with the commands a user would type."""

import contextlib
import itertools
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import JobError

PROMPT = "A language model is"

OUT = typer.Option(metavar="DIR", help="New folder to work in.  [default: shardwise-demo]")


def demo(out: Annotated[Path | None, OUT] = None) -> int:
    """Train a small model on packaged text, in a minute or two."""
    from shardwise.cli import main
    from shardwise.hardware.detect import gpu_count

    folder = out or _unused("shardwise-demo")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        what = f"the folder cannot be made: {error.strerror}"
        raise JobError(what, where=str(folder), fix="--out names a new folder") from None
    print(f"$ mkdir {shlex.quote(str(folder))} && cd {shlex.quote(str(folder))}", flush=True)
    processes = min(gpu_count() or os.cpu_count() or 1, 2)
    commands = (
        ["init", "demo"],
        ["train", "job.yaml", "--processes", str(processes)],
        ["report", "runs/demo"],
        ["generate", "runs/demo", "--prompt", PROMPT, "--temperature", "0.6"],
    )
    with contextlib.chdir(folder):
        for command in commands:
            print(f"\n$ shardwise {shlex.join(command)}", flush=True)
            code = main(command)
            if code:
                return code
    print(f"\nThe run is in {folder / 'runs' / 'demo'}. Your own job: shardwise init lora")
    return 0


def _unused(name: str) -> Path:
    """`name`, or `name-2`, `name-3`, ... where it is taken: a demo never writes into an older one."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())
