"""One process of a Hugging Face Trainer on the CPU with `emit`'s energy callback, on fake GPUs.

Zeus itself is used where it is installed; else a stand-in that reads the same counters.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from shardwise.device.fake import FakeNvml

RANK = int(os.environ["RANK"])
STEP_SECONDS, EVALUATION_SECONDS = 0.2, 1.0


def stand_in(fake: FakeNvml) -> None:
    """The part of `zeus.monitor` that the callback uses."""

    class ZeusMonitor:
        def __init__(self, gpu_indices: list[int], cpu_indices: list[int]) -> None:
            assert cpu_indices == []
            self.indices, self.begun = gpu_indices, dict[str, tuple[float, dict[int, float]]]()

        def _now(self) -> tuple[float, dict[int, float]]:
            gpus = fake.state()["gpus"]
            return time.time(), {index: fake.joules(gpus[index]) for index in self.indices}

        def begin_window(self, key: str) -> None:
            assert key not in self.begun
            self.begun[key] = self._now()

        def end_window(self, key: str) -> SimpleNamespace:
            (began, before), (ended, after) = self.begun.pop(key), self._now()
            used = {index: after[index] - before[index] for index in self.indices}
            return SimpleNamespace(time=ended - began, gpu_energy=used)

    zeus, monitor = ModuleType("zeus"), ModuleType("zeus.monitor")
    monitor.ZeusMonitor = ZeusMonitor  # type: ignore[attr-defined]
    sys.modules |= {"zeus": zeus, "zeus.monitor": monitor}


class Rows(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index)])}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(STEP_SECONDS if self.training else EVALUATION_SECONDS)
        return {"loss": (self.weight * x - 1).square().mean()}


def main(place: str) -> None:
    folder = Path(place)
    fake = FakeNvml(folder / "gpus.json")
    if importlib.util.find_spec("zeus") is None:
        stand_in(fake)
    else:
        fake._nvmlGetFunctionPointer = None  # by this name Zeus knows the official package
        sys.modules["pynvml"] = fake  # type: ignore[assignment]
        module = importlib.import_module("zeus.monitor.energy")
        module.sync_execution_fn = lambda *_, **__: None  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: RANK  # type: ignore[assignment]
    sys.path.insert(0, str(folder))
    from energy_callback import EnergyCallback  # type: ignore[import-not-found]

    print("zeus is", sys.modules["zeus"].__dict__.get("__version__", "a stand-in"))
    asked = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=11,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=32,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=Model(),
        args=asked,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[EnergyCallback(every=4)],
    )
    trainer.train()
