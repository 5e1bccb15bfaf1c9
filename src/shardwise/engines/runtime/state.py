"""A run's state as named tensors, whatever the engine and the number of processes (decision 0060).

Each rank writes what it holds into one safetensors file, without pickle: reading one cannot run code. Of a
parameter these are `parameter/NAME` in fp32, `exp_avg/NAME`, `exp_avg_sq/NAME` and `step/NAME`; `guard/…` is
the same on all ranks, and anything else the engine's own. The header says which elements a rank has: a range
of the flattened parameter, or of the flattened part of it that tensor parallelism gives the rank.

Ranks that have what the same rank had before read their own file. Others map all files into memory and copy
the ranges they need, so that no rank ever holds more than its share.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from math import isfinite, prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint

from shardwise.engines.runtime.protocol import World
from shardwise.errors import CheckpointError
from shardwise.models import tensor_file
from shardwise.models.tensor_file import write_file
from shardwise.record.manifest import reading

KINDS = ("parameter", "exp_avg", "exp_avg_sq")  # Saved of each element of a parameter
GUARD = ("guard/stopped", "guard/loss_scale", "guard/growth")  # Of `AdamW`; the same on all ranks
CHUNK = 1 << 24  # Elements copied at a time: 64 MiB

PICKLED = "state"  # The folder of DeepSpeed's own files, which are pickles, below the engine's
ALLOWED = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""Plain values in DeepSpeed 0.19.8's files that torch does not load by itself."""
OLDER = "resume from an older checkpoint"
SAME = "resume with the strategy and the number of processes that saved it"
_SAVED_AS = dict.fromkeys(KINDS, "F32") | dict.fromkeys(("step", "guard"), "F32, I32 or I64")


class WrongValueError(CheckpointError):
    """A value that no run goes on with."""


class Cut(NamedTuple):
    """Tensor parallelism's part of a parameter: indices `first` to `end` of dimension `dim`.

    `dim` is -1 for a part that only the same part can be read from.
    """

    dim: int
    first: int
    end: int


class Part(NamedTuple):
    """Which elements of a parameter a rank holds: those from `begin` on, of the flattened cut."""

    shape: tuple[int, ...]  # Of the complete parameter
    begin: int = 0
    cut: Cut | None = None

    def place(self) -> tuple[Cut | None, int]:
        """A cut along the first dimension is a range of the complete parameter."""
        if self.cut is None or self.cut.dim != 0:
            return self.cut, self.begin
        return None, self.cut.first * prod(self.shape[1:]) + self.begin

    def size(self) -> int:
        """Elements of the cut."""
        shape = list(self.shape)
        if self.cut is not None and self.cut.dim >= 0:
            shape[self.cut.dim] = len(range(shape[self.cut.dim])[self.cut.first : self.cut.end])
        return prod(shape)


def parts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """The parts of a rank that holds complete parameters."""
    return {name: Part(tuple(tensor.shape)) for name, tensor in tensors.items()}


def save_state(
    directory: Path, world: World, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, Part]
) -> None:
    """Write this rank's tensors into an existing folder; the host needs memory for `CHUNK` elements."""
    chunks = (chunk for t in tensors.values() for chunk in t.detach().reshape(-1).split(CHUNK))
    write_file(path_of(directory, world.rank), header_of(tensors, world.size, parts), chunks)


def consolidate(directory: Path, out: Path) -> int:
    """Write a saved state into one new file, as a single process would have saved it; returns its tensors.

    No tensor is ever complete in memory.
    """
    saved = SavedState(directory)
    shapes = {f"{kind}/{name}": shape for name, shape in saved.shapes.items() for kind in KINDS}
    numbers = {key: saved.number(key) for key in (*(f"step/{name}" for name in saved.shapes), *GUARD)}
    chunks = (chunk for key, shape in shapes.items() for chunk in saved.read(key, Part(shape), prod(shape)))
    parts = {name: Part(shape) for name, shape in saved.shapes.items()}
    specs = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()} | numbers
    write_file(out, header_of(specs, 1, parts), chain(chunks, numbers.values()))
    return len(shapes)


