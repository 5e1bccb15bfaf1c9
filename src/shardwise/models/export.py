"""Trained weights in Hugging Face's format: written at every checkpoint, and exported."""

import copy
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, modeling_utils

from shardwise.errors import CheckpointError, JobError
from shardwise.job.schema import Model
from shardwise.models.adapters import ADAPTER, check_bitsandbytes, dequantize_linears, saved_names
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.file_weights import quiet
from shardwise.models.fingerprint import check_base
from shardwise.models.structure import join, own_tensors
from shardwise.models.tensor_file import save_file
from shardwise.models.tokenizer import from_files, misread_as
from shardwise.units import size

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest difference of merged from unmerged logits, as a share of the largest logit.

Merging rounds each weight once more: 16 roundings of half precision; fp32 leaves room for the order of sums.
"""

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""safetensors' names."""

Show = Callable[[str], None]

_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a small model that",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
)


def save_weights(
    built: BuiltModel,
    named_tensors: Iterable[tuple[str, Tensor]],
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rank: int = 0,
) -> None:
    """Write the trained weights, config, generation config and tokenizer into `directory`.

    Every rank iterates over `named_tensors`, an engine's `weights()`; rank 0 writes. Full training gives a
    model for `from_pretrained`, LoRA an adapter for PEFT. Raises CheckpointError where one of the trained
    weights is missing, or has another shape.
    """
    if rank != 0:
        for _ in named_tensors:
            pass
        return
    state = {name: tensor.contiguous() for name, tensor in named_tensors}
    _check(state, built.trainable_shapes)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    if built.peft is None:
        _save_model(built, {**state, **_persistent_buffers(built.model)}, directory, tokenizer)
    else:
        saved = copy.copy(built.peft.peft_config[ADAPTER])
        saved.inference_mode = True
        saved.target_modules = sorted(saved.target_modules)
        saved.save_pretrained(directory)
        names = saved_names(built.skeleton, state)
        tensors = {saved: state[name].clone() for saved, name in names.items()}  # twins share memory
        save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        _copy_mode(directory, ADAPTER_CONFIG)


def export(
    model_dir: Path,
    out: Path,
    *,
    merge: bool,
    base: Model,
    trained_on: Mapping[str, Any] | None = None,
    show: Show = lambda _: None,
) -> dict[str, Any]:
    """Export what `save_weights` wrote to the new folder `out`.

    `model_dir` is a checkpoint's `model` folder, `base` the job's `model` section, and `trained_on` the
    fingerprint of the adapter's base, if known. `merge` adds the adapter to its base, a quantised one as it
    was trained on, and writes a full model in the adapter's format; its logits on fixed prompts are compared
    with those of base and adapter. `show` gets what is being done, and the name of each file.

    Returns `kind` (model, adapter, merged), `dtype` (`bfloat16`), `out`, and for a merged model the largest
    difference of a logit and the largest logit. Raises JobError where there is nothing to merge,
    CheckpointError where the adapter is damaged, its base is another now, or merging changed the logits.
    """
    kind, logits = "model", {}
    if (model_dir / ADAPTER_CONFIG).is_file():
        kind = "merged" if merge else "adapter"
    elif merge:
        what = "there is no adapter to merge: the run trained all weights"
        raise JobError(what, where="--merge", fix="leave --merge out")
    if kind == "adapter":
        read_adapter(model_dir)  # to find out whether it is damaged
    if kind == "merged":
        logits = _merge(model_dir, out, base, trained_on, show)
    else:

        def copy(source: str, target: str) -> None:
            show(f"copying {Path(source).name}")
            shutil.copyfile(source, target)  # it gets the umask's permissions, not those of the checkpoint's

        shutil.copytree(model_dir, out, dirs_exist_ok=True, copy_function=copy)
    if other := misread_as(out):
        show(f"AutoTokenizer reads it as {other} and splits text otherwise: use PreTrainedTokenizerFast")
    return {"kind": kind, "dtype": _dtype(out), "out": str(out), **logits}


def load_with_adapter(
    model_dir: Path, base: Model, device: torch.device, trained_on: Mapping[str, Any] | None = None
) -> BuiltModel:
    """Load the base model with the adapter of `model_dir`, on `device` and in evaluation mode.

    Raises CheckpointError where the adapter is damaged or does not fit, or the base's fingerprint is not
    `trained_on`; JobError where the base has random weights; MachineError where it cannot be quantised here.
    """
    tensors = read_adapter(model_dir)
    if base.weights == "random":
        what = "the adapter's base has random weights, which were never saved"
        raise JobError(what, where="model.weights", fix="train adapters on pretrained weights")
    check_bitsandbytes(base)
    built = build_model(base, dtype=next(iter(tensors.values())).dtype, seed=0)
    names = saved_names(built.skeleton, built.trainable_shapes)
    _check(tensors, {saved: built.trainable_shapes[name] for saved, name in names.items()})
    check_base(trained_on, base, built.found)
    built.weights.fill(built.model, device)
    with torch.no_grad():
        for saved, name in names.items():
            built.model.get_parameter(name).copy_(tensors[saved])
    built.model.to(device).eval()
    built.model.config.use_cache = True
    folder = built.found.folder
    if folder and (folder / "generation_config.json").is_file():  # names the tokens that end an answer
        built.model.generation_config = GenerationConfig.from_pretrained(folder)
    return built


