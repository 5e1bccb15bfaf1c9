"""On a GPU: the simulated allocator and torch's own report the same bytes after every single event.

With expandable segments, the only setting that plans are made for (decision 0030).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.simulate.memory.allocator import CachingAllocator, DeferredFree, OutOfMemoryError
from shardwise.simulate.memory.pool import Block, Pool

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
    "allocated_bytes.all.peak": "peak_allocated_bytes",
    "active_bytes.all.peak": "peak_active_bytes",
    "reserved_bytes.all.peak": "peak_reserved_bytes",
    "num_alloc_retries": "alloc_retries",
}


class Limited(CachingAllocator):
    """Refuses what torch.cuda.set_per_process_memory_fraction refuses.

    torch compares the limit with the size that a segment would have without expandable segments, and may then
    map more or less than that (alloc_block).
    """

    limit_bytes = 0

    def _obtain(self, pool: Pool, size: int, size_bytes: int) -> int:
        rounded = -(-size // (2 * MIB)) * 2 * MIB
        segment = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else rounded
        if self._is_beyond(segment):
            self.empty_cache()
            self.alloc_retries += 1
            if self._is_beyond(segment):
                raise OutOfMemoryError(
                    requested_bytes=size_bytes,
                    allocated_bytes=self.allocated_bytes,
                    reserved_bytes=self.reserved_bytes,
                )
        return super()._obtain(pool, size, size_bytes)

    def _is_beyond(self, segment: int) -> bool:
        return bool(self.limit_bytes) and self.reserved_bytes + segment > self.limit_bytes


def measured(events: list[Event], *, limit_bytes: int) -> dict[str, Any]:
    """What torch reports, from a process of its own: settings are read, and peaks begin, with the process."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
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
    blocks: dict[int, Block] = {}
    later: list[DeferredFree] = []
    passed: list[DeferredFree] = []  # torch asks its events when it allocates next
    for kind, identifier, size, stream in events:
        failed = 0
        if kind == "malloc":
            while passed:
                allocator.complete(passed.pop())
            try:
                blocks[identifier] = allocator.take(size, stream)
            except OutOfMemoryError:
                failed = 1
        elif kind == "free" and identifier in blocks:
            allocator.give(blocks.pop(identifier))
        elif kind == "free_later":
            later.append(allocator.give_later(blocks.pop(identifier)))
        elif kind == "synchronize":
            passed, later = later, []
        elif kind == "empty_cache":
            allocator.empty_cache()
        yield [failed, *(getattr(allocator, name) for name in NAMES.values())]


def compare(events: list[Event], *, limit_bytes: int = 0) -> None:
    torch = measured(events, limit_bytes=limit_bytes)
    allocator = Limited(capacity_bytes=torch["total"])
    allocator.limit_bytes = torch["limit"] or 0
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
    assert bool(allocator.alloc_retries) == bool(limit_bytes)
    print(
        f"limit {limit_bytes // MIB} MiB: {len(events)} events alike, {failed} failed, "
        f"{allocator.alloc_retries} retries, peak reserved {allocator.peak_reserved_bytes / MIB:.0f} MiB"
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


def test_training() -> None:
    compare(training(1, steps=6, layers=12))


@pytest.mark.parametrize("seed", [2, 3])
def test_any_order(seed: int) -> None:
    compare(anything(seed, count=2000, target_bytes=4096 * MIB))


def test_running_out_of_memory() -> None:
    compare(anything(4, count=2000, target_bytes=2048 * MIB), limit_bytes=2048 * MIB)


def test_blocks_that_another_stream_uses() -> None:
    """The next allocation does not get the block; after the other stream is done, the one after it does."""
    events: list[Event] = [
        ("malloc", 0, 30 * MIB, 0),
        ("free_later", 0, 0, 0),
        ("malloc", 1, 30 * MIB, 0),
        ("synchronize", 0, 0, 0),
        ("malloc", 2, 30 * MIB, 0),
    ]
    compare(events)
