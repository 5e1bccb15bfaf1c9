"""A machine with two different cards, whose limits are neither their defaults nor their greatest ones."""

from __future__ import annotations

from pathlib import Path

from shardwise.device import Device
from shardwise.device.fake import FakeNvml, create
from shardwise.device.nvml import open_nvml

PREVIOUS = {"GPU-fake-0": 650.0, "GPU-fake-1": 350.0}
UUIDS = list(PREVIOUS)


class Machine:
    def __init__(self, folder: Path, *, root: bool = True) -> None:
        self.file, self.leases = create(folder / "gpus.json", 2, root=root), folder / "leases"
        self.nvml = FakeNvml(self.file)
        self.nvml.change(UUIDS[0], power_limit_watts=650.0)
        self.nvml.change(
            UUIDS[1], power_limit_watts=350.0, power_default_watts=400.0, power_min_watts=100.0,
            power_max_watts=450.0,
        )  # fmt: skip
        self.device = self.open(self.file)

    @staticmethod
    def open(file: Path) -> Device:
        """Opened again, as another process would."""
        return open_nvml(FakeNvml(file))

    def limits(self) -> dict[str, float]:
        return {gpu["uuid"]: gpu["power_limit_watts"] for gpu in self.nvml.state()["gpus"]}

    def calls(self) -> list[tuple[str, float]]:
        """What was set, without settings of what was there."""
        calls = self.nvml.state()["calls"]
        return [(call["uuid"], call["value"]) for call in calls if call["before"] != call["value"]]

    def fail(self, function: str, **rule: object) -> None:
        """Make calls fail, as `from`, `until`, `error` and `uuid` say; no rule: none."""
        with self.nvml.changing() as state:
            state["fails"] = {function: {**rule, "seen": 0}} if rule else {}

    def files(self) -> list[Path]:
        return sorted(self.leases.glob("*.json"))


SET = "nvmlDeviceSetPowerManagementLimit"
