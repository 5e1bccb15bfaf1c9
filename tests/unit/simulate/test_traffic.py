"""Bytes that kernels read and write for one element, counted by hand."""

from __future__ import annotations

from shardwise.simulate.time import traffic


def test_a_copy_reads_and_writes_and_a_conversion_does_so_in_two_formats() -> None:
    assert (traffic.copied(2), traffic.copied(4)) == (2 + 2, 4 + 4)
    assert traffic.converted(2, 4) == traffic.converted(4, 2) == 2 + 4


def test_a_sum_is_read_with_what_is_added_and_written() -> None:
    assert traffic.added(2, 4) == 2 + 4 + 4
    assert traffic.added(2, 2) == 2 + 2 + 2


def test_adamw_reads_four_values_and_writes_three() -> None:
    weight = gradient = moment = 4
    reads, writes = weight + gradient + 2 * moment, weight + 2 * moment
    assert gradient == traffic.NORM_BYTES
    assert reads + writes == traffic.ADAMW_BYTES == traffic.NVME_ADAMW_BYTES
    assert reads + writes + gradient == traffic.TORCH_CPU_ADAMW_BYTES, "the clipped gradient is written"
    assert reads + writes + 2 * gradient == traffic.DEEPSPEED_CPU_ADAMW_BYTES, "and read before that"
