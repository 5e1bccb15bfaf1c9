"""Collectives: seconds against the alpha-beta model worked out by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.time import collectives as c
from shardwise.simulate.time.collectives import BASE_SECONDS, Group, group
from shardwise.simulate.time.roofline import held, table
from shardwise.simulate.time.step import slowest_links
from shardwise.strategy import Strategy

GB = 1e9
NVLINK = 18 * 20.6 * GB  # what NCCL's rings reach on NVLink 4
NVLINK_LATENCY = 3.4e-6
ADAPTER = 48 * GB  # 400 Gbit/s InfiniBand, one for each GPU
ADAPTER_LATENCY = 14e-6

EIGHT = group(parse_hardware("8xH200"), 8)
TWO_NODES = group(parse_hardware("2x8xH200"), 16)
SLOW = group(parse_hardware("2x8xH200+eth100"), 16)


def test_a_ring_sends_all_but_its_own_part() -> None:
    expected = BASE_SECONDS + 7 * NVLINK_LATENCY + 7 / 8 * GB / NVLINK
    assert c.all_gather(GB, EIGHT) == pytest.approx(expected)
    assert c.reduce_scatter(GB, EIGHT) == pytest.approx(expected)


def test_an_all_reduce_goes_round_twice() -> None:
    """H200 nodes of 8 reach 368 GB/s of bus bandwidth (Bekman, network chapter): 4.76 ms for 1 GB."""
    seconds = c.all_reduce(GB, EIGHT)
    assert seconds == pytest.approx(BASE_SECONDS + 14 * NVLINK_LATENCY + 2 * 7 / 8 * GB / NVLINK)
    assert seconds == pytest.approx(4.76e-3, rel=0.02)


def test_one_gpu_has_nobody_to_talk_to() -> None:
    alone = group(parse_hardware("1xH200"), 1)
    for collective in (c.all_gather, c.reduce_scatter, c.all_reduce):
        assert collective(GB, alone) == 0.0


def test_rings_between_nodes_share_all_adapters() -> None:
    """8 x 48 GB/s are more than NVLink's 371; the one Ethernet adapter of a node holds everyone up."""
    assert TWO_NODES.bytes_per_second == pytest.approx(NVLINK)
    assert SLOW.bytes_per_second == pytest.approx(12 * GB)
    assert c.all_gather(GB, SLOW) == pytest.approx(15 / 16 * GB / (12 * GB), rel=0.01)


def test_a_group_with_one_gpu_a_node_has_one_adapter() -> None:
    """Data parallelism over tensor-parallel nodes: rank r of each node."""
    replicas = group(parse_hardware("4x8xH200"), 4, stride=8)
    assert (replicas.per_node, replicas.nodes) == (1, 4)
    assert replicas.bytes_per_second == pytest.approx(ADAPTER)
    assert replicas.ring_latency_seconds == pytest.approx(3 * ADAPTER_LATENCY)


def test_groups_of_neighbours_stay_within_a_node() -> None:
    tensor = group(parse_hardware("2x8xH200"), 4)
    assert (tensor.per_node, tensor.nodes, tensor.inter) == (4, 1, None)


def test_few_bytes_take_the_tree_between_many_nodes() -> None:
    """A ring over 16 nodes waits for 15 network messages each way, a tree for 4."""
    many = group(parse_hardware("16x8xH200"), 128)
    seconds = c.all_reduce(1024, many)
    assert seconds == pytest.approx(BASE_SECONDS + 2 * (7 * NVLINK_LATENCY + 4 * ADAPTER_LATENCY), rel=1e-3)
    ring = 2 * (16 * 7 * NVLINK_LATENCY + 15 * ADAPTER_LATENCY)
    assert seconds < ring / 5


def test_a_tree_over_three_nodes_is_two_high() -> None:
    three = group(parse_hardware("3x8xH200"), 24)
    assert three.tree_latency_seconds == pytest.approx(7 * NVLINK_LATENCY + 2 * ADAPTER_LATENCY)


def test_the_tree_has_less_than_the_rings_rate() -> None:
    many = group(parse_hardware("16x8xH200"), 128)
    more = c.all_reduce(2**20, many) - c.all_reduce(2**19, many)
    assert more == pytest.approx(2 * 2**19 / (0.92 * NVLINK), rel=1e-3)


def test_many_bytes_take_the_ring() -> None:
    assert c.all_reduce(GB, TWO_NODES) == pytest.approx(2 * 15 / 16 * GB / NVLINK, rel=0.1)