def read_adapter(model_dir: Path) -> dict[str, Tensor]:
    """Read an adapter's tensors by PEFT's names; CheckpointError where it is damaged or holds no values."""
    path = model_dir / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except Exception as error:  # noqa: BLE001  (safetensors' own error is a plain Exception)
        raise CheckpointError(f"the adapter cannot be read: {error}", where=str(path)) from None
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    if empty or not tensors:
        what = f"the adapter holds no values: {empty[0] if empty else 'no tensors at all'}"
        fix = "train again; nothing can be recovered from this file"
        raise CheckpointError(what, where=str(path), fix=fix)
    return tensors


def _dtype(folder: Path) -> str:
    """Read the number formats of a folder's safetensors from the files' headers, in torch's names."""
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return ", ".join(sorted(_DTYPES.get(name, name) for name in found))


def _merge(
    model_dir: Path, out: Path, base: Model, trained_on: Mapping[str, Any] | None, show: Show
) -> dict[str, float]:
    show(f"loading the base, {base.source}, with the adapter")
    built = load_with_adapter(model_dir, base, torch.device("cpu"), trained_on)
    assert built.peft is not None
    tokenizer = from_files(model_dir)
    show("merging, and comparing the logits")
    before = _logits(built.model, tokenizer)
    dequantize_linears(built.model)
    merged = built.peft.merge_and_unload(safe_merge=True)
    after = _logits(merged, tokenizer)
    largest, difference = float(before.abs().max()), float((before - after).abs().max())
    bound = LOGIT_TOLERANCE[built.model.dtype] * largest
    if not difference <= bound:
        what = f"merging changed the logits by {difference:.3g}, more than rounding explains ({bound:.3g})"
        raise CheckpointError(what, where=str(model_dir), fix="export the adapter without --merge")
    out.mkdir(parents=True, exist_ok=True)
    show(f"writing the merged model, {size(sum(t.nbytes for t in merged.state_dict().values()))}")
    tokenizer.save_pretrained(out)
    _save_model(built, merged.state_dict(), out, tokenizer)
    return {"max_logit_difference": difference, "max_logit": largest}


@torch.no_grad()
def _logits(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """fp32 logits of every token of the fixed prompts, [tokens, vocabulary]."""
    rows = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in _PROMPTS]
    return torch.cat([model(input_ids=row).logits[0].float() for row in rows])


def _save_model(
    built: BuiltModel, state: Mapping[str, Tensor], directory: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    skeleton = built.skeleton
    if built.spec.weights == "random":
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            for config in (skeleton.config, skeleton.generation_config):
                setattr(config, name, getattr(tokenizer, name))
    with quiet(), own_writer():
        skeleton.save_pretrained(directory, state_dict=dict(state))
    _copy_mode(directory, "config.json")
    folder = built.found.folder
    if built.spec.weights == "pretrained" and folder and (folder / "generation_config.json").is_file():
        shutil.copyfile(folder / "generation_config.json", directory / "generation_config.json")


def own_writer() -> AbstractContextManager[Any]:
    """Within, transformers writes weights without holding Python's lock."""
    return patch.object(modeling_utils, "safe_save_file", save_file)


def _copy_mode(directory: Path, name: str) -> None:
    """Give the weights the permissions of another file; safetensors lets only the owner read its own."""
    for file in directory.glob("*.safetensors"):
        shutil.copymode(directory / name, file)


def _check(state: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    for name, shape in expected.items():
        found = state.get(name)
        if found is None or found.shape != shape:
            has = "is missing" if found is None else f"has {list(found.shape)}"
            what = f"{name} should have the shape {list(shape)} and {has}"
            fix = "the weights were not gathered or belong to another model; nothing was written"
            raise CheckpointError(what, where="trained weights", fix=fix)
    extra = sorted(state.keys() - expected.keys())
    if extra:
        fix = "use the job that the weights were trained with"
        what = f"{extra[0]} is no trained weight of this model"
        raise CheckpointError(what, where="trained weights", fix=fix)


def _persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    every = ((prefix, module, own_tensors(module)) for prefix, module in model.named_modules())
    return {join(p, name): t.cpu() for p, m, own in every for at, name, t in own if at is m._buffers}
