"""Saves and restores the full state of a run: engine, weights for export, generators, data position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.data.loader import BatchStream
from shardwise.engines.runtime.protocol import Engine
from shardwise.errors import CheckpointError
from shardwise.record.environment import versions
from shardwise.record.manifest import Origin
from shardwise.strategy import Strategy
from shardwise.training.checkpoint.match import check_origin
from shardwise.training.checkpoint.state import TrainerState, load_rng, load_state, save_rng, save_state
from shardwise.training.checkpoint.store import CheckpointStore
from shardwise.training.loop import Progress
from shardwise.training.process import Ranks


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
