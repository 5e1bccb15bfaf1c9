"""Rows of programs built on transformers' Trainer: a clock that is a callback, and their result."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Clock, documents, emit, peak_memory, row
from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """Marks the ends of steps and the start of the first; keeps the log of the Trainer."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.logs: list[dict[str, Any]] = []

    def on_train_begin(self, *_, **__):
        self.clock.mark()

    def on_step_end(self, *_, **__):
        self.clock.mark()

    def on_train_end(self, _, state, *__, **___):
        self.logs = [entry for entry in state.log_history if "grad_norm" in entry]


class Counting:
    """A collator that also records the tokens of each batch."""

    def __init__(self, collator: Callable[[Any], Any]) -> None:
        self.collator = collator
        self.tokens: list[int] = []

    def __call__(self, samples: Any) -> Any:
        batch = self.collator(samples)
        self.tokens.append(batch["input_ids"].numel())
        return batch


def arguments_of(description: str | None) -> argparse.ArgumentParser:
    """The options that all of these rows have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--lora", type=int, default=16, help="rank")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--memory-cap", type=float, help="GiB of the GPU that the process may use")
    return parser


def settings(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The Trainer's arguments that all of these rows have."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "max_steps": arguments.steps,
        "logging_steps": 5,
        "report_to": "none",
        "save_strategy": "no",
        "dataloader_drop_last": True,
    }


def texts(arguments: argparse.Namespace) -> list[str]:
    """The documents, as often as the steps need them, for programs that pack them."""
    found = documents(arguments.assets)
    characters = arguments.steps * arguments.micro_batch * arguments.sequence * 8
    return found * -(-characters // sum(map(len, found)))


def cap_memory(gib: float | None) -> None:
    if gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)


def emit_row(name: str, clock: StepClock, tokens: list[int], arguments: argparse.Namespace) -> None:
    emit(
        row(
            name,
            clock.clock.seconds(),
            tokens,
            warmup=arguments.warmup,
            gpus=1,
            micro_batch=arguments.micro_batch,
            sequence_length=arguments.sequence,
            memory_cap_gib=arguments.memory_cap,
            **peak_memory(),
            logged_steps=[entry["step"] for entry in clock.logs],
            loss=[float(entry["loss"]) for entry in clock.logs],
            grad_norm=[float(entry["grad_norm"]) for entry in clock.logs],
        )
    )
