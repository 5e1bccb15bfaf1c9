"""Finds and loads what a name stands for: a run, an exported model or adapter, a model of the hub."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from shardwise.errors import CheckpointError, JobError
from shardwise.inference.model import LoadedModel
from shardwise.job.paths import alike
from shardwise.job.schema import Model
from shardwise.models.adapters import quiet_peft
from shardwise.models.build import quantised
from shardwise.models.catalog import MODEL_FILES, unknown
from shardwise.models.export import ADAPTER_CONFIG, load_with_adapter, read_adapter
from shardwise.models.families import attention_for
from shardwise.models.file_weights import check_scales, check_tied, located, no_metadata, quiet, read_headers
from shardwise.models.source import find_source, safetensors_files
from shardwise.models.tokenizer import load_tokenizer
from shardwise.record.read import JOB, is_run_folder, read_run
from shardwise.training.afterwards import base_of, newest_checkpoint

LOADED = (*MODEL_FILES, ADAPTER_CONFIG, JOB)
"""One of them is in a folder that can be loaded: of a model, an adapter or a run."""


def load_model(name: str) -> LoadedModel:
    """Load a run's newest sound checkpoint, a folder of `export` or `save_pretrained`, or a hub id.

    It goes to the GPU if there is one. Raises JobError where there is nothing of that name or it cannot be
    loaded without running its code, CheckpointError where its files are damaged or do not match, MachineError
    where the hub is needed and cannot be reached.
    """
    path = Path(name)
    if is_run_folder(path):
        return _of_run(path)
    if (path / ADAPTER_CONFIG).is_file():
        return _of_adapter(path)
    local = (
        path.exists() or name.startswith((".", "/", "~")) or (len(path.parts) > 1 and path.parent.is_dir())
    )
    if local and not (path / "config.json").is_file():
        if not path.exists() and (near := alike(name, LOADED, path.parent)):
            fix = f"did you mean {path.parent / near}?"
            raise JobError(f"there is no folder {name}", where=name, fix=fix)
        read_run(path, with_events=False)  # says that it is none, and which runs are near
    if not local and (error := unknown(name, files=LOADED)):
        raise error
    model, folder = _published(Model(source=name))
    return LoadedModel(path.resolve().name if path.is_dir() else name, model, _tokenizer(folder))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _of_run(path: Path) -> LoadedModel:
    job, checkpoint = newest_checkpoint(path)
    folder, peft = checkpoint.path / "model", None
    if (folder / ADAPTER_CONFIG).is_file():
        built = load_with_adapter(folder, job.model, _device(), base_of(checkpoint))
        model, lora = built.model, job.model.lora
        peft = None if lora is None or lora.modules_to_save else built.peft  # nothing has the base's modules
    else:
        model = _from_folder(folder, trusted=job.model.trust_remote_code)
    tokenizer = _tokenizer(folder, trusted=job.model.trust_remote_code)
    return LoadedModel(path.resolve().name, model, tokenizer, peft=peft, system=job.data.system)


def _of_adapter(path: Path) -> LoadedModel:
    """An adapter in PEFT's format, on the base that its config names."""
    from peft import PeftModel  # imports a second's worth of compilers

    where = str(path / ADAPTER_CONFIG)
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = Model(source=config["base_model_name_or_path"], revision=config.get("revision"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the adapter's config cannot be read, or names no base ({type(error).__name__})"
        raise CheckpointError(what, where=where, fix="export it again") from None
    read_adapter(path)  # to find out whether it is damaged
    model, folder = _published(base)
    own = any(path.glob("tokenizer*"))
    tokenizer = _tokenizer(path if own else folder)
    try:
        with quiet_peft():
            peft = PeftModel.from_pretrained(model, path, autocast_adapter_dtype=False).eval()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        what = f"the adapter does not fit its base: {' '.join(str(error).split())[:300]}"
        fix = "put the base back that it was trained on"
        raise CheckpointError(what, where=f"{where}: {base.source}", fix=fix) from None
    return LoadedModel(path.resolve().name, peft.get_base_model(), tokenizer, peft=peft)


def _published(source: Model) -> tuple[PreTrainedModel, Path]:
    folder = find_source(source).folder
    assert folder is not None, "pretrained weights have one"
    return _from_folder(folder), folder


def _tokenizer(folder: Path, *, trusted: bool = False) -> PreTrainedTokenizerBase:
    model = Model(source=str(folder), trust_remote_code=trusted)
    return load_tokenizer(model, corpus=lambda: iter(()))


def _from_folder(folder: Path, *, trusted: bool = False) -> PreTrainedModel:
    """A model as transformers loads it, but with all of its weights or not at all."""
    stored = read_headers(safetensors_files(folder))  # names the file that is missing or damaged
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trusted}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        fp8 = quantised(vars(config)) == "fp8"
        if fp8:
            check_scales(stored)
        options |= {"dtype": "auto", "use_safetensors": True, "attn_implementation": attention_for(config)}
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, output_loading_info=True, **options
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, SafetensorError) as error:
        if error.args == ("metadata",):
            raise no_metadata(folder) from None
        what = f"transformers cannot load the model: {' '.join(str(error).split())[:300]}"
        fix = "use a causal language model that transformers knows, with complete files"
        raise JobError(what, where=str(folder), fix=fix) from None
    if missing := sorted(info["missing_keys"]):
        what = f"{len(missing)} of the model's weights are not in the files, e.g. {missing[0]}"
        raise CheckpointError(what, where=str(folder), fix="download or export it again")
    check_tied(model)
    if getattr(model, "hf_quantizer", None) is None and not fp8:  # else it has unpacked what it names
        located(folder, model)
    return model.to(_device()).eval()
