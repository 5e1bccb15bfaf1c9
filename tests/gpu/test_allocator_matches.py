"""On a GPU: the simulated allocator and torch's own report the same bytes after every single event."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from shardwise.simulate.memory.allocator import NO_BLOCK, CachingAllocator, OutOfMemoryError

pytestmark = pytest.mark.gpu

MIB = 1024**2
Event = tuple[str, int, int, int]  # kind, identifier, bytes, stream

# Replays the events of its standard input and prints torch's statistics after each of them.
CHILD = """
import json, sys, torch

asked = json.load(sys.stdin)
total = torch.cuda.get_device_properties(0).total_memory
fraction = 1.0
if asked["limit_bytes"]:
    fraction = asked["limit_bytes"] / total
    torch.cuda.set_per_process_memory_fraction(fraction)
streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
tensors, rows = {}, []
for kind, identifier, size, stream in asked["events"]:
    failed = 0
    if kind == "malloc":
        try:
            with torch.cuda.stream(streams[stream]):
                tensors[identifier] = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            failed = 1
    elif kind == "free":
        tensors.pop(identifier, None)
    elif kind == "free_later":  # the other stream works on it for a second, until it is waited for
        with torch.cuda.stream(streams[1]):
            torch.cuda._sleep(2_000_000_000)
        tensors[identifier].record_stream(streams[1])
        del tensors[identifier]
    elif kind == "synchronize":
        torch.cuda.synchronize()
    elif kind == "empty_cache":
        torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    rows.append([failed, *(stats[name] for name in asked["names"])])
print(json.dumps({"total": total, "limit": int(fraction * total) if fraction < 1 else None, "rows": rows}))
"""

# Of torch.cuda.memory_stats(), and as the simulated allocator calls it.
NAMES = {
    "allocated_bytes.all.current": "allocated_bytes",
    "active_bytes.all.current": "active_bytes",
    "requested_bytes.all.current": "requested_bytes",
    "reserved_bytes.all.current": "reserved_bytes",
    "segment.all.current": "segments",
    "inactive_split_bytes.all.current": "inactive_split_bytes",
    "allocated_bytes.all.peak": "peak_allocated_bytes",
    "active_bytes.all.peak": "peak_active_bytes",
    "reserved_bytes.all.peak": "peak_reserved_bytes",
    "num_alloc_retries": "alloc_retries",
}


def measured(events: list[Event], *, settings: str, limit_bytes: int) -> dict[str, Any]:
    """What torch reports, from a process of its own: settings are read, and peaks begin, with the process."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    if settings:
        environment["PYTORCH_ALLOC_CONF"] = settings
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps({"events": events, "names": list(NAMES), "limit_bytes": limit_bytes}),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def simulated(events: list[Event], allocator: CachingAllocator) -> Iterator[list[int]]:
    handles: dict[int, int] = {}
    later: list[int] = []
    passed: list[int] = []  # torch asks its events when it allocates next
    for kind, identifier, size, stream in events:
        failed = 0
        if kind == "malloc":
            while passed:
                allocator.free(passed.pop())
            try:
                handles[identifier] = allocator.malloc(size, stream)
            except OutOfMemoryError:
                failed, handles[identifier] = 1, NO_BLOCK
        elif kind == "free":
            allocator.free(handles[identifier])
        elif kind == "free_later":
            allocator.free_later(handles[identifier])
            later.append(handles[identifier])
        elif kind == "synchronize":
            passed, later = later, []
        elif kind == "empty_cache":
            allocator.empty_cache()
        yield [failed, *(getattr(allocator, name) for name in NAMES.values())]


def compare(events: list[Event], *, limit_bytes: int = 0, **options: Any) -> None:
    settings = ",".join(f"{name}:{value}" for name, value in options.pop("settings", {}).items())
    torch = measured(events, settings=settings, limit_bytes=limit_bytes)
    allocator = CachingAllocator(device_bytes=torch["total"], limit_bytes=torch["limit"], **options)
    columns = ["failed", *NAMES]
    rows = zip(events, torch["rows"], simulated(events, allocator), strict=True)
    for place, (event, expected, found) in enumerate(rows):
        wrong = {
            name: {"torch": right, "simulated": ours}
            for name, right, ours in zip(columns, expected, found, strict=True)
            if right != ours
        }
        assert not wrong, f"event {place}, {event}: {wrong}"
    failed = sum(row[0] for row in torch["rows"])
    print(
        f"{settings or 'defaults'}, limit {limit_bytes // MIB} MiB: {len(events)} events alike, "
        f"{failed} failed, {allocator.alloc_retries} retries, "
        f"peak reserved {allocator.peak_reserved_bytes / MIB:.0f} MiB"
    )


