"""Find a model's source: a folder, a hub repository, or a shape of the catalog; refuse unsafe ones."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub
from huggingface_hub import snapshot_download

from shardwise.errors import CheckpointError, JobError, MachineError
from shardwise.job.paths import alike
from shardwise.job.schema import Model
from shardwise.models.catalog import MODEL_FILES, Shape, did_you_mean, lookup, unknown

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files of a tokenizer; `tokenizer*` includes its tokenizer_config.json."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The config, and for pretrained models the weights, on this machine."""

    description: str
    """For people: the source and its place."""
    config: dict[str, Any]
    """Content of the config.json."""
    folder: Path | None
    """Folder with the files; None for a shape of the catalog."""


def find_source(model: Model) -> Source:
    """Find the model's config and files, downloaded where necessary.

    A folder takes precedence over a name; with random weights a name of the catalog needs no network. Raises
    JobError where there is no such model or its config is refused, MachineError where the hub is needed and
    cannot be reached.
    """
    shape = lookup(model.source)
    folder = Path(model.source)
    if folder.is_dir():
        source = _from_folder(folder, str(folder))
    elif model.weights == "random" and shape is not None:
        description = f"the shape {shape.name}, known without network"
        return Source(description=description, config=shape.hf_config(), folder=None)
    else:
        repository = _repository(model.source, shape)
        source = _from_folder(_download_model(model, repository), f"{repository} on the hub")
    other = source.config.get("transformers_weights")
    if model.weights == "pretrained" and other not in (None, _SINGLE):
        where, fix = f"{source.folder}/config.json", f"name the file {_SINGLE}, and remove the key"
        raise JobError(f"transformers_weights names another file, {other!r}", where=where, fix=fix)
    if not model.trust_remote_code:
        _refuse_private_keys(source.config, f"{source.folder}/config.json")
    return source


def safetensors_files(folder: Path) -> list[Path]:
    """List the files that hold the weights.

    Raises JobError where there is none, or only pickled ones; CheckpointError where their index is damaged.
    """
    if (folder / _SINGLE).is_file():  # before an index, as transformers takes them
        return [folder / _SINGLE]
    index_file = folder / _INDEX
    if index_file.is_file():
        try:
            index = json.loads(index_file.read_text(encoding="utf-8"))
            return [folder / name for name in sorted(set(index["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"the index of the weights cannot be read ({type(error).__name__})"
            fix = "download or copy the file again"
            raise CheckpointError(what, where=str(index_file), fix=fix) from None
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    found = f"only {pickles[0]}, which can run code when it is read" if pickles else "no weights"
    what = f"there is no {_SINGLE} and no {_INDEX}: {found}"
    fix = "convert the weights to safetensors (save_pretrained does), or train from weights: random"
    raise JobError(what, where=f"model.source: {folder}", fix=fix)


def download(
    repository: str, patterns: list[str], *, revision: str | None, where: str, offline_fix: str
) -> Path:
    """Download the files of a hub repository that match `patterns`, or find them in the cache.

    Raises JobError where there is no such repository or revision, or the account has no access;
    MachineError where the hub cannot be reached and the files are not in the cache.
    """
    copies = ["*/*", "consolidated*"]  # of the weights, in other formats
    wanted: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": copies}
    try:
        return Path(snapshot_download(repository, revision=revision, **wanted))
    except hub.GatedRepoError:
        what = f"{repository} asks for its licence to be accepted first"
        fix = f"accept it on https://huggingface.co/{repository}, and set HF_TOKEN"
        raise JobError(what, where=where, fix=fix) from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        what = f"there is no folder, hub repository or known shape {repository!r}"
        raise JobError(what, where=where, fix=did_you_mean(repository)) from None
    except hub.RevisionNotFoundError:
        what = f"{repository} has no revision {revision!r}"
        raise JobError(what, where="model.revision", fix="name a commit, tag or branch of it") from None
    # HTTPError is of the HTTP library that this version of the hub's client uses
    except (hub.EntryNotFoundError, OSError, hub.HTTPError) as error:  # type: ignore[attr-defined]
        what = f"{repository} is not on this machine, and the hub cannot be reached ({type(error).__name__})"
        folder = alike(repository, MODEL_FILES)
        hint = f"did you mean the folder {folder}? Else " if folder else ""
        fix = f"{hint}{offline_fix}; or set HTTPS_PROXY, or HF_ENDPOINT to a mirror"
        raise MachineError(what, where=where, fix=fix) from None


def _repository(name: str, shape: Shape | None) -> str:
    """Return the hub id of a catalog name; any other name is one itself."""
    if shape is None or name.count("/") == 1:
        if error := unknown(name):
            raise error
        return name
    if shape.hub is None:
        what = f"{shape.name} is a shape; no weights of it are published"
        raise JobError(what, where="model.weights", fix="set weights: random")
    return shape.hub


def _download_model(model: Model, repository: str) -> Path:
    patterns = ["config.json", "generation_config.json", *TOKENIZER_FILES]
    if model.weights == "pretrained":
        patterns += ["*.safetensors", "*.safetensors.index.json"]
    if model.trust_remote_code:
        patterns += ["*.py"]
    fix = "download it once where there is a network and name the folder"
    fix += " (shardwise init --models lists shapes that need none)"
    if lookup(repository) is not None:
        fix += ", or train its shape from weights: random"
    return download(repository, patterns, revision=model.revision, where="model.source", offline_fix=fix)


def _from_folder(folder: Path, description: str) -> Source:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except FileNotFoundError:
        fix = "name a folder that save_pretrained wrote"
        raise JobError("the folder has no config.json", where=f"model.source: {folder}", fix=fix) from None
    except (OSError, ValueError) as error:
        what = f"the config cannot be read: {error}"
        raise JobError(what, where=str(path), fix="restore the file") from None
    if not isinstance(config, dict) or "model_type" not in config:
        what = "the config does not name its architecture"
        raise JobError(what, where=str(path), fix="add its model_type")
    return Source(description=description, config=config, folder=folder)


def _number(value: dict[str, Any]) -> Any:
    """An infinite number or NaN, which transformers writes as an object; other objects as they are."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _refuse_private_keys(config: dict[str, Any], where: str) -> None:
    """Refuse keys that made transformers run code without permission (CVE-2026-4372, CVE-2026-5241)."""
    for key, value in config.items():
        if key == "trust_remote_code" or (key.startswith("_") and key.endswith("_internal")):
            what = f"the config sets {key!r}, which can make transformers run foreign code"
            raise JobError(what, where=where, fix=f"remove {key!r} from the file if you trust the rest of it")
        if isinstance(value, dict):
            _refuse_private_keys(value, where)
