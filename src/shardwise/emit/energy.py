"""The callback that measures the energy of a Trainer, next to the files of a launcher."""

from dataclasses import replace
from pathlib import Path

from shardwise.emit.files import Emitted

CALLBACK = "energy_callback.py"


def with_energy(emitted: Emitted) -> Emitted:
    """The files and notes, and the callback with its own."""
    text = Path(__file__).with_name(f"{CALLBACK}.txt").read_text(encoding="utf-8")
    note = f"{CALLBACK} is for a Trainer: it measures energy with Zeus in each process, and sets no limit"
    return replace(emitted, files={**emitted.files, CALLBACK: text}, notes=(*emitted.notes, note))