def training(seed: int, *, steps: int, layers: int) -> list[Event]:
    """Steps of a model of `layers` blocks: another sequence length each, optimizer states since the first.

    Gathered weights come from a second stream, as FSDP and ZeRO-3 do it.
    """
    rng = random.Random(seed)
    events: list[Event] = []

    def malloc(size: float, stream: int = 0) -> int:
        identifier = len(events)
        events.append(("malloc", identifier, int(size), stream))
        return identifier

    def free(identifier: int) -> None:
        events.append(("free", identifier, 0, 0))

    hidden = 1024
    weights = [malloc(2 * size * hidden) for _ in range(layers) for size in (hidden * 4, hidden * 8, 1)]
    states: list[int] = []
    for _ in range(steps):
        tokens = 256 + int(2048 * rng.random())
        saved: list[list[int]] = []
        for _ in range(layers):
            gathered = malloc(24 * hidden * hidden, stream=1)
            kept = []
            for width in (2, 2, 6, 2, 0.01, 8, 8, 2):
                temporary = malloc(width * tokens * hidden * (0.5 + rng.random()))
                kept.append(malloc(width * tokens * hidden))
                free(temporary)
            saved.append(kept)
            free(gathered)
        logits = [malloc(tokens * 8000 * size) for size in (2, 4, 4)]
        for identifier in logits:
            free(identifier)
        gradients = []
        for kept in reversed(saved):
            gathered = malloc(24 * hidden * hidden, stream=1)
            for identifier in reversed(kept):
                upstream = malloc(2 * tokens * hidden)
                free(identifier)
                free(upstream)
            gradients += [malloc(2 * size * hidden) for size in (hidden * 4, hidden * 8, 1)]
            free(gathered)
        if not states:
            states = [
                malloc(8 * size * hidden) for _ in range(layers) for size in (hidden * 4, hidden * 8, 1)
            ]
        for identifier in gradients:
            flat = malloc(4 * hidden * hidden * (1 + int(8 * rng.random())))
            free(identifier)
            free(flat)
    for identifier in (*weights, *states):
        free(identifier)
    events.append(("empty_cache", 0, 0, 0))
    return events


def anything(seed: int, *, count: int, target_bytes: int) -> list[Event]:
    """Sizes from 16 B to 256 MiB in no order, of about `target_bytes` in all."""
    rng = random.Random(seed)
    events: list[Event] = []
    alive: list[tuple[int, int]] = []
    total = 0
    for identifier in range(count):
        while alive and total > target_bytes * rng.random():
            freed, size = alive.pop(int(len(alive) * (1 - rng.random() ** 2)))
            total -= size
            events.append(("free", freed, 0, 0))
        size = int(2 ** (4 + 24 * rng.random()))
        events.append(("malloc", identifier, size, int(1.3 * rng.random())))
        alive.append((identifier, size))
        total += size
        if rng.random() < 0.002:
            events.append(("empty_cache", 0, 0, 0))
    return events


BY_ADDRESS = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.13"),
    reason="before torch 2.13, free blocks of one size in two segments are chosen among by their address",
)
EXPANDABLE = [
    pytest.param({}, id="segments", marks=BY_ADDRESS),
    pytest.param({"settings": {"expandable_segments": True}, "expandable_segments": True}, id="expandable"),
]


@pytest.mark.parametrize("options", EXPANDABLE)
def test_training(options: dict[str, Any]) -> None:
    compare(training(1, steps=6, layers=12), **options)


@pytest.mark.parametrize("options", EXPANDABLE)
@pytest.mark.parametrize("seed", [2, 3])
def test_any_order(options: dict[str, Any], seed: int) -> None:
    compare(anything(seed, count=2000, target_bytes=4096 * MIB), **options)


@pytest.mark.parametrize("options", EXPANDABLE)
def test_running_out_of_memory(options: dict[str, Any]) -> None:
    compare(anything(4, count=2000, target_bytes=2048 * MIB), limit_bytes=2048 * MIB, **options)


@BY_ADDRESS
def test_settings_that_are_off_by_default() -> None:
    events = anything(5, count=1000, target_bytes=2048 * MIB)
    compare(events, settings={"roundup_power2_divisions": 4}, roundup_power2_divisions=4)
    compare(
        events,
        limit_bytes=2048 * MIB,
        settings={"max_split_size_mb": 100, "garbage_collection_threshold": 0.6},
        max_split_size_bytes=100 * MIB,
        garbage_collection_threshold=0.6,
    )


@pytest.mark.parametrize("options", EXPANDABLE)
def test_blocks_that_another_stream_uses(options: dict[str, Any]) -> None:
    """The next allocation does not get the block; after the other stream is done, the one after it does."""
    events: list[Event] = [
        ("malloc", 0, 30 * MIB, 0),
        ("free_later", 0, 0, 0),
        ("malloc", 1, 30 * MIB, 0),
        ("synchronize", 0, 0, 0),
        ("malloc", 2, 30 * MIB, 0),
    ]
    compare(events, **options)
