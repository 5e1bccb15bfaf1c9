"""A published model's weights, read by name from safetensors files; all are located before any is read."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging as transformers_logging

from shardwise.errors import CheckpointError, Problem
from shardwise.models import mxfp4
from shardwise.models.source import safetensors_files
from shardwise.models.structure import tensor_names
from shardwise.models.weights import WeightSource

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 8


class _Stored(NamedTuple):
    file: Path
    shape: list[int]
    scales: Path | None = None
    """Where the scales are of a tensor in mxfp4, whose blocks are in `file`."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, which would break into the run's own display."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def open_weights(
    folder: Path, skeleton: PreTrainedModel, *, dtype: torch.dtype
) -> SafetensorsWeights | ConvertedWeights:
    """Open the weights in `folder` for `skeleton`, the model on the meta device without adapters."""
    files = safetensors_files(folder)
    if get_model_conversion_mapping(skeleton, add_legacy=False):
        return ConvertedWeights(folder, skeleton, dtype=dtype)
    return SafetensorsWeights(files, skeleton)


class SafetensorsWeights(WeightSource):
    """Reads each tensor on demand."""

    def __init__(self, files: Sequence[Path], skeleton: PreTrainedModel) -> None:
        """Raise CheckpointError where a file is damaged, a tensor is missing or has another shape."""
        self._stored = stored = _with_unpacked(_read_headers(files))
        wanted = tensor_names(skeleton)
        rename = _file_names(list(wanted), stored, skeleton.base_model_prefix)
        self._keys: dict[str, list[str]] = {}
        problems = []
        for name, all_names in wanted.items():
            keys = self._keys[name] = [key for key in map(rename, all_names) if key in stored]
            shape = list(skeleton.get_parameter_or_buffer(name).shape)
            if not keys:
                problems.append(f"{name} of shape {shape} is missing")
            found = {key: stored[key].shape for key in keys}
            problems += [_misshapen(key, has, shape) for key, has in found.items() if has != shape]
        if problems:
            raise _mismatch(problems, files[0].parent)
        ignored = skeleton._keys_to_ignore_on_load_unexpected or ()
        unused = sorted(stored.keys() - {key for keys in self._keys.values() for key in keys})
        self.unused = tuple(k for k in unused if not any(re.search(pattern, k) for pattern in ignored))
        """Tensors of the files that the model has no place for."""

    def read(self, names: Sequence[str], device: torch.device) -> Mapping[str, torch.Tensor]:
        """Read tensors in the files' dtype. Raises CheckpointError where tied weights differ in the files."""
        by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
        for name in names:
            for key in self._keys[name]:
                by_file[self._stored[key].file].append((name, key))
        found: dict[str, torch.Tensor] = {}
        for file, wanted in by_file.items():
            with safe_open(file, framework="pt") as tensors:
                for name, key in wanted:
                    if scales := self._stored[key].scales:
                        found[name] = _unpack(tensors.get_tensor(f"{key}{mxfp4.BLOCKS}"), scales, key, device)
                        continue
                    tensor = tensors.get_tensor(key)
                    if name not in found:
                        # a copy: what safetensors returns on the CPU may still be the file's pages
                        found[name] = tensor.to(device, copy=True)
                    elif not torch.equal(found[name], tensor.to(device)):
                        what = f"the config ties {key} to {self._keys[name][0]}, "
                        what += "and the file holds two different tensors"
                        fix = "set tie_word_embeddings to false in the model's config.json"
                        raise CheckpointError(what, where=key, fix=fix)
        return found


class ConvertedWeights(WeightSource):
    """Weights whose files name or split tensors differently than the model (mixtures of experts, ...).

    transformers converts them while it loads the entire model into host memory, in every process.
    """

    unused: tuple[str, ...] = ()

    def __init__(self, folder: Path, skeleton: PreTrainedModel, *, dtype: torch.dtype) -> None:
        self._folder, self._skeleton, self._dtype = folder, skeleton, dtype
        self._state: dict[str, torch.Tensor] | None = None

    def read(self, names: Sequence[str], device: torch.device) -> Mapping[str, torch.Tensor]:
        """Read tensors in the model's dtype."""
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
        problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
        problems += [_misshapen(*mismatch) for mismatch in sorted(info["mismatched_keys"])]
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
            what = f"the weights cannot be read: {error}"
            raise CheckpointError(what, where=str(file), fix="download or copy the file again") from None
    return stored


def _with_unpacked(stored: dict[str, _Stored]) -> dict[str, _Stored]:
    """The two parts of each tensor in mxfp4 as one tensor, under its own name."""
    for blocks in [key for key in stored if key.endswith(mxfp4.BLOCKS)]:
        name = blocks.removesuffix(mxfp4.BLOCKS)
        scales = f"{name}{mxfp4.SCALES}"
        if scales in stored and mxfp4.fits(stored[blocks].shape, stored[scales].shape):
            file, shape, _ = stored.pop(blocks)
            stored[name] = _Stored(file, mxfp4.unpacked_shape(shape), stored.pop(scales).file)
    return stored


def _unpack(blocks: torch.Tensor, file: Path, key: str, device: torch.device) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        return mxfp4.unpack(blocks.to(device), tensors.get_tensor(f"{key}{mxfp4.SCALES}").to(device))


def _file_names(names: Sequence[str], stored: Mapping[str, object], base: str) -> Callable[[str], str]:
    """Map names in the model to the files', which may lack the base model's prefix or repeat it."""
    ways: list[Callable[[str], str]] = [str, lambda n: n.removeprefix(f"{base}."), lambda n: f"{base}.{n}"]
    return max(ways, key=lambda way: sum(way(name) in stored for name in names))


def _misshapen(name: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{name} has the shape {list(found)}, the model needs {list(wanted)}"


def _mismatch(problems: list[str], folder: Path) -> CheckpointError:
    shown = problems[:SHOWN_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    last = Problem(what=shown[-1], where=str(folder), fix="use the config.json that belongs to these weights")
    listed = [*(Problem(what=what) for what in shown[:-1]), last]
    return CheckpointError("the files do not hold this model's weights", problems=listed)
