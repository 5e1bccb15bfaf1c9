"""`shardwise init [PRESET]`: a commented job file to start from; `config JOB`: where its values come from."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import AsJson, Changes, JobFile, QLora
from shardwise.errors import JobError


def init(
    preset: Annotated[str, typer.Argument(help="What to start from; see --list.")] = "lora",
    out: Annotated[Path, typer.Option(metavar="FILE", help="Job file to write.")] = Path("job.yaml"),
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    qlora: QLora = False,
    list_models: Annotated[
        bool, typer.Option("--models", help="List the model shapes known without network.")
    ] = False,
) -> None:
    """Write a commented job file."""
    from shardwise.job import presets

    if list_presets:
        for name in presets.names():
            print(f"{name:<22} {presets.title(name)}")
    elif list_models:
        from shardwise.models.catalog import shapes
        from shardwise.units import count

        for shape in shapes():
            print(f"{shape.name:<22} {count(shape.parameters):>6}  {shape.hub or ''}".rstrip())
    else:
        if preset not in presets.names():
            what = f"there is no preset {preset!r}"
            raise JobError(what, where="shardwise init", fix=presets.suggestion(preset))
        for path in presets.write(preset, out, qlora=qlora):
            print(f"wrote {path}")
        print(f"next: shardwise train {shlex.quote(str(out))}")


def config(job: JobFile, changes: Changes = [], as_json: AsJson = False) -> None:
    """Show the resolved job and where each value comes from."""
    from shardwise.job.load import load_job, resolved

    settings = resolved(load_job(job, changes))
    if as_json:
        rows = [{"key": row.key, "value": row.value, "origin": row.origin} for row in settings]
        print(json.dumps({"settings": rows}, ensure_ascii=False))
        return
    texts = [json.dumps(row.value, ensure_ascii=False) for row in settings]
    widths = max(len(row.key) for row in settings), min(40, max(map(len, texts)))
    for row, text in zip(settings, texts, strict=True):
        print(f"{row.key:<{widths[0]}}  {text:<{widths[1]}}  {row.origin}")
