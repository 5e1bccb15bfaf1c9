"""A published model's weights, read by name from safetensors files; all are located before any is read."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging as transformers_logging

from shardwise.errors import CheckpointError, Problem
from shardwise.models import mxfp4
from shardwise.models.source import safetensors_files
from shardwise.models.structure import tensor_names
from shardwise.models.weights import WeightSource

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 8
_OTHER_CONFIG = "use the config.json that belongs to these weights"
_FLOATS = re.compile("B?F16|F32|F64|F8_E[45]M.*")
"""The format's names of dtypes that weights may have."""


class _Stored(NamedTuple):
    file: Path
    shape: list[int]
    dtype: str
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
        self._stored = stored = _with_unpacked(read_headers(files))
        wanted = tensor_names(skeleton)
        rename = _file_names(list(wanted), stored, skeleton.base_model_prefix)
        self._keys: dict[str, list[str]] = {}
        problems, misfits = [], []
        for name, all_names in wanted.items():
            keys = self._keys[name] = [key for key in map(rename, all_names) if key in stored]
            shape = list(skeleton.get_parameter_or_buffer(name).shape)
            if not keys:
                problems.append(f"{name} of shape {shape} is missing")
                misfits += [wrong for key in map(rename, all_names) if (wrong := _misfit(key, stored))]
            found = {key: stored[key].shape for key in keys}
            problems += [_misshapen(key, has, shape) for key, has in found.items() if has != shape]
        if problems:
            fix = "download or copy the files again" if misfits else _OTHER_CONFIG
            raise _mismatch(misfits or problems, files[0].parent, fix=fix)
        used = {key: name for name, keys in self._keys.items() for key in keys}
        _check_numbers(stored, used, skeleton, files[0].parent)
        ignored = skeleton._keys_to_ignore_on_load_unexpected or ()
        unused = sorted(stored.keys() - used.keys())
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
                        raise _untied(key, self._keys[name][0])
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
        stored, places = located(self._folder, self._skeleton)
        try:
            with quiet():
                model, info = type(self._skeleton).from_pretrained(
                    self._folder,
                    dtype=self._dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # reported below, with all the others
                    output_loading_info=True,
                )
        except KeyError as error:
            if error.args != ("metadata",):
                raise
            raise no_metadata(self._folder) from None
        except RuntimeError as error:
            if "conversion" not in str(error):
                raise
            raise _mismatch(_uneven(stored, places), self._folder) from None
        problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
        problems += [_misshapen(*mismatch) for mismatch in sorted(info["mismatched_keys"])]
        if problems:
            raise _mismatch(problems, self._folder)
        check_tied(model)
        return dict(model.state_dict())


def check_tied(loaded: PreTrainedModel) -> None:
    """Raise CheckpointError where the config ties what differs: transformers leaves that apart."""
    for name, first in loaded.get_expanded_tied_weights_keys(all_submodels=True).items():
        if loaded.get_parameter_or_buffer(name) is not loaded.get_parameter_or_buffer(first):
            raise _untied(name, first)


def located(
    folder: Path, model: PreTrainedModel
) -> tuple[Mapping[str, _Stored], Mapping[str, tuple[str, str | None]]]:
    """What a folder's files hold, and what of a model transformers makes of each, see `_places`.

    Raises CheckpointError where that is not what the model's values are made of.
    """
    stored = read_headers(safetensors_files(folder))
    places = _places(stored, model)
    _check_numbers(stored, {key: name for key, (name, _) in places.items()}, model, folder)
    return stored, places


def _places(keys: Iterable[str], skeleton: PreTrainedModel) -> dict[str, tuple[str, str | None]]:
    """By a tensor of the files: the model's that transformers makes of it, and the pattern that says so."""
    rules = get_model_conversion_mapping(skeleton)
    kinds = (core_model_loading.WeightRenaming, core_model_loading.WeightConverter)
    split = [[rule for rule in rules if isinstance(rule, kind)] for kind in kinds]
    model = skeleton.state_dict()
    places = {}
    for key in sorted(keys, key=core_model_loading.dot_natural_key):
        place = core_model_loading.rename_source_key(key, *split, skeleton.base_model_prefix, model)
        if place[0] in model or key in model:
            places[key] = place if place[0] in model else (key, None)
    return places


def no_metadata(folder: Path) -> CheckpointError:
    """For an index of shards that transformers is to read, which stops with a KeyError."""
    what, fix = 'transformers needs "metadata" in the index', 'add it to the file: "metadata": {}'
    return CheckpointError(what, where=f"{folder}: *.index.json", fix=fix)


def _uneven(stored: Mapping[str, _Stored], places: Mapping[str, tuple[str, str | None]]) -> list[str]:
    """Why transformers cannot join tensors, e.g. of experts: some have another shape, or are missing."""
    parts: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    most: Counter[str] = Counter()
    for key, place in places.items():
        parts[place].append(key)
        most[place[0]] = max(most[place[0]], len(parts[place]))
    problems = []
    for (name, pattern), keys in parts.items():
        usual = Counter(tuple(stored[key].shape) for key in keys).most_common(1)[0][0]
        odd = [key for key in keys if tuple(stored[key].shape) != usual]
        problems += [_misshapen(key, stored[key].shape, usual) for key in odd]
        if len(keys) < most[name]:
            problems.append(f"{name} is made of {most[name]} tensors {pattern}, the files hold {len(keys)}")
    return problems or ["transformers cannot convert the tensors that its report names"]


