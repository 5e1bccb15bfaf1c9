"""What is done with a run: list and convert its checkpoints, export its weights, let it answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.app import publish
from shardwise.app.listen import listen
from shardwise.errors import CheckpointError, JobError, MachineError
from shardwise.inference.sampling import Sampling
from shardwise.record.manifest import step_folders, verify
from shardwise.record.read import evaluations_of, is_run_folder, no_run, read_run
from shardwise.report.compare import checkpoints as listed

if TYPE_CHECKING:
    from shardwise.inference.conversation import Conversation


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    merge: bool = False,
    gguf: bool = False,
    push: str | None = None,
    show: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the newest valid checkpoint's weights as Hugging Face safetensors, with a model card.

    Args:
        run: a run folder.
        out: the new folder to write; None: RUN/export.
        merge: merge LoRA adapters into the base model.
        gguf: write a GGUF file, too, with llama.cpp's converter.
        push: repository of the hub that the folder is uploaded to; a new one is private.
        show: gets a sentence for each part of the work.

    Returns:
        What was written, its number format and step, with `merge` the largest logit difference, and the
        `gguf` file and the `url` on the hub, where asked for.
    """
    folder = Path(run) / "export" if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise JobError(f"{folder} is not a folder", where="--out", fix="name a new folder")
    if folder.resolve() == Path.cwd():
        raise JobError("a model gets a folder of its own", where=f"--out {out}", fix="name a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise JobError(f"{folder} exists and is not empty", where="--out", fix="name a new folder")
    lora = read_run(Path(run), with_events=False).job["model"].get("lora")
    if merge and lora is None:
        what = "there is no adapter to merge: the run trained all weights"
        raise JobError(what, where="--merge", fix="leave --merge out")
    if gguf and lora is not None and not merge:
        what = "a GGUF file holds an entire model, and the run trained an adapter"
        raise JobError(what, where="--gguf", fix="add --merge")
    converter = publish.gguf_converter() if gguf else None
    if push is not None:
        publish.check_push(push)
    from shardwise.training.afterwards import export_run

    def convert(made: Path) -> None:
        if converter is not None:
            publish.write_gguf(converter, made, f"{folder.name}.gguf", show)

    written = export_run(run, folder, merge=merge, show=show, finish=convert)
    if gguf:
        written["gguf"] = str(folder / f"{folder.name}.gguf")
    if push is not None:
        written["url"] = publish.push(folder, push, show)
    return written


def open_conversation(
    name: str, sampling: Sampling, *, system: str | None, compare: bool, note: Callable[[str], None]
) -> Conversation:
    """Load a run's newest checkpoint, an exported model or adapter, or a model of the hub, to talk to it."""
    from shardwise.inference.conversation import Conversation
    from shardwise.inference.load import load_model

    return Conversation(load_model(name), sampling, system=system, compare=compare, note=note)


def serve(name: str, *, host: str, port: int, token: str | None, show: Callable[[str], None]) -> None:
    """Answer OpenAI's API until a signal ends it; see `inference/endpoint.py` for what is refused.

    Raises JobError where others would reach the address without a token, MachineError where it is taken.
    """
    fix = "set SHARDWISE_TOKEN, or add --token; clients send it as their API key"
    listener = listen(host, port, token=token, use="use the model", fix=fix)
    with listener:
        try:
            from shardwise.inference.endpoint import run
        except ImportError as error:
            what, fix = f"{error.name} is not installed", "pip install 'shardwise[serve]'"
            raise MachineError(what, where="serve", fix=fix) from None
        from shardwise.inference.load import load_model

        run(load_model(name), listener, token=token or None, show=show)


def checkpoints(
    run: str | Path, step: int | None = None, *, every_byte: bool = False
) -> list[dict[str, Any]]:
    """Those of a run, or of one step, newest first, with what is wrong with each (`problems`).

    Names and sizes are looked at, and with `every_byte` the contents. `loss` is that of an evaluation at the
    step, else None. JobError where there is none.
    """
    folder = Path(run) / "checkpoints"
    if not folder.is_dir() and not is_run_folder(Path(run)):
        raise no_run(Path(run))
    there = [number for number, _ in step_folders(folder)]
    if not there or step not in (None, *there):
        what = f"there is no checkpoint{'' if step is None else f' of step {step}'}"
        fix = f"--step {' or '.join(map(str, there))}" if there else "the run has saved none yet"
        raise JobError(what, where=str(folder), fix=fix)
    found = [one for one in listed(folder, every_byte=every_byte) if step in (None, one["step"])]
    events = read_run(Path(run)).events if is_run_folder(Path(run)) else []
    losses = dict(evaluations_of(events, until=there[0]))
    return [{**one, "loss": losses.get(one["step"])} for one in found]


def convert(run: str | Path, out: str | Path, step: int | None = None) -> dict[str, Any]:
    """Write the newest checkpoint's fp32 weights and AdamW state into a new safetensors file.

    For other programs: every strategy and number of processes loads every checkpoint as it is. Raises
    CheckpointError for a damaged one, and for DeepSpeed's own files.
    """
    from shardwise.engines.runtime.state import PICKLED, consolidate

    newest, out = checkpoints(run, step)[0], Path(out)
    path = Path(newest["path"])
    problems = verify(path)
    if (path / "engine" / PICKLED).is_dir():
        problems.append("its state is in DeepSpeed's own files: resume with its strategy, and save again")
    if problems:
        raise CheckpointError(f"it cannot be converted: {'; '.join(problems[:3])}", where=str(path))
    if out.exists() or not out.parent.is_dir():
        what = f"{out} exists" if out.exists() else f"there is no folder {out.parent}"
        raise JobError(what, where="--out", fix="name a new file, in a folder that exists")
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        tensors = consolidate(path / "engine", partial)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return {"tensors": tensors, "out": str(out), "bytes": out.stat().st_size, "step": newest["step"]}
