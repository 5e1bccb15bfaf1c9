"""What is done with a trained model: export its weights, let it write."""

import shlex
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.record.read import is_run_folder


def export(run: str | Path, out: str | Path | None = None, *, merge: bool = False) -> dict[str, Any]:
    """Write the newest valid checkpoint's weights as Hugging Face safetensors.

    Args:
        run: a run folder.
        out: the new folder to write; None: RUN/export.
        merge: merge LoRA adapters into the base model.

    Returns:
        What was written, its number format and step, and with `merge` the largest logit difference.
    """
    folder = Path(run) / "export" if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise JobError(f"{folder} is not a folder", where="--out", fix="name a new folder")
    from shardwise.training.afterwards import export_run

    return export_run(run, folder, merge=merge)


def generate(
    run: str | Path, prompt: str, *, max_new_tokens: int = 100, temperature: float = 0.0, seed: int = 0
) -> str:
    """The text that a run's newest valid checkpoint writes for a prompt; greedy at temperature 0."""
    _refuse_exported(Path(run))
    from shardwise.training.afterwards import generate_run

    return generate_run(run, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


def _refuse_exported(folder: Path) -> None:
    """JobError for a folder with weights and no run: how to load them, and which run may be meant."""
    kinds = {
        "adapter_config.json": ("an exported adapter", "peft.AutoPeftModelForCausalLM"),
        "config.json": ("a Hugging Face model", "transformers.AutoModelForCausalLM"),
    }
    found = next((kinds[name] for name in kinds if (folder / name).is_file()), None)
    if found is None or is_run_folder(folder):
        return
    kind, loader = found
    run = shlex.quote(str(folder.parent)) if is_run_folder(folder.resolve().parent) else "RUN"
    fix = f"`shardwise generate {run} --prompt ...` with the run that it was exported from; the folder "
    fix += f"itself is for {loader}.from_pretrained"
    raise JobError(f"{folder} is {kind}, not a run folder", where="RUN", fix=fix)
