"""Numbers as people read them."""

from __future__ import annotations

import pytest

from shardwise.units import size

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (12.3 * 1024 * MIB, "12.3 GiB"),
        (102.4 * MIB, "0.1 GiB"),
        (102.3 * MIB, "102.3 MiB"),
        (0.1 * MIB, "0.1 MiB"),
        (2560, "2.5 KiB"),
        (0, "0.0 KiB"),
    ],
)
def test_a_small_size_is_in_smaller_units(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
