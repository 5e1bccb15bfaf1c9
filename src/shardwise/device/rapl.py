"""Energy of a node's CPU packages and their DRAM by RAPL, as Linux shows it in /sys/class/powercap.

Names of folders and files: Documentation/power/powercap of Linux. Intel has both, AMD packages alone.
"""

import re
from pathlib import Path
from typing import Literal

from shardwise.device import Unavailable

Part = Literal["cpu", "dram"]
PARTS: tuple[Part, ...] = ("cpu", "dram")

ROOT = Path("/sys/class/powercap")
PACKAGE, DRAM = r"intel-rapl:\d+", r"intel-rapl:\d+:\d+"
"""`intel-rapl-mmio:0` is the same package by another way; a zone `psys` contains all packages."""

JOULES = 1e-6  # of a counter's unit
REFUSED = "only root may read it (CVE-2020-8694); root can allow it until the next boot: chmod a+r energy_uj"


class Rapl:
    """The counters of one node. Read them at least once while they go round: minutes under full load."""

    def __init__(self, root: Path = ROOT) -> None:
        packages = _zones(root, PACKAGE, "package")
        why = f"{root} shows no CPU package (a container or virtual machine hides them; or no intel_rapl)"
        self._zones: dict[Part, list[_Zone] | Unavailable] = {"cpu": packages or Unavailable(reason=why)}
        missing = "this CPU counts no DRAM on its own" if packages else why
        self._zones["dram"] = _zones(root, DRAM, "dram") or Unavailable(reason=missing)

    def joules(self, part: Part) -> float | Unavailable:
        """Of all packages, since the first call; Unavailable from the first reading that fails on."""
        zones = self._zones[part]
        if isinstance(zones, Unavailable):
            return zones
        try:
            return JOULES * sum(zone.count() for zone in zones)
        except PermissionError:
            self._zones[part] = found = Unavailable(reason=REFUSED)
        except (OSError, ValueError) as error:
            self._zones[part] = found = Unavailable(reason=f"RAPL: {error}")
        return found


class _Zone:
    """A counter that starts again after `max_energy_range_uj`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: int | None = None
        self._sum = 0

    def count(self) -> int:
        """Microjoules since the first call."""
        now, last = self._read("energy_uj"), self._last
        if last is not None:
            self._sum += now - last + (self._read("max_energy_range_uj") if now < last else 0)
        self._last = now
        return self._sum

    def _read(self, file: str) -> int:
        return int((self._folder / file).read_text(encoding="ascii"))


def _zones(root: Path, pattern: str, name: str) -> list[_Zone]:
    try:
        folders = sorted(one for one in root.iterdir() if re.fullmatch(pattern, one.name))
        return [_Zone(one) for one in folders if (one / "name").read_text(encoding="ascii").startswith(name)]
    except OSError:
        return []
