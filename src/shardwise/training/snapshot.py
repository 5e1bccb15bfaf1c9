"""Saves and restores the full state of a run: engine, weights for export, generators, data position.

A checkpoint belongs to this run where the job is the same. Its state is named tensors, which every strategy
and number of processes reads (decision 0060); DeepSpeed's own files need those that wrote them.
"""

import base64
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.loader import BatchStream
from shardwise.engines import strategy_flag
from shardwise.engines.runtime.host_copy import HostCopy
from shardwise.engines.runtime.protocol import Engine
from shardwise.engines.runtime.state import OLDER, PICKLED, WrongValueError, check_pickles, weights_in
from shardwise.errors import CheckpointError, DivergedError, Problem, what_of
from shardwise.job.identity import longer
from shardwise.job.load import differences
from shardwise.job.schema import Model, Optimizer
from shardwise.models.fingerprint import other_base
from shardwise.record.manifest import Manifest, Origin, read_json, reading
from shardwise.record.read import EVENTS, read_events
from shardwise.strategy import Strategy
from shardwise.training.checkpoint import Checkpoint, CheckpointStore
from shardwise.training.loop import START_AGAIN
from shardwise.training.saving import Progress
from shardwise.units import processes


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """Saves and restores one run. All of it is collective."""

    store: CheckpointStore
    origin: Origin
    engine: Engine
    stream: BatchStream
    write_weights: Callable[[Path, Iterable[tuple[str, torch.Tensor]]], None]
    weight_dtypes: Mapping[str, torch.dtype]  # Of the trained weights, by name
    copy: HostCopy  # For `stage`
    total_steps: int
    resume_from: int | None = None  # The step of the checkpoint to go on from; None: of the newest
    trusted: bool = False  # Load pickles whatever they name

    def save(self, progress: Progress) -> int:
        """Commit a checkpoint of `progress.step`; returns its bytes."""
        write_position = self._position(progress)

        def write(folder: Path) -> None:
            write_position(folder)
            self.engine.save(folder / "engine")
            self.write_weights(folder / "model", self.engine.weights())

        return self._commit(progress.step, write)

    def stage(self, progress: Progress) -> Callable[[], int]:
        """Copy what `save` would write. The returned function does what is left of it, in any thread."""
        state, copy, step = self.engine.named_state(), self.copy, progress.step
        assert state is not None
        write_position = self._position(progress)
        copy.take(*state)

        def write(folder: Path) -> None:
            write_position(folder)
            copy.write(folder / "engine")

        def write_weights(folder: Path) -> None:
            """Once all ranks' files are there, they hold the weights, and no GPU is asked for them."""
            found = weights_in(folder / "engine", self.weight_dtypes) if self.engine.world.rank == 0 else ()
            try:
                self.write_weights(folder / "model", found)
            except WrongValueError as error:  # not damage: it was written just now
                raise DivergedError(what_of(error), where=f"step {step}", fix=START_AGAIN) from None

        return lambda: self._commit(step, write, write_weights)

    def _commit(self, step: int, *writes: Callable[[Path], None]) -> int:
        return self.store.save(step, *writes, origin=self.origin).manifest.size_bytes

    def restore(self) -> Progress:
        """Load the newest sound checkpoint; the beginning where none was ever saved.

        CheckpointError where it is another job's, or what was saved is gone.
        """
        found = self.store.latest(only=self.resume_from)
        if found is None and self.resume_from is None:
            return self._beginning()
        if found is None:
            raise CheckpointError(f"step {self.resume_from} is not there", where=str(self.store.folder))
        world, engine = self.engine.world, found.path / "engine"
        if world.rank == 0:
            found.warn_of_damaged()
        named, where = not (engine / PICKLED).is_dir(), str(found.path)
        with reading(found.path, "its manifest cannot be used", OLDER):
            check_origin(found.manifest, self.origin, where=where, named=named)
        if not (named or self.trusted):
            check_pickles(engine)
        state = load_state(found.path)
        if state.step != found.step:
            what = f"it is said to be of step {found.step}, and its state is of step {state.step}"
            raise CheckpointError(what, where=where, fix="remove it: an older one is used then")
        if state.total_steps != self.total_steps and world.rank == 0:
            text = f"the run was {state.total_steps} steps long, and is now {self.total_steps}: the learning "
            print(f"{text}rates of its other steps follow from that", file=sys.stderr, flush=True)
        self._check_position(state, found.path)
        self.engine.load(engine)
        self.stream.load_state_dict(dict(state.data))
        with reading(found.path, "its manifest cannot be used", OLDER):
            self._restore_rng(found)
        if self.resume_from is not None:
            self.store.set_aside(found.step)
        return Progress(step=state.step, tokens=state.tokens, target_tokens=state.target_tokens)

    def _check_position(self, state: "TrainerState", folder: Path) -> None:
        """Every step takes `global_batch` rows: CheckpointError where the data goes on elsewhere."""
        epoch, row = 0, state.step * self.stream.global_batch
        while row > (rows := self.stream.rows_per_epoch(epoch)):
            epoch, row = epoch + 1, row - rows
        if dict(state.data) != {"epoch": epoch, "row": row}:
            what = f"its data is at {dict(state.data)}, step {state.step} ended at epoch {epoch}, row {row}"
            raise CheckpointError(what, where=str(folder / NAME), fix=OLDER)

    def _restore_rng(self, found: Checkpoint) -> None:
        """Each share of the rows goes on with its generators; shared among others, with new ones."""
        world, origin = self.engine.world, found.manifest.origin
        if int(origin.strategy["data_parallel"]) != world.data_size:
            seed_rng(zlib.crc32(f"{origin.identity['seed']} {found.step} {world.data_rank}".encode()))
            return
        alike = _place(origin) == _place(self.origin)
        rank = world.rank if alike else world.data_rank * int(origin.strategy["tensor_parallel"])
        load_rng(found.path, rank=rank, device=world.device)

    def _beginning(self) -> Progress:
        """Where a run goes on that ended before its first checkpoint."""
        events = self.store.folder.parent / EVENTS
        found = read_events(events) if events.exists() else ()
        saved = [one["step"] for one in found if one["kind"] == "save"]
        if saved:
            what = f"the run has saved step {saved[-1]}, and no checkpoint is there"
            fix = "restore it from a copy, or start again under another name"
            raise CheckpointError(what, where=str(self.store.folder), fix=fix)
        if self.engine.world.rank == 0:
            print("nothing was saved yet: the run begins again with step 1", file=sys.stderr, flush=True)
        return Progress()

    def _position(self, progress: Progress) -> Callable[[Path], None]:
        """What writes where the training is now, without the engine's state; its folder is made, too."""
        world, rng = self.engine.world, rng_state(self.engine.world.device)
        data = self.stream.state_dict()
        state = TrainerState(**vars(progress), total_steps=self.total_steps, data=data)

        def write(folder: Path) -> None:
            (folder / "engine").mkdir(exist_ok=True)
            (folder / f"rng-rank{world.rank}.json").write_text(rng)
            if world.rank == 0 or (world.local_disks and world.local_rank == 0):
                save_state(folder, state)

        return write


