"""`--gpus`: what a person writes, and what is taken for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import JobError, render
from shardwise.hardware.catalog import gpus
from shardwise.hardware.parse import known_names, parse_hardware, resized, with_slot


@pytest.mark.parametrize("name", [gpu.name for gpu in gpus()])
@pytest.mark.parametrize("join", [" ", "-", ""])
def test_every_card_is_known_by_its_own_name(name: str, join: str) -> None:
    assert parse_hardware(name.replace(" ", join)).gpu.name == name


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "name"),
    [
        ("RTX4080", 1, 1, "RTX 4080"),
        ("4xRTX4080", 1, 4, "RTX 4080"),
        ("2x8xH100", 2, 8, "H100 SXM"),
        ("64x8xH100", 64, 8, "H100 SXM"),
        (" 4 x RTX 4080 ", 1, 4, "RTX 4080"),
        ("4×rtx-4080", 1, 4, "RTX 4080"),
        ("4*RTX4080", 1, 4, "RTX 4080"),
        ("4X rtx_4080_super", 1, 4, "RTX 4080 SUPER"),
        ("NVIDIA GeForce RTX 4080", 1, 1, "RTX 4080"),
        ("8xNVIDIA H100 80GB HBM3", 1, 8, "H100 SXM"),
        ("4x4090", 1, 4, "RTX 4090"),
        ("4070", 1, 1, "RTX 4070"),
        ("rtx4070supertI", 1, 1, "RTX 4070 Ti SUPER"),
        ("RTX 4060 Ti", 1, 1, "RTX 4060 Ti"),
        ("4060-Ti-16GB", 1, 1, "RTX 4060 Ti 16GB"),
        ("RTX4080-16GB", 1, 1, "RTX 4080"),
        ("H100", 1, 1, "H100 SXM"),
        ("H100-SXM", 1, 1, "H100 SXM"),
        ("H100-SXM5-80GB", 1, 1, "H100 SXM"),
        ("h100 pcie", 1, 1, "H100 PCIe"),
        ("H100-94GB", 1, 1, "H100 NVL"),
        ("H200", 1, 1, "H200 SXM"),
        ("A100-40GB", 1, 1, "A100 SXM 40GB"),
        ("A100-80GB-PCIe", 1, 1, "A100 PCIe 80GB"),
        ("A100-SXM4-80GB", 1, 1, "A100 SXM 80GB"),
        ("A100SXM4-40GB", 1, 1, "A100 SXM 40GB"),
        ("L4", 1, 1, "L4"),
        ("L40", 1, 1, "L40"),
        ("RTX PRO 6000", 1, 1, "RTX PRO 6000 Blackwell"),
        ("GH200", 1, 1, "GH200 96GB"),
        ("8xMI300X", 1, 8, "MI300X"),
    ],
)
def test_what_is_meant(text: str, nodes: int, gpus: int, name: str) -> None:
    hardware = parse_hardware(text)
    assert (hardware.nodes, hardware.gpus_per_node, hardware.gpu.name) == (nodes, gpus, name)
    assert hardware.world_size == nodes * gpus
    assert (hardware.inter is None) == (nodes == 1)
    assert hardware.host_memory_bytes is None


@pytest.mark.parametrize(
    ("text", "memory_bytes", "stands_in"),
    [
        ("4x24GB", 24 * 10**9, "A10G"),
        ("1x16GiB", 16 * 2**30, "RTX 4060 Ti 16GB"),
        ("4x 24 gib", 24 * 2**30, "A10G"),
        ("15.5GiB", round(15.5 * 2**30), "RTX 4060 Ti 16GB"),
        ("80gb", 80 * 10**9, "A100 PCIe 80GB"),
    ],
)
def test_a_card_known_by_its_memory(text: str, memory_bytes: int, stands_in: str) -> None:
    hardware = parse_hardware(text)
    assert hardware.gpu.memory_bytes == memory_bytes
    assert hardware.gpu.assumed_from == stands_in
    assert hardware.intra.name == "pcie4x16 through host memory"


@pytest.mark.parametrize(
    ("text", "link", "gb_s", "host", "host_gb_s"),
    [
        # GeForce: no peer access, at most pcie4 unless asked for
        ("4xRTX4080", "pcie4x16 through host memory", 13.0, "pcie4x16", 26.0),
        ("4xRTX4080@pcie3", "pcie3x16 through host memory", 6.5, "pcie3x16", 12.0),
        ("4xRTX4080@pcie4x8", "pcie4x8 through host memory", 6.5, "pcie4x8", 13.0),
        ("2xRTX4060Ti-16GB", "pcie4x8 through host memory", 6.5, "pcie4x8", 13.0),
        ("4xRTX5090", "pcie4x16 through host memory", 13.0, "pcie4x16", 26.0),
        ("4xRTX5090@pcie5", "pcie5x16 through host memory", 28.0, "pcie5x16", 55.0),
        ("4x24GB@pcie5", "pcie5x16 through host memory", 28.0, "pcie5x16", 55.0),
        ("2x RTX3090 @ NVLink", "nvlink3-bridge", 48.0, "pcie4x16", 26.0),
        # cards with peer access: the generation of their own
        ("4xL40S", "pcie4x16", 24.0, "pcie4x16", 26.0),
        ("8xH100-PCIe", "pcie5x16", 48.0, "pcie5x16", 55.0),
        ("2xA100-PCIe-80GB@nvlink", "nvlink3", 240.0, "pcie4x16", 26.0),
        ("T4", "pcie3x16", 12.0, "pcie3x16", 12.0),
        # boards with NVLink
        ("8xH100", "nvlink4", 370.8, "pcie5x16", 55.0),
        ("8xH100@pcie5", "pcie5x16", 48.0, "pcie5x16", 55.0),
        ("8xA100-80GB", "nvlink3", 240.0, "pcie4x16", 26.0),
        ("8xB200", "nvlink5", 721.8, "pcie5x16", 55.0),
        ("8xV100-32GB", "nvlink2", 120.0, "pcie3x16", 12.0),
        ("GH200", "nvlink4", 370.8, "nvlink-c2c", 450.0),
        # a mesh: each GPU one link to each other
        ("8xMI300X", "infinity-fabric", 312.9, "pcie5x16", 55.0),
        ("2xMI300X", "infinity-fabric", 44.7, "pcie5x16", 55.0),
    ],
)
def test_links_of_a_node(text: str, link: str, gb_s: float, host: str, host_gb_s: float) -> None:
    hardware = parse_hardware(text)
    assert (hardware.intra.name, hardware.host_link.name) == (link, host)
    assert hardware.intra.bytes_per_second == pytest.approx(gb_s * 1e9)
    assert hardware.host_link.bytes_per_second == pytest.approx(host_gb_s * 1e9)
    assert 1e-6 < hardware.intra.latency_seconds < 1e-5
    assert hardware.intra.source
    assert hardware.host_link.source


@pytest.mark.parametrize(
    ("text", "network", "gb_s_of_a_gpu"),
    [
        ("2x8xH100", "8xib400", 48.0),  # DGX H100
        ("2x8xA100-80GB", "8xib200", 24.0),
        ("2x8xV100-32GB", "4xib100", 6.0),
        ("2x8xH100@nvlink+ib400", "8xib400", 48.0),
        ("2x8xH100+1xib400", "1xib400", 6.0),
        ("2x8xH100+8xeth400", "8xeth400", 48.0),
        ("2x4xRTX4080+eth25", "1xeth25", 0.75),
        ("2x4xRTX4080@pcie4 + IB100", "4xib100", 12.0),
        ("2x1xRTX4080+eth10", "1xeth10", 1.2),
        ("2x8xH100+ib400/2", "8xib400/2", 24.0),
        ("2x8xH100+4xeth100/1.5", "4xeth100/1.5", 4.0),
    ],
)
def test_networks(text: str, network: str, gb_s_of_a_gpu: float) -> None:
    inter = parse_hardware(text).inter
    assert inter is not None
    assert inter.name == network
    assert inter.bytes_per_second == pytest.approx(gb_s_of_a_gpu * 1e9)
    assert inter.latency_seconds == pytest.approx(14e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4xH1000", "no GPU is called 'H1000'"),
        ("4xH1000", "did you mean H100 SXM"),
        ("4xRTX4091", "did you mean RTX 4090"),
        ("H100x8", "the number comes first: 8xH100. "),
        ("RTX 4090x2", "the number comes first: 2xRTX4090. "),
        ("RTX4080Laptop", "did you mean RTX 4080"),
        ("RTX 3080 12GB", "no GPU is called"),  # another card than the RTX 3080 and the RTX 3080 Ti
        ("garbage", "written by its memory: 4x24GB"),
        ("RTX", "no GPU is called"),
        ("A100", "'A100' may be A100 SXM 40GB or A100 SXM 80GB"),
        ("V100", "write more of the name, as V100-SXM2-16GB"),
        ("RTX6000", "may be RTX 6000 Ada, RTX PRO 6000 Blackwell or"),
        ("4060 Ti", "may be RTX 4060 Ti or RTX 4060 Ti 16GB"),
        ("0xH100", "0 GPUs cannot train"),
        ("0x8xH100", "0 GPUs cannot train"),
        ("1000000x8xH100", "8000000 GPUs are more than the 16384 that can be planned for"),
        ("2049x8xH100", "write at most 16384 in all"),
        ("3x3x3xH100", "write it as 2x8xH100"),
        ("9" * 5000 + "xH100", "write it as 2x8xH100"),
        ("", "describes no hardware"),
        ("4x-", "describes no hardware"),
        ("@nvlink", "describes no hardware"),
        ("2x8xH100@nvlink@pcie4", "describes no hardware"),
        ("2xRTX4080,2xRTX3090", "describes no hardware"),
        ("0GB", "no GPU has 0GB"),
        ("9999GB", "no GPU has 9999GB"),
        ("4xH100@foo", "no link between GPUs is called 'foo'"),
        ("4xH100@pcie2", "no link between GPUs is called 'pcie2'"),
        ("RTX4080@nvlink", "RTX 4080 has no NVLink"),
        ("MI300X@nvlink", "MI300X has no NVLink"),
        ("4x24GB@nvlink", "24GB has no NVLink"),
        ("4xRTX3090@nvlink", "joins at most 2 RTX 3090 of a node, not 4"),
        ("16xH100", "joins at most 8 H100 SXM of a node, not 16"),
        ("RTX4080@pcie5", "RTX 4080 is a card of pcie4x16"),
        ("RTX4060@pcie4x16", "RTX 4060 is a card of pcie4x8"),
        ("8xH100+ib400", "one node uses no network"),
        ("2x4xRTX4080", "the network between 2 nodes is not known"),
        ("2x8xH100+ib300", "no network is called 'ib300'"),
        ("4xRTX4080+128", "128 says neither what it is of nor its unit"),
        ("4xRTX4080@128GiB", "128gib is a size of memory, not a link between GPUs"),
        ("2x8xH100+512", "write 2x8xH100+512GiB; for a network, one of eth10,"),
        ("4xRTX4080+0GiB", "'0gib' is no size of a host's memory"),
        ("2x8xH100+ib400+much", "'much' is no size of a host's memory"),
        ("2x8xH100+0xib400", "no network is called '0xib400'"),
        ("2x8xH100+ib400/0.5", "write a factor from 1, as ib400/2"),
    ],
)
def test_what_cannot_be_read_is_said_with_a_way_out(text: str, said: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_hardware(text)
    assert caught.value.exit_code == 2
    shown = render(caught.value)
    assert said in shown
    assert f"at:  hardware {text!r}" in shown
    assert "fix:" in shown


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("4xRTX4080@128GiB", "4xRTX4080+128GiB"),
        ("4xRTX4080 @ 64 gb", "4xRTX4080+64GB"),
        ("4xRTX4080+128", "4xRTX4080+128GiB"),
        ("2x4xRTX4080@pcie3+eth25+128", "2x4xRTX4080@pcie3+eth25+128GiB"),
        ("2x8xH100+512", "2x8xH100+512GiB"),
        ("2x4xRTX4080@128GiB+eth25", "2x4xRTX4080+eth25+128GiB"),
    ],
)
def test_memory_in_the_wrong_words_is_answered_with_the_right_ones(text: str, meant: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_hardware(text)
    [problem] = caught.value.problems
    assert problem.fix.partition(";")[0] == f"for the memory of a node's host write {meant}"
    assert parse_hardware(meant).host_memory_bytes


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    fixes = {}
    for text in ("4xFoobar", "8xH1000"):
        with pytest.raises(JobError) as caught:
            parse_hardware(text)
        fixes[text] = caught.value.problems[0].fix
    known = "Known are RTX 2080, 3060, 3070,"
    assert fixes["4xFoobar"].startswith(known)
    assert fixes["8xH1000"].startswith(f"did you mean H100 SXM, H100 NVL or H100 PCIe? {known}")
    assert fixes["4xFoobar"].endswith("B200, MI300X. Any other card is written by its memory: 4x24GB")
    assert len(known_names()) < 250, "one glance"
    for name in known_names().replace(";", ",").removeprefix("RTX ").split(", "):
        assert any(name in gpu.name for gpu in gpus()), name


@pytest.mark.parametrize(
    ("text", "host_bytes"),
    [
        ("4xRTX4080+128GiB", 128 * 2**30),
        ("4x24GB + 64 GB", 64 * 10**9),
        ("4xRTX4080@pcie3+96gib", 96 * 2**30),
        ("2x4xRTX4080+eth25+256GiB", 256 * 2**30),
        ("2x8xH100+2048GiB", 2048 * 2**30),
    ],
)
def test_the_memory_of_each_host(text: str, host_bytes: int) -> None:
    without = text.rpartition("+")[0]
    assert parse_hardware(text) == replace(parse_hardware(without), host_memory_bytes=host_bytes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4xRTX4080", "4xRTX4080@pcie4x16"),
        ("2xRTX4060Ti-16GB+64GiB", "2xRTX4060Ti-16GB@pcie4x8+64GiB"),
        ("2x4xRTX4090+eth100+256GiB", "2x4xRTX4090@pcie4x16+eth100+256GiB"),
        ("4xRTX4080@pcie4x8", None),
        ("8xH100", None),
    ],
)
def test_the_slot_that_is_assumed_can_be_said(text: str, said: str | None) -> None:
    hardware = parse_hardware(text)
    assert with_slot(text, hardware) == said
    assert said is None or parse_hardware(said) == hardware


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "expected"),
    [
        ("8xH100", 1, 2, "2xH100"),
        ("H100", 16, 8, "16x8xH100"),
        ("2x8xH100+ib400/2+512GiB", 1, 4, "4xH100+512gib"),
        ("4xRTX4090@pcie4x8+eth100", 2, 4, "2x4xRTX4090@pcie4x8+eth100"),
        ("8xH100", None, 4, "4xH100"),
        ("8xH100+ib400", None, 64, "8x8xH100+ib400"),
        ("H100", None, 8, "8xH100"),
    ],
)
def test_the_same_kind_in_another_number(text: str, nodes: int | None, gpus: int, expected: str) -> None:
    assert resized(text, nodes=nodes, gpus=gpus) == expected
    assert parse_hardware(expected).world_size == gpus * (nodes or 1)


def test_gpus_that_fill_no_nodes() -> None:
    with pytest.raises(JobError, match="12 GPUs do not fill nodes of 8"):
        resized("8xH100", nodes=None, gpus=12)
