import json
from pathlib import Path

import pytest

import accuracy
from shardwise.engines import descriptor
from shardwise.engines.deepspeed import policy
from shardwise.strategy import Strategy


def outside_allocator_bytes(strategy: Strategy) -> int:
    return descriptor(strategy).outside_allocator_bytes(strategy)


MIB = 1024**2
LEDGER = Path(__file__).parents[3] / "benchmarks" / "accuracy" / "results" / "measured.jsonl"


def _rows() -> list[dict]:
    rows = [json.loads(line) for line in LEDGER.read_text().splitlines()]
    return [row for row in rows if row["error"] is None]


def _predicted(row: dict) -> int:
    strategy, earlier = {**row["strategy"]}, accuracy.module("earlier")
    del strategy["name"]
    with earlier.kernels_of(earlier.earlier_kernels(row) & {"hooks"}):
        return outside_allocator_bytes(Strategy(**strategy))


FEWER_GATHERS = {
    "phi-3-mini.2gpu.zero3.full.s2048.b2x1.ck1",
    "llama-2-7b.2gpu.zero3.full.s2048.b2x1.ck0",
    "olmoe-1b-7b-8l.2gpu.zero3.full.s2048.b2x1.ck0",
    "falcon-7b.2gpu.zero3.lora16.s2048.b2x1.ck0",
    "qwen3-30b-a3b-12l.2gpu.zero3.lora16.s2048.b2x1.ck0",
}
"""Rows whose graphs of ZeRO-3 take 88 to 108 MiB less than is predicted: on the safe side."""


def _close(row: dict) -> bool:
    """Passes that are recorded as CUDA graphs load less: the prediction is on the safe side."""
    error = (_predicted(row) - row["outside_allocator_bytes"]) / MIB
    return abs(error) <= 20 or (_recorded(row) and 0 < error <= 80)


def test_every_measured_row_is_within_20_mib_or_its_passes_are_recorded() -> None:
    rows = _rows()
    assert len(rows) > 50
    assert {row["id"] for row in rows if not _close(row)} <= FEWER_GATHERS


@pytest.mark.xfail(reason="decision 0105: why other rows take more is not known", strict=True)
@pytest.mark.parametrize("name", sorted(FEWER_GATHERS))
def test_graphs_with_fewer_gathers_are_close_too(name: str) -> None:
    assert all(_close(row) for row in _rows() if row["id"] == name)


def _recorded(row: dict) -> bool:
    earlier, engine = accuracy.module("earlier"), row["strategy"]["engine"]
    if engine in ("single", "ddp", "ddp-zero1"):
        return row["date"] > earlier.ALL_RECORDED
    if row["date"] > earlier.HOOKED and policy.records(earlier._strategy(row["strategy"])):
        return True
    of_others = engine == "fsdp2" or (engine == "deepspeed" and row["row"]["lora"] > 0)
    return of_others and row["date"] > earlier.ALSO_RECORDED


def test_a_third_group_takes_memory_of_its_own() -> None:
    """Of all ranks, of those that see the same rows, of those with the same part; of one rank, none."""

    def needed(**ranks: int) -> int:
        return outside_allocator_bytes(Strategy(engine="deepspeed", stage=1, **ranks))

    assert needed(data_parallel=2, tensor_parallel=2) == needed(data_parallel=4) + 486 * MIB
    assert needed(data_parallel=1, tensor_parallel=4) == needed(data_parallel=4) - 98 * MIB


def test_a_capacity_check_does_not_rely_on_less_than_was_measured() -> None:
    # 2 MiB is what rows of one kind differ by.
    assert all(_predicted(row) >= row["outside_allocator_bytes"] - 2 * MIB for row in _rows())
