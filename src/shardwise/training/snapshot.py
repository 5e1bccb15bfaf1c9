"""Saves and restores the full state of a run: engine, weights for export, generators, data position.

A checkpoint belongs to this run where the job, the strategy and the number of processes are the same.
"""

import base64
import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.loader import BatchStream
from shardwise.engines.runtime.protocol import Engine
from shardwise.errors import CheckpointError, Problem
from shardwise.job.load import differences
from shardwise.job.schema import Model, Optimizer
from shardwise.job.strategies import NAMED
from shardwise.models.fingerprint import other_base
from shardwise.record.manifest import Manifest, Origin
from shardwise.record.read import EVENTS, read_events
from shardwise.training.checkpoint import CheckpointStore
from shardwise.training.loop import Progress
from shardwise.units import processes


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """Saves and restores one run. Both are collective."""

    store: CheckpointStore
    origin: Origin
    engine: Engine
    stream: BatchStream
    write_weights: Callable[[Path], None]
    total_steps: int

    def save(self, progress: Progress) -> int:
        """Commit a checkpoint of `progress.step`; returns its bytes."""
        self.store.best = progress.best
        saved = self.store.save(progress.step, partial(self._write, progress), origin=self.origin)
        return saved.manifest.size_bytes

    def restore(self) -> Progress:
        """Load the newest sound checkpoint; the beginning where none was ever saved.

        CheckpointError where it is another job's, or what was saved is gone.
        """
        found = self.store.latest()
        if found is None:
            return self._beginning()
        if self.engine.world.rank == 0:
            found.warn_of_damaged()
        check_origin(found.manifest, self.origin, where=str(found.path))
        state = load_state(found.path)
        if state.step != found.step:
            what = f"it is said to be of step {found.step}, and its state is of step {state.step}"
            raise CheckpointError(what, where=str(found.path), fix="remove it: an older one is used then")
        self.engine.load(found.path / "engine")
        self.stream.load_state_dict(dict(state.data))
        world = self.engine.world
        load_rng(found.path, rank=world.rank, device=world.device)
        return Progress(step=state.step, tokens=state.tokens, target_tokens=state.target_tokens)

    def _beginning(self) -> Progress:
        """Where a run goes on that ended before its first checkpoint."""
        events = self.store.folder.parent / EVENTS
        saved = (
            [one["step"] for one in read_events(events) if one["kind"] == "save"] if events.exists() else []
        )
        if saved:
            what = f"the run has saved step {saved[-1]}, and no checkpoint is there"
            fix = "restore it from a copy, or start again under another name"
            raise CheckpointError(what, where=str(self.store.folder), fix=fix)
        if self.engine.world.rank == 0:
            print("nothing was saved yet: the run begins again with step 1", file=sys.stderr, flush=True)
        return Progress()

    def _write(self, progress: Progress, folder: Path) -> None:
        """This rank's part of a checkpoint."""
        world = self.engine.world
        engine = folder / "engine"
        engine.mkdir(exist_ok=True)
        self.engine.save(engine)
        self.write_weights(folder / "model")
        save_rng(folder, rank=world.rank, device=world.device)
        if world.rank == 0 or (world.local_disks and world.local_rank == 0):
            data = self.stream.state_dict()
            save_state(folder, TrainerState(**vars(progress), total_steps=self.total_steps, data=data))


LAYOUT: tuple[str, ...] = ("engine", "stage", "offload_optimizer", "offload_parameters")
LAYOUT += ("tensor_parallel", "data_parallel", "precision", "shard_group", "pipeline", "pipeline_schedule")
"""The parts of a strategy that decide how the state lies in the files."""
LATER = {"shard_group": 0, "pipeline": 1, "pipeline_schedule": "1f1b"}
"""Parts that older checkpoints do not name, and what they were then."""
NO_LONGER_COMPARED = "micro_batch"
"""Older checkpoints name it. How many rows a process takes at a time changes a step by rounding only
(decision 0024)."""


def check_origin(manifest: Manifest, expected: Origin, *, where: str) -> None:
    """Raises CheckpointError naming every field in which the checkpoint is not this run's."""
    saved = manifest.origin
    problems = _differences(saved.identity, expected.identity)
    before, now = LATER | dict(saved.strategy), LATER | dict(expected.strategy)
    layout = [key for key in LAYOUT if before.get(key) != now.get(key)]
    if layout or saved.world_size != expected.world_size:
        what = f"saved by {_place(saved)}, this run is {_place(expected)}; a checkpoint cannot be "
        what += f"loaded at another strategy yet ({', '.join(layout) or 'world_size'} differ)"
        name = str(saved.strategy.get("name"))
        named = f"--set strategy={name} " if layout and name in NAMED else ""
        fix = f"resume with {named}--processes {saved.world_size}"
        problems.append(Problem(what=what, fix=fix))
    if problems:
        raise CheckpointError(f"{where} cannot be resumed like this", problems=problems)


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """A problem for each field that differs; fields that an older checkpoint lacks are skipped.

    Where the content is the same, its origin does not count: a branch that has moved may be replaced by its
    commit, and a template that writes the date by one with the date in it.
    """
    skipped = {NO_LONGER_COMPARED}
    problems = []
    if "tokens" in then and then["tokens"] == now.get("tokens"):
        skipped.add("data")
    elif "tokens" not in then or then.get("data") != now.get("data"):
        skipped.add("tokens")  # not known, or reported as other data
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
    try:
        return TrainerState(**json.loads((folder / NAME).read_text()))
    except (OSError, ValueError, TypeError) as error:
        what = f"the trainer's state cannot be read ({type(error).__name__}: {error})"
        fix = "resume with the version of shardwise that saved it"
        raise CheckpointError(what, where=str(folder / NAME), fix=fix) from None


def save_rng(folder: Path, *, rank: int, device: torch.device) -> None:
    """Write this rank's random number generators (python, numpy, torch, the GPU's) to `rng-rank0.json`."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()  # typed as either of two forms
    kind, key, *position = numpy_state
    state = {
        "python": [version, list(words), gauss],
        "numpy": dict(zip(_NUMPY, (kind, key.tolist(), *position), strict=True)),
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }
    (folder / f"rng-rank{rank}.json").write_text(json.dumps(state))


def load_rng(folder: Path, *, rank: int, device: torch.device) -> None:
    """Restore the generators that `save_rng` wrote. CheckpointError where it cannot."""
    path = folder / f"rng-rank{rank}.json"
    try:
        _restore(json.loads(path.read_text()), device)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of the random number generators cannot be restored ({type(error).__name__}: {error})",
            where=str(path),
            fix="resume on the same kind of device and with the same versions of torch and numpy",
        ) from None


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
