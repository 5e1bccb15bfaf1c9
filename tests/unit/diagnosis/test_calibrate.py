"""A link's latency and rate from times: what the planner's model would have taken gives the link back."""

from __future__ import annotations

import pytest

from shardwise.diagnosis import calibrate
from shardwise.hardware.calibration import Sample
from shardwise.hardware.hardware import Link
from shardwise.simulate.time.collectives import Group, all_gather, all_reduce, reduce_scatter

SIZES = [2**12, 2**16, 2**20, 2**24, 2**29]


def times(ranks: int, *, latency: float, rate: float, noise: float = 0.0) -> list[Sample]:
    link = Link(name="x", latency_seconds=latency, bytes_per_second=rate, source="")
    group = Group(per_node=ranks, nodes=1, intra=link, inter=None)
    found = []
    for number, size in enumerate(SIZES):
        off = 1.0 + noise * (-1) ** number
        found += [
            Sample(what="all_gather", bytes=size, seconds=all_gather(size, group) * off),
            Sample(what="reduce_scatter", bytes=size, seconds=reduce_scatter(size, group) * off),
            Sample(what="all_reduce", bytes=size, seconds=all_reduce(size, group) / 3),  # in the switch, say
        ]
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_simulators_times_give_its_link_back(ranks: int) -> None:
    rate = calibrate.link_between(times(ranks, latency=5e-6, rate=300e9), ranks)
    assert rate is not None
    assert rate.latency_seconds == pytest.approx(5e-6)
    assert rate.bytes_per_second == pytest.approx(300e9)


def test_times_that_scatter_move_it_little() -> None:
    rate = calibrate.link_between(times(4, latency=5e-6, rate=300e9, noise=0.05), 4)
    assert rate is not None
    assert rate.bytes_per_second == pytest.approx(300e9, rel=0.1)
    assert rate.latency_seconds == pytest.approx(5e-6, rel=0.3)


def test_a_link_faster_than_the_models_base_has_no_negative_latency() -> None:
    samples = [Sample(what="all_gather", bytes=size, seconds=1e-6 + size / 300e9) for size in SIZES]
    rate = calibrate.link_between(samples, 2)
    assert rate is not None
    assert rate.latency_seconds == 0.0


def test_no_line_no_rate() -> None:
    assert (
        calibrate.link_between([Sample(what="all_gather", bytes=size, seconds=1e-3) for size in SIZES], 4)
        is None
    )
    assert calibrate.link_between([], 4) is None
    assert calibrate.link_between(times(2, latency=5e-6, rate=300e9), 1) is None
    assert calibrate.link_to_host(times(4, latency=5e-6, rate=300e9)) is None  # no copies among them


def test_copies_of_both_directions_are_one_link() -> None:
    samples = [
        Sample(what=what, bytes=size, seconds=6e-6 + size / rate)
        for size in SIZES
        for what, rate in (("pinned_to_gpu", 50e9), ("gpu_to_pinned", 50e9), ("pageable_to_gpu", 5e9))
    ]
    rate = calibrate.link_to_host(samples)
    assert rate is not None
    assert (rate.latency_seconds, rate.bytes_per_second) == (pytest.approx(6e-6), pytest.approx(50e9))
