"""A machine's nvidia-smi as a script, and probes that answer at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PRINTED = HERE.parent / "hardware" / "nvidia_smi"
STATE = "{index}, {driver}, {used}, {limit}, 700.00, 200.00, 700.00, {throttle}"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an nvidia-smi on PATH that answers as the machine `name` does."""
    folder = tmp_path / "driver"
    folder.mkdir()

    def install(
        name: str = "h200x8",
        *,
        of: int = 4,
        version: str = "580.95.05",
        used: int = 4,
        limit: str = "700.00",
        throttle: str = "0x0000000000000001",
        knows_clocks: bool = True,
        instead: str | None = None,
    ) -> None:
        rows = (PRINTED / f"{name}.query.txt").read_text().splitlines()[:of]
        (folder / "query").write_text("\n".join(rows) + "\n")
        states = [
            STATE.format(index=i, driver=version, used=used, limit=limit, throttle=throttle)
            for i in range(of)
        ]
        (folder / "state").write_text("\n".join(states) + "\n")
        (folder / "version").write_text(f"{version}\n" * of)
        (folder / "list").write_text("".join(f"GPU {i}: x\n" for i in range(of)))
        cut = "cat" if knows_clocks else "cut -d, -f1-7"
        clocks = (
            "exit 0"
            if knows_clocks
            else "echo 'Field \"clocks_throttle_reasons.active\" is not valid'; exit 2"
        )
        script = f"""#!/bin/sh
cd {folder}
case "$1" in
  topo) cat {PRINTED}/{name}.topo.txt;;
  -L) cat list;;
  *pcie.link*) cat query;;
  *clocks_throttle*) {"cat state;" if knows_clocks else ""} {clocks};;
  *memory.used*) {cut} state;;
  *driver_version*) cat version;;
esac
"""
        program = folder / "nvidia-smi"
        program.write_text(script if instead is None else f"#!/bin/sh\n{instead}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


@pytest.fixture
def no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> str:
    """The module to run instead of the real probes."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{os.environ['PYTHONPATH']}")
    return "fake_probes"