def check_origin(manifest: Manifest, expected: Origin, *, where: str, named: bool = True) -> None:
    """Raises CheckpointError naming every field in which the checkpoint is not this run's.

    `named`: its state is named tensors; otherwise only the same strategy and number of processes load it.
    """
    saved = manifest.origin
    problems = _differences(saved.identity, expected.identity)
    if not named and _place(saved) != _place(expected):
        what = f"saved by {_place(saved)} in DeepSpeed's own files, and this run is {_place(expected)}"
        flag = strategy_flag(Strategy.from_json(saved.strategy))
        problems.append(Problem(what=what, fix=f"resume with {flag} --processes {saved.world_size}"))
    if problems:
        raise CheckpointError(f"{where} cannot be resumed like this", problems=problems)


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """A problem for each field that differs; fields that an older checkpoint lacks are skipped.

    Where the content is the same, its origin does not count: a branch that has moved may be replaced by its
    commit, and a template that writes the date by one with the date in it.
    """
    skipped = {"micro_batch"}  # older checkpoints name it; it changes a step by rounding only (decision 0024)
    skipped |= {key for key in ("steps", "epochs") if longer(key, then.get(key), now.get(key))}
    problems = []
    if "tokens" in then and then["tokens"] == now.get("tokens"):
        skipped.add("data")
    elif "tokens" not in then or then.get("data") != now.get("data"):
        skipped.add("tokens")  # not known, or reported as other data
    if "tokenizer" not in then:
        skipped.add("tokenizer")
    old_base, new_base = then.get("base"), now.get("base")
    if old_base and new_base:
        if old_base["sha256"] == new_base["sha256"]:
            skipped.add("model.revision")
        else:
            problems.append(other_base(old_base, new_base, source=now["model"]["source"]))
    sides = ({**side, **_with_later_keys(side)} for side in (then, now))
    then, now = ({key: value for key, value in side.items() if key != "base"} for side in sides)
    found = differences(then, now)
    return problems + [_problem(key, old, new) for key, old, new in found if key not in skipped]


