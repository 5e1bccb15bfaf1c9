"""CPU and DRAM energy from a folder like /sys/class/powercap."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from shardwise.device import Unavailable
from shardwise.device.rapl import Rapl
from shardwise.energy import Host

RANGE = 262_143_328_850  # microjoules, of a Xeon


class Powercap:
    """Two sockets with DRAM, a zone of the entire machine, and a second way to the first socket."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for zone, name in {
            "intel-rapl:0": "package-0",
            "intel-rapl:0:0": "dram",
            "intel-rapl:0:1": "core",
            "intel-rapl:1": "package-1",
            "intel-rapl:1:0": "dram",
            "intel-rapl:2": "psys",
            "intel-rapl-mmio:0": "package-0",
        }.items():
            (root / zone).mkdir(parents=True)
            (root / zone / "name").write_text(f"{name}\n")
            (root / zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
            self.set(zone, 1_000_000)
        (root / "intel-rapl").mkdir()

    def set(self, zone: str, microjoules: int) -> None:
        (self.root / zone / "energy_uj").write_text(f"{microjoules}\n")


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path / "powercap")


def test_packages_and_their_dram_are_added_and_nothing_twice(powercap: Powercap) -> None:
    rapl = Rapl(powercap.root)
    assert (rapl.joules("cpu"), rapl.joules("dram")) == (0.0, 0.0)
    for zone, joules in {"intel-rapl:0": 50, "intel-rapl:1": 30, "intel-rapl:2": 500,
                         "intel-rapl-mmio:0": 50, "intel-rapl:0:0": 7, "intel-rapl:1:0": 2,
                         "intel-rapl:0:1": 40}.items():  # fmt: skip
        powercap.set(zone, 1_000_000 + joules * 1_000_000)
    assert rapl.joules("cpu") == pytest.approx(80.0)
    assert rapl.joules("dram") == pytest.approx(9.0)


def test_a_counter_that_goes_round_goes_on(powercap: Powercap) -> None:
    rapl = Rapl(powercap.root)
    powercap.set("intel-rapl:0", RANGE - 4_000_000)
    rapl.joules("cpu")
    rapl = Rapl(powercap.root)
    assert rapl.joules("cpu") == 0.0
    powercap.set("intel-rapl:0", 6_000_000)
    assert rapl.joules("cpu") == pytest.approx(10.0), "4 J to the end of the range and 6 J after it"
    powercap.set("intel-rapl:0", 5_000_000)
    assert rapl.joules("cpu") == pytest.approx(10.0 + RANGE / 1e6 - 1.0), "once more round, but 1 J"


def reason(found: float | Unavailable) -> str:
    assert isinstance(found, Unavailable)
    return found.reason


def test_without_zones_the_reason_is_given(tmp_path: Path) -> None:
    rapl = Rapl(tmp_path / "absent")
    assert "absent shows no CPU package" in reason(rapl.joules("cpu"))
    assert reason(rapl.joules("cpu")) == reason(rapl.joules("dram"))


def test_an_amd_cpu_has_packages_alone(powercap: Powercap) -> None:
    for zone in ("intel-rapl:0:0", "intel-rapl:1:0"):
        (powercap.root / zone / "name").write_text("core\n")
    rapl = Rapl(powercap.root)
    assert rapl.joules("cpu") == 0.0
    assert reason(rapl.joules("dram")) == "this CPU counts no DRAM on its own"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_is_told_that_only_root_may_read() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o755)
        powercap = Powercap(Path(folder) / "powercap")
        for file in powercap.root.glob("*/energy_uj"):
            file.chmod(0o400)
        rapl = Rapl(powercap.root)
        os.seteuid(65534)
        try:
            found = rapl.joules("cpu")
        finally:
            os.seteuid(0)
    assert "CVE-2020-8694" in reason(found)
    assert isinstance(rapl.joules("cpu"), Unavailable), "a sum with a gap would be wrong"


def test_a_zone_that_breaks_is_no_number_from_there_on(powercap: Powercap) -> None:
    rapl = Rapl(powercap.root)
    rapl.joules("cpu")
    (powercap.root / "intel-rapl:1" / "energy_uj").write_text("")
    assert reason(rapl.joules("cpu")).startswith("RAPL: ")
    powercap.set("intel-rapl:1", 5)
    assert isinstance(rapl.joules("cpu"), Unavailable)
    assert rapl.joules("dram") == 0.0


def test_a_thread_follows_the_counters(powercap: Powercap) -> None:
    host = Host(Rapl(powercap.root))
    powercap.set("intel-rapl:0", 3_000_000)
    deadline = time.monotonic() + 10
    while host.joules()["cpu"] != pytest.approx(2.0) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert host.joules() == {"cpu": pytest.approx(2.0), "dram": 0.0}
