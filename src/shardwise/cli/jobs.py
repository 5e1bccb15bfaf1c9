"""`shardwise init [PRESET]`: a commented job file to start from; `config JOB`: where its values come from."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import AsJson, Changes, JobFile, QLora
from shardwise.errors import JobError, printable

START = typer.Argument(metavar="PRESET|FILE", help="One of --list, or files with --from.  [default: lora]")
TOOLS = "transformers, TRL, LLaMA-Factory, ms-swift, Unsloth, Axolotl, DeepSpeed or accelerate"
FROM = typer.Option("--from", help=f"Make it of files of {TOOLS}.")
OUT = typer.Option(metavar="FILE", help="Job file to write.")
MODELS = typer.Option("--models", help="List the model shapes known without network.")


def init(
    start: Annotated[list[str] | None, START] = None,
    foreign: Annotated[bool, FROM] = False,
    out: Annotated[Path, OUT] = Path("job.yaml"),
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    qlora: QLora = False,
    list_models: Annotated[bool, MODELS] = False,
) -> None:
    """Write a commented job file, also from other tools' files."""
    from shardwise.job import presets

    preset, *more = start or ["lora"]
    if list_presets:
        for name in sorted(presets.names(), key=presets.title):  # which begins with what is trained
            print(f"{name:<22} {presets.title(name)}")
    elif list_models:
        from shardwise.models.catalog import shapes
        from shardwise.units import count

        for shape in shapes():
            print(f"{shape.name:<22} {count(shape.parameters):>6}  {shape.hub or ''}".rstrip())
    elif foreign and start:
        from shardwise.lint.foreign import shown, translation

        made, said = translation(list(map(Path, start)), out.parent)
        print(f"wrote {next(presets.write_new({out: printable(made)}, out))}")
        print(printable("\n".join(shown(said, out))))
        print(f"next: shardwise plan {shlex.quote(str(out))}")
    elif foreign or more or Path(preset).suffix in (".py", ".json", ".yaml", ".yml", ".sh"):
        fix = f"shardwise init --from {shlex.join(start or ['ds_config.json', 'train.py'])}"
        raise JobError("it takes one preset, or --from and files", where="shardwise init", fix=fix)
    else:
        if preset not in presets.names():
            what = f"there is no preset {preset!r}"
            raise JobError(what, where="shardwise init", fix=presets.suggestion(preset))
        for path in [*presets.write(preset, out, qlora=qlora)]:  # all of them, or none
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