def _with_later_keys(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of the job with the defaults of keys that an older version did not write."""
    return {
        name: section.model_validate_json(json.dumps(identity[name])).model_dump(mode="json")
        for name, section in (("model", Model), ("optimizer", Optimizer))
        if name in identity
    }


def _problem(key: str, then: object, now: object) -> Problem:
    what, where, fix = f"{key} is {_short(now)}, the checkpoint's is {_short(then)}", "", "set it back"
    if key == "data":  # a hash of content: no value to show
        what = "the content of the data, or how it becomes tokens, is not the checkpoint's"
        where = "data.train, data.eval, data.split, data.chat_template, model.tokenizer"
        fix = "restore the files as they were"
    elif key == "tokenizer":
        what, where = "the tokenizer's files are not the checkpoint's", "model.tokenizer, model.source"
        fix = "restore the files as they were"
    elif key == "tokens":
        what = "the same files and settings give other tokens than the checkpoint was trained on"
        where = "data.chat_template, or the versions of transformers and tokenizers"
        fix = (
            "set SHARDWISE_CACHE to the folder with the run's own tokens; where the template writes the date "
        )
        fix += "(strftime_now), name a copy with the day's date in data.chat_template;"
        return Problem(what=what, where=where, fix=f"{fix} or start a run under another name")
    return Problem(what=what, where=where, fix=f"{fix}, or start a run under another name")


def _place(origin: Origin) -> str:
    return f"{origin.strategy.get('name')} on {processes(origin.world_size)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


NAME = "state.json"
_NUMPY = ("bit_generator", "key", "pos", "has_gauss", "gauss")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that is the same on all ranks. The learning rate follows from `step` and `total_steps`."""

    step: int
    total_steps: int
    tokens: int  # Trained on so far, without padding
    target_tokens: int
    data: Mapping[str, Any]  # The loader's own position
    best: int | None = None  # As `Progress.best`, before the evaluation of this step


def save_state(folder: Path, state: TrainerState) -> None:
    """Write `state.json`."""
    (folder / NAME).write_text(json.dumps(asdict(state), indent=1) + "\n")


def load_state(folder: Path) -> TrainerState:
    """Read `state.json`; CheckpointError where it is missing or not one of this version."""
    fix = f"resume with the version of shardwise that saved it, or {OLDER}"
    with reading(folder / NAME, "the trainer's state cannot be read", fix):
        state = TrainerState(**read_json(folder / NAME))
        counts = (state.step, state.total_steps, state.tokens, state.target_tokens, state.best or 0)
        if any(type(n) is not int or n < 0 for n in (*counts, state.data["epoch"], state.data["row"])):
            raise ValueError("a count is no integer, or is negative")
        return state


def rng_state(device: torch.device) -> str:
    """This rank's random number generators (python, numpy, torch, the GPU's): `rng-rank0.json`."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()  # typed as either of two forms
    kind, key, *position = numpy_state
    state = {
        "python": [version, list(words), gauss],
        "numpy": dict(zip(_NUMPY, (kind, key.tolist(), *position), strict=True)),
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }
    return json.dumps(state)


def load_rng(folder: Path, *, rank: int, device: torch.device) -> None:
    """Restore the generators of `rng_state`. CheckpointError where it cannot."""
    path = folder / f"rng-rank{rank}.json"
    fix = "resume on the same kind of device and with the same versions of torch and numpy"
    with reading(path, "the state of the random number generators cannot be restored", fix):
        _restore(read_json(path), device)


def seed_rng(seed: int) -> None:
    """Seed this process's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _restore(state: dict[str, Any], device: torch.device) -> None:
    if (state["cuda"] is not None) != (device.type == "cuda"):
        raise ValueError(f"saved {'with' if state['cuda'] else 'without'} a GPU, this is {device.type}")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, key, *position = (state["numpy"][name] for name in _NUMPY)
    np.random.set_state((kind, np.array(key, dtype=np.uint32), *position))
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