def _check_numbers(
    stored: Mapping[str, _Stored], used: Mapping[str, str], skeleton: PreTrainedModel, folder: Path
) -> None:
    """Raise CheckpointError where tensors do not hold the values of the model's that `used` names."""
    odd = {key: name for key, name in used.items() if not _FLOATS.fullmatch(stored[key].dtype)}
    problems = [
        f"{key} has the dtype {stored[key].dtype}, which is no floating-point format"
        for key, name in odd.items()
        if skeleton.get_parameter_or_buffer(name).is_floating_point()
    ]
    scaled = {key.rpartition(".")[0] for key in used if stored[key].dtype.startswith("F8")}
    for key in sorted(stored.keys() - used.keys()):
        module, _, last = key.rpartition(".")
        if module in scaled and "scale" in last:
            problems.append(f"{key} scales weights in fp8, and the config does not say how")
    if problems:
        raise _mismatch(problems, folder, fix="name the model that these weights were made from")


def check_scales(stored: Mapping[str, _Stored]) -> None:
    """Raise CheckpointError for a weight in fp8 without scales, which transformers may take as it is."""
    scales: dict[str, list[str]] = defaultdict(list)
    for module, _, last in (key.rpartition(".") for key in stored):
        if "scale" in last and not last.startswith(("activation", "input")):
            scales[module].append(last)
    for key in (key for key in stored if stored[key].dtype in ("F8_E4M3", "F8_E5M2")):
        module, _, last = key.rpartition(".")
        if not any(last == "weight" or scale.startswith(last) for scale in scales[module]):
            what, fix = f"{key} is in fp8, and nothing scales it", "download or copy the files again"
            raise CheckpointError(what, where=str(stored[key].file), fix=fix)


def read_headers(files: Sequence[Path]) -> dict[str, _Stored]:
    """What files hold, by name. Raises CheckpointError, which names the file, where one cannot be read."""
    stored: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  (it is no dictionary)
                    if key in stored:
                        what = f"{key} is also in {stored[key].file.name}"
                        raise CheckpointError(what, where=str(file), fix="download or copy the files again")
                    part = tensors.get_slice(key)
                    stored[key] = _Stored(file, part.get_shape(), part.get_dtype())
        except (OSError, SafetensorError) as error:
            what = f"the weights cannot be read: {error}"
            raise CheckpointError(what, where=str(file), fix="download or copy the file again") from None
    return stored


def _with_unpacked(stored: dict[str, _Stored]) -> dict[str, _Stored]:
    """The two parts of each tensor in mxfp4 as one tensor, under its own name."""
    for blocks in [key for key in stored if key.endswith(mxfp4.BLOCKS)]:
        name = blocks.removesuffix(mxfp4.BLOCKS)
        if not _misfit(name, stored):
            file, shape, *_ = stored.pop(blocks)
            scales = stored.pop(f"{name}{mxfp4.SCALES}").file
            stored[name] = _Stored(file, mxfp4.unpacked_shape(shape), "BF16", scales)
    return stored


def _misfit(name: str, stored: Mapping[str, _Stored]) -> str:
    """Why a tensor's two parts in mxfp4 cannot be unpacked; empty where they can be, or there are none."""
    parts = blocks, scales = f"{name}{mxfp4.BLOCKS}", f"{name}{mxfp4.SCALES}"
    if stored.keys().isdisjoint(parts):
        return ""
    for key in parts:
        if key not in stored:
            return f"{key} is missing"
        if stored[key].dtype != "U8":
            return f"{key} has the dtype {stored[key].dtype}, mxfp4 needs U8"
    if mxfp4.fits(stored[blocks].shape, stored[scales].shape):
        return ""
    return f"{scales} has the shape {stored[scales].shape}, and {blocks} has {stored[blocks].shape}"


def _unpack(blocks: torch.Tensor, file: Path, key: str, device: torch.device) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        return mxfp4.unpack(blocks.to(device), tensors.get_tensor(f"{key}{mxfp4.SCALES}").to(device))


def _file_names(names: Sequence[str], stored: Mapping[str, object], base: str) -> Callable[[str], str]:
    """Map names in the model to the files', which may lack the base model's prefix or repeat it."""
    ways: list[Callable[[str], str]] = [str, lambda n: n.removeprefix(f"{base}."), lambda n: f"{base}.{n}"]
    return max(ways, key=lambda way: sum(way(name) in stored for name in names))


def _misshapen(name: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{name} has the shape {list(found)}, the model needs {list(wanted)}"


def _untied(name: str, first: str) -> CheckpointError:
    what = f"the config ties {name} to {first}, and the file holds two different tensors"
    fix = "set tie_word_embeddings to false in the model's config.json"
    return CheckpointError(what, where=name, fix=fix)


def _mismatch(problems: list[str], folder: Path, *, fix: str = _OTHER_CONFIG) -> CheckpointError:
    shown = problems[:SHOWN_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    last = Problem(what=shown[-1], where=str(folder), fix=fix)
    listed = [*(Problem(what=what) for what in shown[:-1]), last]
    return CheckpointError("the files do not hold this model's weights", problems=listed)
