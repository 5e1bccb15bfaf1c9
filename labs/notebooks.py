"""The labs' notebooks: made from the scripts next to this file, executed, and exported as pages.

    python labs/notebooks.py write                  # labs/*.ipynb, without outputs, from labs/NN-*.py
    python labs/notebooks.py execute --out DIR      # every notebook in a kernel of its own; pages into DIR

A script is a notebook in the percent format, which jupytext, VS Code and PyCharm read: `# %%` begins a
cell of code, `# %% [markdown]` one of prose.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 300
"""Limit of one cell."""


def scripts() -> list[Path]:
    return sorted(HERE.glob("[0-9][0-9]-*.py"))


def cells(script: str) -> list[tuple[str, str]]:
    """(`code` or `markdown`, text) of each cell of a script."""
    found = []
    for piece in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = piece.partition("\n")
        if head.strip() == "[markdown]":
            prose = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            found.append(("markdown", "\n".join(prose)))
        else:
            found.append(("code", body.strip()))
    return found


def notebook(script: Path) -> dict[str, Any]:
    """The notebook of a script, as the content of an .ipynb file; no outputs."""
    return {
        "cells": [
            {
                "cell_type": kind,
                "id": f"cell-{number}",
                "metadata": {},
                "source": text.splitlines(keepends=True),
                **({"execution_count": None, "outputs": []} if kind == "code" else {}),
            }
            for number, (kind, text) in enumerate(cells(script.read_text(encoding="utf-8")), start=1)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def text_of(script: Path) -> str:
    return json.dumps(notebook(script), indent=1, ensure_ascii=False) + "\n"


def write() -> None:
    for script in scripts():
        script.with_suffix(".ipynb").write_text(text_of(script), encoding="utf-8")


def execute(script: Path, out: Path) -> float:
    """Run a notebook and write it with its outputs as .ipynb, .html and .md; returns its seconds."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter, MarkdownExporter
    from traitlets.config import Config

    began = time.monotonic()
    book = nbformat.reads(text_of(script), as_version=4)
    with tempfile.TemporaryDirectory() as sockets:  # not ports, which others could reach
        talk = {"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}
        place = {"metadata": {"path": str(HERE)}}
        client = NotebookClient(book, timeout=SECONDS, resources=place, config=Config(talk))
        try:
            with (out / f"{script.stem}.log").open("wb") as log:  # of the processes that train
                client.execute(stdout=log, stderr=log)
        finally:  # after an error, too: the page shows where
            nbformat.write(book, out / f"{script.stem}.ipynb")
    for cell in book.cells:
        cell.update({"outputs": joined(cell["outputs"])} if "outputs" in cell else {})
    (out / f"{script.stem}.html").write_text(HTMLExporter().from_notebook_node(book)[0], encoding="utf-8")
    page, files = MarkdownExporter().from_notebook_node(
        book, {"output_files_dir": f"{script.stem}", "unique_key": script.stem}
    )
    for name, content in files["outputs"].items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content)
    (out / f"{script.stem}.md").write_text(page, encoding="utf-8")
    return time.monotonic() - began


def joined(outputs: list[Any]) -> list[Any]:
    """Consecutive texts as one output. The progress of runs is on stderr, which pages show as errors."""
    found: list[Any] = []
    for output in outputs:
        if output["output_type"] == "stream" and found and found[-1]["output_type"] == "stream":
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
        if output["output_type"] == "stream":
            found[-1]["name"] = "stdout"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("write", "execute"))
    parser.add_argument("names", nargs="*", help="of labs to execute, such as 01-setup; all without one")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "labs")
    arguments = parser.parse_intermixed_args()  # names after --out, too
    if arguments.what == "write":
        write()
        return
    chosen = [script for script in scripts() if not arguments.names or script.stem in arguments.names]
    unknown = set(arguments.names) - {script.stem for script in chosen}
    if unknown:
        sys.exit(f"there is no lab {', '.join(sorted(unknown))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja, for DeepSpeed
    failed, total = [], 0.0
    for script in chosen:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        try:
            execute(script, arguments.out)
            error = ""
        except Exception as problem:  # noqa: BLE001 - the other labs still run
            failed.append(script.stem)
            error = f"  FAILED\n{re.sub(chr(27) + '[^m]*m', '', str(problem))}"
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{script.stem:26} {seconds:6.1f} s, {cpu:6.1f} s of CPU{error}", flush=True)
        total += seconds
    print(f"{len(chosen)} lab{'s' * (len(chosen) != 1)} in {total:.0f} s; pages in {arguments.out}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
