"""A published model's weights, read by name from safetensors files; all are found before any is read."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from shardwise.errors import CheckpointError, Problem
from shardwise.models.quiet import quiet
from shardwise.models.source import safetensors_files
from shardwise.models.structure import tensor_names

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 8


@dataclass(frozen=True)
class _Stored:
    file: Path
    shape: list[int]


def open_weights(
    folder: Path, skeleton: PreTrainedModel, *, dtype: torch.dtype
) -> SafetensorsWeights | ConvertedWeights:
    """The weights in `folder` for `skeleton`, the model on the meta device without adapters."""
    files = safetensors_files(folder)
    if get_model_conversion_mapping(skeleton, add_legacy=False):
        return ConvertedWeights(folder, skeleton, dtype=dtype)
    return SafetensorsWeights(files, skeleton)


class SafetensorsWeights:
    """Reads each tensor when it is asked for."""

    def __init__(self, files: Sequence[Path], skeleton: PreTrainedModel) -> None:
        """Compares the files' headers with the model.

        Raises:
            CheckpointError: a file is damaged, a tensor is missing or has another shape.
        """
        stored = _read_headers(files)
        wanted = tensor_names(skeleton)
        rename = _file_names(list(wanted), stored, skeleton.base_model_prefix)
        self._keys: dict[str, list[str]] = {}
        self._stored = stored
        problems = []
        for name, all_names in wanted.items():
            keys = [key for key in map(rename, all_names) if key in stored]
            shape = list(skeleton.get_parameter_or_buffer(name).shape)
            self._keys[name] = keys
            if not keys:
                problems.append(Problem(what=f"{name} of shape {shape} is missing"))
            problems += [
                Problem(what=f"{key} has the shape {stored[key].shape}, the model wants {shape}")
                for key in keys
                if stored[key].shape != shape
            ]
        if problems:
            raise _mismatch(problems, files[0].parent)
        ignored = skeleton._keys_to_ignore_on_load_unexpected or ()
        used = {key for keys in self._keys.values() for key in keys}
        self.unused = tuple(
            key
            for key in sorted(stored.keys() - used)
            if not any(re.search(pattern, key) for pattern in ignored)
        )
        """Tensors of the files that the model has no place for."""

    def read(self, names: Sequence[str], device: torch.device) -> Mapping[str, torch.Tensor]:
        """The tensors in the files' dtype. Raises CheckpointError where tied weights differ in the files."""
        by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
        for name in names:
            for key in self._keys[name]:
                by_file[self._stored[key].file].append((name, key))
        found: dict[str, torch.Tensor] = {}
        for file, wanted in by_file.items():
            with safe_open(file, framework="pt") as tensors:
                for name, key in wanted:
                    tensor = tensors.get_tensor(key)
                    if name in found:
                        _check_tied(found[name], tensor, key, self._keys[name][0])
                    else:
                        # a copy: what safetensors returns on the CPU may still be the file's pages
                        found[name] = tensor.to(device, copy=True)
        return found

    def release(self) -> None:
        """Nothing is kept: files are opened again."""


class ConvertedWeights:
    """Weights whose files name or cut the tensors differently than the model does (mixtures of experts, ...).

    transformers converts them while it loads the whole model into host memory, in every process.
    """

    unused: tuple[str, ...] = ()

    def __init__(self, folder: Path, skeleton: PreTrainedModel, *, dtype: torch.dtype) -> None:
        self._folder = folder
        self._skeleton = skeleton
        self._dtype = dtype
        self._state: dict[str, torch.Tensor] | None = None

    def read(self, names: Sequence[str], device: torch.device) -> Mapping[str, torch.Tensor]:
        """The tensors in the model's dtype."""
        if self._state is None:
            self._state = self._load()
        return {name: self._state[name].to(device, copy=True) for name in names}

    def release(self) -> None:
        self._state = None

    def _load(self) -> dict[str, torch.Tensor]:
        logger.info("transformers converts the weights of %s in host memory", self._folder)
        with quiet():
            model, info = type(self._skeleton).from_pretrained(
                self._folder,
                dtype=self._dtype,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, with all the others
                output_loading_info=True,
            )
        problems = [Problem(what=f"{name} is missing") for name in sorted(info["missing_keys"])]
        problems += [
            Problem(what=f"{name} has the shape {list(found)}, the model wants {list(wanted)}")
            for name, found, wanted in sorted(info["mismatched_keys"])
        ]
        if problems:
            raise _mismatch(problems, self._folder)
        return model.state_dict()


def _read_headers(files: Sequence[Path]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  (it is no dictionary)
                    stored[key] = _Stored(file, tensors.get_slice(key).get_shape())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the weights cannot be read: {error}", where=str(file), fix="download or copy the file again"
            ) from None
    return stored


def _file_names(names: Sequence[str], stored: Mapping[str, object], base: str) -> Callable[[str], str]:
    """From a name in the model to the files', which may lack the base model's prefix or have it twice."""
    prefix = f"{base}."
    ways: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: name.removeprefix(prefix),
        lambda name: prefix + name,
    ]
    return max(ways, key=lambda way: sum(way(name) in stored for name in names))


def _check_tied(first: torch.Tensor, second: torch.Tensor, key: str, first_key: str) -> None:
    if not torch.equal(first, second.to(first.device)):
        raise CheckpointError(
            f"the config ties {key} to {first_key}, and the file holds two different tensors",
            where=key,
            fix="set tie_word_embeddings to false in the model's config.json",
        )


def _mismatch(problems: list[Problem], folder: Path) -> CheckpointError:
    shown = problems[:SHOWN_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(Problem(what=f"and {len(problems) - len(shown)} more"))
    shown[-1] = Problem(
        what=shown[-1].what, where=str(folder), fix="use the config.json that belongs to these weights"
    )
    return CheckpointError("the files do not hold this model's weights", problems=shown)