def weights_in(directory: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
    """The complete weights of a saved state, by Hugging Face name, as an engine's `weights` gives them."""
    saved = SavedState(directory)
    for name, shape in saved.shapes.items():
        public = name.removeprefix("model.")
        full = torch.empty(shape, dtype=dtypes[public])
        saved.copy(f"parameter/{name}", Part(shape), full)
        yield public, full


def header_of(tensors: Mapping[str, torch.Tensor], ranks: int, parts: Mapping[str, Part]) -> bytes:
    """What the file of a rank begins with."""
    return tensor_file.header_of(tensors, {"layout": json.dumps({"ranks": ranks, "parts": parts})})


def load_state(
    directory: Path, world: World, live: Mapping[str, torch.Tensor], parts: Mapping[str, Part]
) -> dict[str, torch.Tensor]:
    """Copy what was saved into the tensors of `live`, as `save_state` names them.

    Returns what else this rank saved, where it has what it had then; nothing else fits another layout. Raises
    CheckpointError.
    """
    path = path_of(directory, world.rank)
    own = _File(path) if path.exists() else None
    if own is not None and own.ranks == world.size and own.holds(live, parts):
        for key, tensor in live.items():
            tensor.detach().copy_(own.checked(key, own.tensor(key)).view(tensor.shape))
        return {key: own.tensor(key) for key in own.keys - live.keys()}
    saved = SavedState(directory)
    for key, tensor in live.items():
        kind, _, name = key.partition("/")
        if kind in KINDS:
            saved.copy(key, parts[name], tensor.detach())
        elif kind not in ("step", "guard"):  # 8-bit moments, in blocks of a rank's own
            what = f"moments in 8 bits are read by the same layout only: {kind}"
            raise CheckpointError(what, where=str(directory), fix=SAME)
        else:
            tensor.detach().copy_(saved.number(key))
    return {}


class _File:
    """The file of one rank, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path, "a rank's part of the checkpoint cannot be read", OLDER):
            self._open = safe_open(path, framework="pt")
            layout = json.loads(self._open.metadata()["layout"])
            self.ranks, self.keys = int(layout["ranks"]), set(self._open.keys())
            self.parts = {
                name: Part(tuple(shape), begin, cut and Cut(*cut))
                for name, (shape, begin, cut) in layout["parts"].items()
            }
            self._check()

    def _check(self) -> None:
        """Number formats are those that the engines save, and a part has as many elements of each kind."""
        for key in self.keys:
            kind, shape, dtype = key.partition("/")[0], self.shape(key), self._open.get_slice(key).get_dtype()
            if dtype not in _SAVED_AS.get(kind, dtype):
                raise ValueError(f"{key} is stored as {dtype}, the engines save {_SAVED_AS[kind]}")
            if kind in ("step", "guard") and shape:
                raise ValueError(f"{key} has the shape {shape}, and is one number")
        for name, part in self.parts.items():
            counts = all(type(number) is int and number >= 0 for number in (*part.shape, part.begin))
            count = prod(self.shape(f"parameter/{name}"))
            for key in {f"{kind}/{name}" for kind in KINDS} & self.keys:
                if not counts or part.begin + count > part.size() or prod(self.shape(key)) != count:
                    raise ValueError(f"{key} has {prod(self.shape(key))} elements, which is not {part}")

    def checked(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """Some values of a tensor. CheckpointError where no run can have saved them."""
        kind, wrong = key.partition("/")[0], ""
        if kind in _SAVED_AS and values.numel():
            low, high = (float(end) for end in values.aminmax())  # NaN where one is
            wrong = "" if isfinite(high - low) else "that is not finite"
            if low < 0 and kind not in ("parameter", "exp_avg"):
                wrong = wrong or "below 0"
        if wrong:
            raise WrongValueError(f"{key} has a value {wrong}", where=str(self._path), fix=OLDER)
        return values

    def tensor(self, key: str) -> torch.Tensor:
        """A tensor on the CPU; its bytes are read when they are used."""
        with reading(self._path, f"{key} cannot be read", OLDER):
            found: torch.Tensor = self._open.get_tensor(key)
        return found

    def shape(self, key: str) -> list[int]:
        found: list[int] = self._open.get_slice(key).get_shape()
        return found

    def holds(self, live: Mapping[str, torch.Tensor], parts: Mapping[str, Part]) -> bool:
        """Whether it has exactly these elements."""
        if not live.keys() <= self.keys or self.parts != dict(parts):
            return False
        return all(prod(self.shape(key)) == tensor.numel() for key, tensor in live.items())


class _Piece(NamedTuple):
    """Elements `begin` to `end` of a flattened parameter, or of a flattened cut."""

    begin: int
    end: int
    file: _File


class SavedState:
    """The state in a folder, as named tensors that any range can be read from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = [_File(path) for path in sorted(directory.glob("rank-*.safetensors"))]
        ranks = max((file.ranks for file in self._files), default=1)
        if len(self._files) != ranks:
            fix = "bring the files of all nodes together in one folder (docs/several-machines.md)"
            raise self._error(f"there are the files of {len(self._files)} ranks, and {ranks} have saved", fix)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, dict[Cut | None, list[_Piece]]] = {}
        for file in self._files:
            for name, part in file.parts.items():
                if self.shapes.setdefault(name, part.shape) != part.shape:
                    raise self._error(f"its ranks have other shapes of {name}")
                cut, begin = part.place()
                piece = _Piece(begin, begin + prod(file.shape(f"parameter/{name}")), file)
                self._pieces.setdefault(name, {}).setdefault(cut, []).append(piece)

    def _error(self, what: str, fix: str = "") -> CheckpointError:
        return CheckpointError(what, where=str(self.directory), fix=fix or OLDER)

    def number(self, key: str) -> torch.Tensor:
        """What every rank that has it has saved the same."""
        found = next((file for file in self._files if key in file.keys), None)
        if found is None:
            raise self._error(f"the checkpoint has no {key}")
        return found.checked(key, found.tensor(key))

    def copy(self, key: str, part: Part, into: torch.Tensor) -> None:
        """Fill a tensor with its part of `key`, `kind/name`. CheckpointError where that is not there."""
        name = key.partition("/")[2]
        if self.shapes.get(name) != part.shape:
            has = self.shapes.get(name, "not there")
            raise self._error(
                f"{name} has the shape {part.shape} in this model, and is {has} in the checkpoint"
            )
        flat = into.contiguous().view(-1)  # a copy, where it is not
        at = 0
        for chunk in self.read(key, part, flat.numel()):
            flat[at : at + len(chunk)].copy_(chunk)
            at += len(chunk)
        if not into.is_contiguous():
            into.copy_(flat.view(into.shape))

    def read(self, key: str, part: Part, count: int) -> Iterator[torch.Tensor]:
        """The elements of a part, in pieces of about `CHUNK`."""
        cut, begin = part.place()
        if cut is None or cut in self._pieces[key.partition("/")[2]]:
            for at in range(begin, begin + count, CHUNK):
                yield self._range(key, cut, at, min(at + CHUNK, begin + count))
            return
        if cut.dim < 0:
            raise self._error(f"this part of {key} can be read only where the same part was saved", SAME)
        row, inner = prod(part.shape[cut.dim :]), prod(part.shape[cut.dim + 1 :])
        own = (cut.end - cut.first) * inner  # elements of a row in the cut
        end, rows = begin + count, max(1, CHUNK // row)
        for first in range(begin // own, -(-end // own), rows):
            last = min(first + rows, -(-end // own))
            full = self._range(key, None, first * row, last * row).view(last - first, row)
            mine = full[:, cut.first * inner : cut.end * inner].reshape(-1)
            yield mine[max(0, begin - first * own) : end - first * own]

    def _range(self, key: str, cut: Cut | None, begin: int, end: int) -> torch.Tensor:
        """Elements `begin` to `end` of a flattened parameter, or of a flattened cut that was saved."""
        pieces = self._pieces[key.partition("/")[2]]
        if cut not in pieces:
            return self._joined(key, begin, end)
        out, at = [torch.empty(0)], begin
        while at < end:
            found = max((p for p in pieces[cut] if p.begin <= at), key=lambda p: p.end, default=None)
            if found is None or found.end <= at:
                raise self._error(f"no rank has saved element {at} of {key}")
            last = min(end, found.end)
            values = found.file.tensor(key).reshape(-1)[at - found.begin : last - found.begin]
            out.append(found.file.checked(key, values))
            at = last
        return out[-1] if len(out) <= 2 else torch.cat(out)

    def _joined(self, key: str, begin: int, end: int) -> torch.Tensor:
        """The same where only cuts were saved: their rows side by side."""
        name = key.partition("/")[2]
        cuts, shape = sorted(cut for cut in self._pieces[name] if cut), self.shapes[name]
        dim, borders = cuts[0].dim, [0, *(cut.end for cut in cuts)]
        tiled = [cut.first for cut in cuts] == borders[:-1] and borders[-1] == shape[dim]
        if dim < 0 or cuts[-1].dim != dim or not tiled:
            raise self._error(f"the parts of {name} under tensor parallelism cannot be joined", SAME)
        row, inner = prod(shape[dim:]), prod(shape[dim + 1 :])
        first, last = begin // row, -(-end // row)
        full = torch.empty(last - first, row)
        for cut in cuts:
            own = (cut.end - cut.first) * inner
            mine = self._range(key, cut, first * own, last * own)
            full[:, cut.first * inner : cut.end * inner] = mine.view(last - first, own)
        return full.view(-1)[begin - first * row : end - first * row]


def path_of(directory: Path, rank: int) -> Path:
    """The file of a rank."""
    return directory / f"rank-{rank:05d}.safetensors"


def check_pickles(folder: Path) -> None:
    """Raise CheckpointError where DeepSpeed's own files name code that they need not (decision 0061)."""
    for path in sorted(folder.rglob("*.pt")):
        try:
            named = set(get_unsafe_globals_in_checkpoint(path)) - ALLOWED
            what = f"it would call {', '.join(sorted(named))} when it is loaded"
        except Exception as error:  # noqa: BLE001 - a file by somebody else
            named, what = {""}, f"it is no file that torch.save has written ({type(error).__name__}: {error})"
        if named:
            raise CheckpointError(
                what, where=str(path), fix=f"{OLDER}; --trust-checkpoint loads it all the same"
            )
