"""A device that answers from recorded values: for tests, and to rehearse on a machine that has no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from shardwise.device.seam import Card, Device, Paths, Reading, Unavailable

NOT_RECORDED = Unavailable(reason="not recorded")


class Replay:
    """Answers as the recorded machine did; null, and what was not recorded, is Unavailable.

    {"driver": "580.95.05", "clock_reasons": {"2": "words"}, "paths": ["X NV18", "NV18 X"],
     "gpus": [{"uuid": ..., "name": ..., and other fields of `Card`,
               "readings": {READING: number, or a list to give one by one, the last one again and again},
               "processes": {PID: bytes}}]}
    """

    visible_variable = "CUDA_VISIBLE_DEVICES"

    def __init__(self, values: Mapping[str, Any]) -> None:
        """`values` may be changed between readings. KeyError or TypeError where a card lacks a name."""
        self._values = values
        self._gpus = {gpu["uuid"]: gpu for gpu in values["gpus"]}
        self.clock_reasons: Mapping[int, str] = {
            int(bit): words for bit, words in values.get("clock_reasons", {}).items()
        }
        names = {field.name for field in fields(Card)}
        self.cards = [
            Card(index=index, **{k: v for k, v in gpu.items() if k in names and v is not None})
            for index, gpu in enumerate(self._gpus.values())
        ]

    def driver_version(self) -> str | Unavailable:
        return self._values.get("driver") or NOT_RECORDED

    def paths(self) -> Paths:
        rows = [row.split() for row in self._values.get("paths", ())]
        cells = {(i, j): path for i, row in enumerate(rows) for j, path in enumerate(row)}
        return {pair: path for pair, path in cells.items() if path != "X"}

    def read(self, uuid: str, what: Reading) -> float | Unavailable:
        found = self._gpus.get(uuid, {}).get("readings", {}).get(what)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        return NOT_RECORDED if found is None else found

    def processes(self, uuid: str) -> Mapping[int, int | Unavailable] | Unavailable:
        found = self._gpus.get(uuid, {}).get("processes")
        if found is None:
            return NOT_RECORDED
        return {int(pid): NOT_RECORDED if size is None else size for pid, size in found.items()}


def record(device: Device) -> dict[str, Any]:
    """What `device` answers now, in the form that Replay and json.dump take."""
    paths, numbers = device.paths(), [card.index for card in device.cards]
    gpus = []
    for card in device.cards:
        readings = {what: _plain(device.read(card.uuid, what)) for what in get_args(Reading)}
        facts = {key: _plain(getattr(card, key)) for key in asdict(card) if key != "index"}
        gpus.append({**facts, "readings": readings})
    return {
        "driver": _plain(device.driver_version()),
        "clock_reasons": {str(bit): words for bit, words in device.clock_reasons.items()},
        "paths": [" ".join(paths.get((i, j), "X") for j in numbers) for i in numbers] if paths else [],
        "gpus": gpus,
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, Unavailable) else value
