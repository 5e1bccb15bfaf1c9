"""Recorded readings given back, and recorded."""

from __future__ import annotations

import json

from recorded import device, values
from shardwise.device import Replay, Unavailable, record

GPU = {"uuid": "GPU-1", "name": "NVIDIA H200"}


def test_what_is_recorded_is_answered() -> None:
    gpu = {**GPU, "memory_bytes": 10, "divided": True, "processes": {"7": 3, "8": None}}
    replay = Replay({"driver": "580", "gpus": [{**gpu, "readings": {"power_watts": 77.5}}]})
    assert replay.driver_version() == "580"
    assert (replay.cards[0].memory_bytes, replay.cards[0].divided) == (10, True)
    assert replay.read("GPU-1", "power_watts") == 77.5
    processes = replay.processes("GPU-1")
    assert not isinstance(processes, Unavailable)
    assert processes[7] == 3
    assert isinstance(processes[8], Unavailable)


def test_what_is_not_recorded_is_unavailable_and_not_zero() -> None:
    replay = Replay({"gpus": [{**GPU, "pcie_lanes": None, "readings": {"energy_joules": None}}]})
    for answer in (
        replay.driver_version(),
        replay.cards[0].memory_bytes,
        replay.cards[0].pcie_lanes,
        replay.read("GPU-1", "energy_joules"),
        replay.read("GPU-1", "power_watts"),
        replay.read("GPU-2", "power_watts"),
        replay.processes("GPU-1"),
    ):
        assert isinstance(answer, Unavailable)
    assert replay.paths() == {}


def test_a_reading_of_zero_is_a_number() -> None:
    assert (
        Replay({"gpus": [{**GPU, "readings": {"memory_used_bytes": 0}}]}).read("GPU-1", "memory_used_bytes")
        == 0
    )


def test_a_list_is_given_one_by_one() -> None:
    replay = Replay({"gpus": [{**GPU, "readings": {"energy_joules": [1.0, 5.0, 9.0]}}]})
    assert [replay.read("GPU-1", "energy_joules") for _ in range(4)] == [1.0, 5.0, 9.0, 9.0]


def test_paths_are_a_matrix() -> None:
    assert device("rtx3090x4").paths()[2, 3] == "NV4"
    assert device("rtx3090x4").paths()[2, 1] == "NODE"
    assert len(device("v100x8").paths()) == 8 * 7


def test_a_recorded_device_is_replayed_as_it_was() -> None:
    recorded = values("v100x8")
    recorded["gpus"][3]["readings"] = {"power_watts": 77.5, "clock_reasons": 32}
    recorded["clock_reasons"] = {"32": "heat"}
    first = Replay(recorded)
    again = Replay(json.loads(json.dumps(record(first))))
    assert again.cards == first.cards
    assert again.paths() == first.paths()
    assert again.clock_reasons == {32: "heat"}
    assert again.driver_version() == "580.95.05"
    uuid = first.cards[3].uuid
    assert again.read(uuid, "power_watts") == 77.5
    assert isinstance(again.read(uuid, "energy_joules"), Unavailable)