def test_sums_between_two_gpus_take_as_long_as_measured() -> None:
    path = Path(__file__).parents[3] / "benchmarks/accuracy/results/pair_link.json"
    kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    pair = group(parse_hardware("4xH200"), 2)
    for kernel in kernels:
        assert c.all_reduce(kernel["bytes"], pair) == pytest.approx(kernel["microseconds"] * 1e-6, rel=0.12)
    assert len(kernels) == 7


def overlapped() -> list[dict[str, Any]]:
    """What benchmarks/overlap measured between two H200, with NCCL as it is."""
    path = Path(__file__).parents[3] / "benchmarks/overlap/results/2xh200.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    changed = {"NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_PROTO"}
    return [line for line in lines if not changed.intersection(line["nccl_variables"])]


def test_gathers_between_two_gpus_take_as_long_as_measured() -> None:
    pair = group(parse_hardware("4xH200"), 2)
    of = {"all_gather": c.all_gather, "reduce_scatter": c.reduce_scatter, "all_reduce": c.all_reduce}
    alone = [line for line in overlapped() if "milliseconds" in line and line["megabytes"] >= 64]
    for line in alone:
        seconds = of[line["collective"]](line["megabytes"] * 2**20, pair)
        assert seconds == pytest.approx(line["milliseconds"] * 1e-3, rel=0.15)
    assert len(alone) == 15


def test_kernels_are_slowed_as_measured() -> None:
    """Blocks of NCCL hold multiprocessors; most kernels take as much longer as these are missing."""
    shares = [line["blocks"] / line["multiprocessors"] for line in overlapped() if "blocks" in line]
    assert shares == pytest.approx([held("nvlink4")] * 3, rel=0.02)
    slower = {True: list[float](), False: list[float]()}
    for line in overlapped():
        if "kernel" in line:
            slower[line["kernel"] == "products of experts"].append(line["kernel_slower"])
    assert statistics.mean(slower[False]) == pytest.approx(1 / (1 - held("nvlink4")) - 1, abs=0.03)
    assert statistics.mean(slower[True]) == pytest.approx(table()["communication"]["grouped"] - 1, abs=0.02)


def test_more_ranks_than_gpus_count_as_more_nodes() -> None:
    spread = group(parse_hardware("4xH200"), 8)
    assert isinstance(spread, Group)
    assert (spread.per_node, spread.nodes) == (4, 2)
    assert c.all_gather(GB, spread) > 0.0


def test_few_bytes_over_many_gpus_take_the_protocol_with_faster_messages() -> None:
    """128 nodes of 8: 896 steps inside nodes, 127 between, of LL128's 1.9 and 4 us instead of 3.4 and 14."""
    many = group(parse_hardware("128x8xH200"), 1024)
    sent = 2**20 * 1023 / 1024 / NVLINK
    simple = 8.4e-6 + 896 * 3.4e-6 + 127 * 14e-6 + sent
    ll128 = 14e-6 + 896 * 1.9e-6 + 127 * 4e-6 + sent / 0.92
    assert c.all_gather(2**20, many) == pytest.approx(ll128)
    assert ll128 < 0.5 * simple


def test_many_bytes_take_the_protocol_with_the_full_rate() -> None:
    many = group(parse_hardware("128x8xH200"), 1024)
    more = c.all_gather(64 * GB, many) - c.all_gather(63 * GB, many)
    assert more == pytest.approx(GB * 1023 / 1024 / NVLINK)


def test_without_nvlink_there_is_one_protocol() -> None:
    pcie = group(parse_hardware("4xRTX4080"), 4)
    assert pcie.ll128_latency_seconds is None
    assert c.all_gather(1024, pcie) == pytest.approx(BASE_SECONDS + 3 * 5.7e-6 + 768 / (13 * GB))


def test_an_oversubscribed_fabric_divides_what_passes_between_nodes() -> None:
    full, half = (group(parse_hardware(f"16x8xH200+ib100{factor}"), 128) for factor in ("", "/2"))
    assert full.bytes_per_second == pytest.approx(8 * 12 * GB)
    assert half.bytes_per_second == pytest.approx(8 * 6 * GB)
    assert c.all_gather(GB, half) > 1.9 * c.all_gather(GB, full)


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [
        ("2x8xH200", "nvlink4 and 8xib400"),  # 384 GB/s of adapters next to 371 of NVLink
        ("2x4xRTX4090+ib200", "pcie4x16 through host memory"),  # four adapters of 24 GB/s next to 13
        ("2x8xH200+eth100", "1xeth100"),
    ],
)
def test_a_network_is_named_where_it_is_slower_or_hardly_faster(gpus: str, shown: str) -> None:
    hardware = parse_hardware(gpus)
    one = Strategy(engine="fsdp2", data_parallel=hardware.world_size)
    assert slowest_links(hardware, one)[0] == shown
