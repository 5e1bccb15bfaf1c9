"""Which device this machine has."""

import json
import os
import re
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardwise.device import Device, NoDevice, Replay
from shardwise.device.fake import FakeNvml
from shardwise.device.nvml import open_nvml
from shardwise.errors import MachineError

VENDORS: tuple[Callable[[], Device], ...] = (open_nvml,)  # each opens a driver, or says why it cannot

REPLAY = "SHARDWISE_DEVICE"  # a JSON file of `record` that stands in for this machine's GPUs, or `none`
FAKE = "fake:"  # in its place: a fake driver, whose state is the file named after it

LIMIT_SECONDS = 30.0  # a driver that takes longer to open hangs

_OTHERS = {"rocm": "AMD", "xpu": "Intel"}  # vendors of torch's builds that no device here can see yet


def find() -> Device:
    """The first vendor's device with GPUs, else a NoDevice; MachineError for a bad SHARDWISE_DEVICE."""
    stand_in = os.environ.get(REPLAY)
    if stand_in == "none":
        return NoDevice(f"{REPLAY}=none hides all GPUs")
    if stand_in:
        try:
            if stand_in.startswith(FAKE):
                return open_nvml(FakeNvml(stand_in.removeprefix(FAKE)))
            return Replay(json.loads(Path(stand_in).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{REPLAY} names no recorded or fake device: {error}"
            raise MachineError(what, where=stand_in, fix=f"unset {REPLAY}") from None
    # GPUs first, then a driver that fails, then one that is missing
    return min(map(_opened, VENDORS), key=lambda one: 2 - one.broken if isinstance(one, NoDevice) else 0)


def fake_file() -> Path | None:
    """The state of the fake driver, where SHARDWISE_DEVICE names one: nothing computes on its cards."""
    stand_in = os.environ.get(REPLAY, "")
    return Path(stand_in.removeprefix(FAKE)) if stand_in.startswith(FAKE) else None


def _opened(vendor: Callable[[], Device]) -> Device:
    """The vendor's device, waited for in a thread: a call of a hanging driver never returns."""
    answers: list[Device] = []
    thread = threading.Thread(target=lambda: answers.append(vendor()), daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    if thread.is_alive():
        return NoDevice(f"the GPU driver did not answer within {LIMIT_SECONDS:.0f} s", broken=True)
    return answers[0]


def unseen_vendor() -> str | None:
    """A warning where torch is built for GPUs that shardwise cannot count; None where it is not."""
    try:
        build = re.search("|".join(_OTHERS), version("torch").partition("+")[2])
    except PackageNotFoundError:
        return None
    return build and (
        f"torch is built for {_OTHERS[build[0]]} GPUs ({build[0]}), which shardwise cannot count or measure: "
        "set their number with --processes, and describe them for the planner with --gpus"
    )
