"""What a step's event says of memory and energy."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.record.read import read_events
from shardwise.record.schema import RunEvent
from shardwise.record.write import RunFolder
from shardwise.training import meter, observe
from shardwise.training.loop import StepReport
from shardwise.training.observe import Recorder, Speed
from shardwise.training.saving import Saved

MIB = 1 << 20


def test_a_cpu_process_tells_its_resident_memory_and_nothing_of_gpus() -> None:
    def now() -> dict[str, float]:
        return dict(zip(meter.MEMORY_FIELDS, meter.memory(meter.CPU), strict=True))

    now()  # what its first call imports and keeps is not counted below
    block = mmap.mmap(-1, 64 * MIB)  # malloc may have as much left of something that was freed
    block.write(b"1" * len(block))
    resident, after = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE, now()
    block.close()
    assert after["host_memory_bytes"] == pytest.approx(resident, abs=4 * MIB)
    assert after["host_memory_bytes"] - now()["host_memory_bytes"] == pytest.approx(64 * MIB, abs=4 * MIB)
    assert after["peak_allocated_bytes"] >= after["allocated_bytes"] > 0
    for name in ("outside_allocator_bytes", "pinned_memory_bytes", "energy_millijoules"):
        assert after[name] == meter.UNKNOWN


def test_a_lap_ends_where_its_mark_is_however_late_it_is_read() -> None:
    watch = meter.Stopwatch(torch.device("cpu"))
    time.sleep(0.02)
    first = watch.mark()
    time.sleep(0.1)
    second = watch.mark()
    assert 0.02 <= watch.lap(first) < 0.1 <= watch.lap(second)
    assert watch.lap() < 0.1, "since the second mark"


def test_memory_outside_the_allocator_is_read_at_the_first_steps_and_rarely_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver is asked through a stand-in: there is no GPU here."""
    asked: list[int] = []

    def used(_: torch.device) -> float:
        asked.append(1)
        return 1000.0 * MIB + len(asked) * MIB

    monkeypatch.setattr(meter, "_used_bytes", used)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 7 * MIB})
    outside = meter._Outside(torch.device("cuda", 0))
    readings = [outside.read(reserved_bytes=600.0 * MIB) for _ in range(101)]
    assert readings[0].device_bytes == 401 * MIB
    assert readings[2].device_bytes == readings[48].device_bytes == 403 * MIB
    assert readings[49].device_bytes == 404 * MIB
    assert readings[0].pinned_bytes == 7 * MIB
    assert len(asked) == 3 + 2


def recorder(folder: Path) -> Recorder:
    header = RunEvent(
        name="a",
        strategy="zero2",
        processes=2,
        total_steps=9,
        global_batch=2,
        sequence_length=8,
        parameters=1,
        trainable_parameters=1,
    )
    run = RunFolder.create(folder / "run", job_yaml="name: a\n", plan={}, environment={})
    speed = Speed(gpus=2, flops_per_token=1.0, peak_flops=None, why_no_peak="no GPU")
    return Recorder(run, job={"tracking": []}, header=header, speed=speed, resumed_step=None)


def report(step: int, **memory: list[int]) -> StepReport:
    unknown = dict.fromkeys(meter.MEMORY_FIELDS, [int(meter.UNKNOWN)] * 2)
    return StepReport(
        step=step,
        epoch=0,
        loss=2.0,
        grad_norm=1.0,
        learning_rate=1e-4,
        tokens=16,
        target_tokens=16,
        seconds=0.5,
        skipped=False,
        loss_scale=None,
        memory=unknown | {"host_memory_bytes": [10, 20]} | memory,
    )


def events_of(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run" / "events.jsonl") if event["kind"] == kind]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_an_event_says_why_it_has_no_joules(tmp_path: Path) -> None:
    with recorder(tmp_path) as observer:
        observer.on_step(report(1))
        observer.on_step(report(2))
    for event in events_of(tmp_path):
        assert (event["joules"], event["joules_unavailable"]) == (None, "no GPU")
        assert (event["outside_allocator_bytes"], event["pinned_memory_bytes"]) == (None, None)
        assert event["host_memory_bytes"] == [10, 20]
    assert events_of(tmp_path, "run")[0]["energy_source"] is None


def test_joules_are_summed_over_gpus_and_leave_out_what_lies_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "why_no_energy", lambda: None)
    monkeypatch.setattr(observe, "sources", lambda: ("counter", "process"))
    with recorder(tmp_path) as observer:
        observer.on_step(report(1, energy_millijoules=[100_000, 900_000]))
        observer.on_step(
            report(2, energy_millijoules=[200_000, 1_050_000], outside_allocator_bytes=[3 * MIB, 4 * MIB])
        )
        observer.on_save(Saved(step=2, size_bytes=1, seconds=1.0))
        observer.on_step(report(3, energy_millijoules=[900_000, 2_000_000]))
        observer.on_eval(step=3, loss=1.0, target_tokens=1, seconds=1.0)
        observer.on_step(report(4, energy_millijoules=[990_000, 2_100_000]))
        observer.on_step(report(5, energy_millijoules=[1_000_000, 2_110_000]))
    events = events_of(tmp_path)
    assert [event["joules"] for event in events] == [None, 250.0, None, None, 20.0]
    assert "first" in events[0]["joules_unavailable"]
    assert events[1]["joules_unavailable"] is None
    assert events[1]["outside_allocator_bytes"] == [3 * MIB, 4 * MIB]
    assert "save" in events[2]["joules_unavailable"]
    header = events_of(tmp_path, "run")[0]
    assert (header["energy_source"], header["outside_allocator_source"]) == ("counter", "process")
