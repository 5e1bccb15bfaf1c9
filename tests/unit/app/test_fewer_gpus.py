"""Which numbers of GPUs a plan for energy tries."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.app.plan import _on_fewer
from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware


@pytest.mark.parametrize(
    ("gpus", "tried"),
    [
        ("1xH100", []),
        ("6xH100", [(1, 3), (1, 1)]),
        ("2x8xH100", [(1, 8), (1, 4), (1, 2), (1, 1)]),
        ("4x2xH100", [(2, 2), (1, 2), (1, 1)]),
    ],
)
def test_nodes_are_halved_first_then_gpus(gpus: str, tried: list[tuple[int, int]]) -> None:
    found: list[Any] = list(_on_fewer(parse_hardware(gpus), lambda hardware: hardware))  # type: ignore[arg-type,return-value]
    assert [(one.nodes, one.gpus_per_node) for one in found] == tried
    assert all((one.inter is None) == (one.nodes == 1) for one in found)


def test_a_count_that_the_job_cannot_be_split_by_is_left_out() -> None:
    def plan_for(hardware: Hardware) -> Any:
        if hardware.world_size == 3:
            raise JobError("12 rows cannot be split", where="here", fix="do")
        return hardware

    found: list[Any] = list(_on_fewer(parse_hardware("6xH100"), plan_for))
    assert [one.world_size for one in found] == [1]
