"""Saves and restores the full state of a run: engine, weights for export, generators, data position.

A checkpoint belongs to this run where the job, the strategy and the number of processes are the same.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.loader import BatchStream
from shardwise.engines.runtime.protocol import Engine
from shardwise.errors import CheckpointError, Problem
from shardwise.job.load import differences
from shardwise.models.fingerprint import other_base
from shardwise.record.environment import versions
from shardwise.record.manifest import Manifest, Origin
from shardwise.strategy import Strategy
from shardwise.training.checkpoint import CheckpointStore
from shardwise.training.loop import Progress
from shardwise.training.process import Ranks
from shardwise.units import processes


class Snapshots:
    """Saves and restores one run. Both are collective."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: Engine,
        stream: BatchStream,
        ranks: Ranks,
        write_weights: Callable[[Path], None],
        strategy: Strategy,
        identity: Mapping[str, Any],
        keep: int,
        total_steps: int,
    ) -> None:
        self.engine = engine
        self.stream = stream
        self.write_weights = write_weights
        self.total_steps = total_steps
        world = engine.world
        self.origin = Origin(
            world_size=world.size, strategy=strategy.to_json(), identity=identity, versions=versions()
        )
        self.store = CheckpointStore(folder, keep=keep, rank=world.rank, agree=ranks.gather)

    def save(self, progress: Progress) -> int:
        """Commit a checkpoint of `progress.step`; returns its bytes."""
        checkpoint = self.store.save(
            progress.step, lambda folder: self._write(folder, progress), origin=self.origin
        )
        return checkpoint.manifest.size_bytes

    def restore(self) -> Progress:
        """Load the newest sound checkpoint. CheckpointError where there is none, or it is another job's."""
        found = self.store.latest()
        if found is None:
            raise CheckpointError(
                "there is no checkpoint to resume from",
                where=str(self.store.folder),
                fix="start without --resume, under another name",
            )
        if self.engine.world.rank == 0:
            found.warn_of_damaged()
        check_origin(found.manifest, self.origin, where=str(found.path))
        state = load_state(found.path)
        self.engine.load(found.path / "engine")
        self.stream.load_state_dict(dict(state.data))
        world = self.engine.world
        load_rng(found.path, rank=world.rank, device=world.device)
        return Progress(step=state.step, tokens=state.tokens, target_tokens=state.target_tokens)

    def _write(self, folder: Path, progress: Progress) -> None:
        """This rank's part of a checkpoint."""
        world = self.engine.world
        engine = folder / "engine"
        engine.mkdir(exist_ok=True)
        self.engine.save(engine)
        self.write_weights(folder / "model")
        save_rng(folder, rank=world.rank, device=world.device)
        if world.rank == 0:
            state = TrainerState(
                step=progress.step,
                total_steps=self.total_steps,
                tokens=progress.tokens,
                target_tokens=progress.target_tokens,
                data=self.stream.state_dict(),
            )
            save_state(folder, state)


LAYOUT = (
    "engine",
    "stage",
    "offload_optimizer",
    "offload_parameters",
    "tensor_parallel",
    "data_parallel",
    "precision",
)
"""The parts of a strategy that decide how the state lies in the files."""


NO_LONGER_COMPARED = "micro_batch"
"""Older checkpoints name it. How many rows a process takes at a time changes a step by rounding only
(decision 0024)."""


def check_origin(manifest: Manifest, expected: Origin, *, where: str) -> None:
    """Raises CheckpointError naming every field in which the checkpoint is not this run's."""
    saved = manifest.origin
    problems = _differences(saved.identity, expected.identity)
    layout = [key for key in LAYOUT if saved.strategy.get(key) != expected.strategy.get(key)]
    if layout or saved.world_size != expected.world_size:
        problems.append(
            Problem(
                what=f"saved by {_place(saved)}, this run is {_place(expected)}; a checkpoint cannot be "
                f"loaded at another strategy yet ({', '.join(layout) or 'world_size'} differ)",
                fix=f"resume with --set strategy={saved.strategy.get('name')} --processes {saved.world_size}",
            )
        )
    if problems:
        raise CheckpointError(f"{where} belongs to another run", problems=problems)


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
    then, now = ({key: value for key, value in side.items() if key != "base"} for side in (then, now))
    found = differences(then, now)
    return problems + [_problem(key, old, new) for key, old, new in found if key not in skipped]


def _problem(key: str, then: object, now: object) -> Problem:
    if key == "data":  # a hash of content: no value to show
        return Problem(
            what="the content of the data, or how it becomes tokens, is not the checkpoint's",
            where="data.train, data.eval, data.split, data.chat_template, model.tokenizer",
            fix="restore the files as they were, or start a run under another name",
        )
    if key == "tokens":
        return Problem(
            what="the same files and settings give other tokens than the checkpoint was trained on",
            where="data.chat_template, or the versions of transformers and tokenizers",
            fix="set SHARDWISE_CACHE to the folder with the run's own tokens; where the template writes the "
            "date (strftime_now), name a copy with the day's date in data.chat_template; or start a run "
            "under another name",
        )
    return Problem(
        what=f"{key} is {_short(now)}, the checkpoint's is {_short(then)}",
        fix="set it back, or start a run under another name",
    )


def _place(origin: Origin) -> str:
    return f"{origin.strategy.get('name')} on {processes(origin.world_size)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


NAME = "state.json"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that is the same on all ranks. The learning rate follows from `step` and `total_steps`."""

    step: int
    """Optimizer steps done."""
    total_steps: int
    """Optimizer steps of the full run: the length of the schedule."""
    tokens: int
    """Tokens trained on so far, without padding."""
    target_tokens: int
    """Those among them that were predicted."""
    data: Mapping[str, Any]
    """The loader's own position."""


def save_state(folder: Path, state: TrainerState) -> None:
    """Write `state.json`."""
    (folder / NAME).write_text(json.dumps(asdict(state), indent=1) + "\n")


def load_state(folder: Path) -> TrainerState:
    """Read `state.json`; CheckpointError where it is missing or not one of this version."""
    try:
        return TrainerState(**json.loads((folder / NAME).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the trainer's state cannot be read ({type(error).__name__}: {error})",
            where=str(folder / NAME),
            fix="resume with the version of shardwise that saved it",
        ) from None


def save_rng(folder: Path, *, rank: int, device: torch.device) -> None:
    """Write this rank's random number generators (python, numpy, torch, the GPU's) to `rng-rank0.json`."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    state = {
        "python": [version, list(words), gauss],
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": numpy_state["state"]["key"].tolist(),
            "pos": numpy_state["state"]["pos"],
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        },
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
    generator = state["numpy"]
    position = {"key": np.array(generator["key"], dtype=np.uint32), "pos": generator["pos"]}
    gauss = {name: generator[name] for name in ("has_gauss", "gauss")}
    np.random.set_state({"bit_generator": generator["bit_generator"], "state": position, **gauss})
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
