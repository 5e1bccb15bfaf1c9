"""Bytes that kernels read and write for one element, counted by hand."""

from __future__ import annotations

from shardwise.simulate.time import schedule


def test_a_copy_reads_and_writes_and_a_conversion_does_so_in_two_formats() -> None:
    assert (schedule.copied(2), schedule.copied(4)) == (2 + 2, 4 + 4)
    assert schedule.converted(2, 4) == schedule.converted(4, 2) == 2 + 4


def test_a_sum_is_read_with_what_is_added_and_written() -> None:
    assert schedule.added(2, 4) == 2 + 4 + 4
    assert schedule.added(2, 2) == 2 + 2 + 2


def test_adamw_reads_four_values_and_writes_three() -> None:
    weight = gradient = moment = 4
    reads, writes = weight + gradient + 2 * moment, weight + 2 * moment
    assert gradient == schedule.NORM_BYTES
    assert reads + writes == schedule.ADAMW_BYTES == schedule.NVME_ADAMW_BYTES
    assert reads + writes + gradient == schedule.TORCH_CPU_ADAMW_BYTES, "the clipped gradient is written"
    assert reads + writes + 2 * gradient == schedule.DEEPSPEED_CPU_ADAMW_BYTES, "and read before that"
