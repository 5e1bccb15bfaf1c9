"""A fake NVML: cards whose state is one JSON file, which several processes share.

It stands in for the module pynvml, so `Nvml` runs on it unchanged, and so does any other program that takes
`sys.modules["pynvml"]`. SHARDWISE_DEVICE=fake:FILE makes it this machine's driver. No function of it reaches
the real library: what is not answered here is "Not Supported".

    {"driver": "580.95.05", "root": true, "fails": {FUNCTION: {"from": 2, "until": 2, "error": 4, "seen": 0}},
     "slow_seconds": {FUNCTION or UUID: 0.5}, "clients": [PID],
     "calls": [what changed a card: who, when, watts],
     "gpus": [{"uuid", "name", "power_limit_watts", "load": 0 to 1, ...: see `CARD`}]}

`root` false refuses every change. The n-th call of a function fails from `from` (1 is the first) to `until`,
or always from there on, for the card `uuid` if that is named. A card with `lost` answers nothing. A field
that is null is "Not Supported". Without persistence mode a limit falls back to the default when the last
process has closed the driver, as on real cards.
"""

import fcntl
import importlib
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardwise.folders import replace_json

State = dict[str, Any]

TICK_SECONDS = 0.1  # the energy counter of an H100 or H200 advances in such steps
MAX_CLOCK_MHZ, MIN_CLOCK_RATIO = 1980, 0.1
IDLE, POWER_CAP = 0x1, 0x4  # of nvmlClocksEventReasons

CARD: Mapping[str, Any] = {
    "name": "NVIDIA H200",
    "memory_bytes": 143771 << 20,
    "power_limit_watts": 700.0,
    "power_default_watts": 700.0,
    "power_min_watts": 200.0,
    "power_max_watts": 700.0,
    "idle_watts": 75.0,
    "full_watts": 690.0,  # at load 1, if the limit allows it
    "persistence": 1,
    "mig": 0,
    "load": 0.0,
    "joules": 0.0,  # up to `seconds`
    "counted_joules": 0.0,  # what the counter shows, up to the last tick before `seconds`
    "lost": False,
}


def create(file: str | Path, cards: int = 1, *, root: bool = True, **changes: Any) -> Path:
    """Write the state of a machine with `cards` H200; `changes` are fields of `CARD`. Returns the file."""
    now = time.time()
    gpus = [{"uuid": f"GPU-fake-{number}", "seconds": now, **CARD, **changes} for number in range(cards)]
    path = Path(file).absolute()
    replace_json(path, {"driver": "580.95.05", "root": root, "fails": {}, "slow_seconds": {}, "clients": [],
                        "calls": [], "gpus": gpus})  # fmt: skip
    return path


class FakeNvml:
    """The module pynvml on cards that are a file. A handle is a card's UUID."""

    def __init__(self, file: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        """OSError, ValueError, KeyError for a bad `file`."""
        self.file, self._clock = Path(file).absolute(), clock
        self._real = importlib.import_module("pynvml")  # for its constants and classes of errors
        if not all({"uuid", "seconds", *CARD} <= set(gpu) for gpu in self.state()["gpus"]):
            raise KeyError(f"a card lacks one of {', '.join(CARD)}")

    def __getattr__(self, name: str) -> Any:
        if name in ANSWERS:
            return partial(self._answer, name)
        real = getattr(self._real, name)
        if name.lstrip("_").startswith("nvml") and inspect.isfunction(real):
            return partial(self._fail, self._real.NVML_ERROR_NOT_SUPPORTED)
        return real

    def state(self) -> State:
        """All of it, as it is now."""
        found: State = json.loads(self.file.read_text(encoding="utf-8"))
        return found

    @contextmanager
    def changing(self) -> Iterator[State]:
        """The state, while nobody else changes it; written when the block ends without error."""
        with Path(f"{self.file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self.state()
            yield state
            replace_json(self.file, state)

    def change(self, uuid: str, **fields: Any) -> None:
        """Change a card as nature or another person would, `load=0.9`: its energy so far is counted first."""
        with self.changing() as state:
            gpu = self._card(state, uuid)
            self._count(gpu)
            gpu.update(fields)

    def clock_ratio(self, uuid: str) -> float:
        """How fast the card runs now, against its highest clock: dynamic power goes with the clock's cube.

        Steps of a rehearsal ask for it, so one whose card does not answer hangs.
        """
        self._begin("clock_ratio", uuid)
        return _clock_ratio(self._card(self.state(), uuid))

    def nvmlInit(self) -> None:  # noqa: N802
        self._begin("nvmlInit")
        with self.changing() as state:
            self._forget_clients(state)
            state["clients"].append(os.getpid())

    def nvmlShutdown(self) -> None:  # noqa: N802
        with self.changing() as state:
            if os.getpid() in state["clients"]:
                state["clients"].remove(os.getpid())
            self._forget_clients(state)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return str(self.state()["driver"])

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.state()["gpus"])

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:  # noqa: N802
        gpus = self.state()["gpus"]
        if not 0 <= number < len(gpus):
            self._fail(self._real.NVML_ERROR_INVALID_ARGUMENT)
        return self._answer("nvmlDeviceGetUUID", gpus[number]["uuid"])  # type: ignore[no-any-return]

    def nvmlDeviceSetPowerManagementLimit(self, handle: str, milliwatts: int) -> None:  # noqa: N802
        self._set("nvmlDeviceSetPowerManagementLimit", handle, "power_limit_watts", milliwatts / 1000)

    def nvmlDeviceSetPersistenceMode(self, handle: str, mode: int) -> None:  # noqa: N802
        self._set("nvmlDeviceSetPersistenceMode", handle, "persistence", mode)

    def _set(self, function: str, uuid: str, field: str, value: float) -> None:
        self._begin(function, uuid)
        with self.changing() as state:
            gpu = self._card(state, uuid)
            if not state["root"]:
                self._fail(self._real.NVML_ERROR_NO_PERMISSION)
            least, most = gpu["power_min_watts"], gpu["power_max_watts"]
            if least is None or most is None:
                self._fail(self._real.NVML_ERROR_NOT_SUPPORTED)
            if field == "power_limit_watts" and not least <= value <= most:
                self._fail(self._real.NVML_ERROR_INVALID_ARGUMENT)
            self._count(gpu)
            call = {"function": function, "uuid": uuid, "before": gpu[field], "value": value}
            state["calls"].append({**call, "pid": os.getpid(), "seconds": self._clock()})
            gpu[field] = value

    def _answer(self, function: str, uuid: str, *arguments: Any) -> Any:
        self._begin(function, uuid)
        answer = ANSWERS[function](self, self._card(self.state(), uuid), *arguments)
        if answer is None:
            self._fail(self._real.NVML_ERROR_NOT_SUPPORTED)
        return answer

    def _begin(self, function: str, uuid: str = "") -> None:
        """Take the time that this call takes, and fail if it is to fail."""
        state = self.state()
        time.sleep(max(state["slow_seconds"].get(name, 0.0) for name in (function, uuid)))
        if function not in state["fails"] or state["fails"][function].get("uuid", uuid) != uuid:
            return
        with self.changing() as state:
            rule = state["fails"][function]
            rule["seen"] = rule.get("seen", 0) + 1
        if rule["from"] <= rule["seen"] <= rule.get("until", math.inf):
            self._fail(rule["error"])

    def _card(self, state: State, uuid: str) -> State:
        gpu: State | None = next((gpu for gpu in state["gpus"] if gpu["uuid"] == uuid), None)
        if gpu is None:
            self._fail(self._real.NVML_ERROR_NOT_FOUND)
        elif gpu["lost"]:
            self._fail(self._real.NVML_ERROR_GPU_IS_LOST)
        assert gpu is not None
        return gpu

    def _fail(self, error: int, *_: Any, **__: Any) -> None:
        raise self._real.NVMLError(error)

    def _forget_clients(self, state: State) -> None:
        """Without persistence mode, a limit lasts as long as some process has the driver open."""
        state["clients"] = [pid for pid in state["clients"] if _runs(pid)]
        for gpu in state["gpus"] if not state["clients"] else ():
            if not gpu["persistence"]:
                self._count(gpu)
                gpu["power_limit_watts"] = gpu["power_default_watts"]

    def joules(self, gpu: State) -> float:
        """What the counter of a card of the state shows now: the energy up to the last tick."""
        tick = math.floor(self._clock() / TICK_SECONDS) * TICK_SECONDS
        if tick <= gpu["seconds"]:
            return float(gpu["counted_joules"])
        return float(gpu["joules"] + _joules_until(gpu, tick))

    def _count(self, gpu: State) -> None:
        now = self._clock()
        gpu.update(counted_joules=self.joules(gpu), joules=gpu["joules"] + _joules_until(gpu, now))
        gpu["seconds"] = max(now, gpu["seconds"])


def _joules_until(gpu: State, end: float) -> float:
    """Since the card's last count: nothing has changed its load or limit from then on."""
    return draw_watts(gpu) * max(0.0, end - float(gpu["seconds"]))


def draw_watts(gpu: State) -> float:
    """What a card of the state draws."""
    return float(min(gpu["power_limit_watts"], _demand_watts(gpu)))


def _demand_watts(gpu: State) -> float:
    return float(gpu["idle_watts"] + gpu["load"] * (gpu["full_watts"] - gpu["idle_watts"]))


def _clock_ratio(gpu: State) -> float:
    demand, idle = _demand_watts(gpu), gpu["idle_watts"]
    if demand <= gpu["power_limit_watts"]:
        return 1.0
    dynamic = max(0.0, gpu["power_limit_watts"] - idle) / (demand - idle)
    return float(max(MIN_CLOCK_RATIO, dynamic ** (1 / 3)))


def _clock_reasons(gpu: State) -> int:
    return IDLE if gpu["load"] == 0 else POWER_CAP if _clock_ratio(gpu) < 1 else 0


def _milliwatts(field: str) -> Callable[..., int | None]:
    return lambda _, gpu: None if gpu[field] is None else round(gpu[field] * 1000)


def _range(_: FakeNvml, gpu: State) -> list[int] | None:
    least, most = gpu["power_min_watts"], gpu["power_max_watts"]
    return None if least is None or most is None else [round(least * 1000), round(most * 1000)]


def _fields(fake: FakeNvml, gpu: State, fields: list[Any]) -> list[Any]:
    """Power, average or now, of the card alone; other fields and scopes are not supported."""
    known = (fake.NVML_FI_DEV_POWER_INSTANT, fake.NVML_FI_DEV_POWER_AVERAGE)
    pairs = [field if isinstance(field, tuple) else (field, 0) for field in fields]
    value = SimpleNamespace(uiVal=round(draw_watts(gpu) * 1000))
    codes = [0 if name in known and scope == 0 else fake.NVML_ERROR_NOT_SUPPORTED for name, scope in pairs]
    return [SimpleNamespace(nvmlReturn=code, value=value) for code in codes]


ANSWERS: Mapping[str, Callable[..., Any]] = {
    "nvmlDeviceGetUUID": lambda _, gpu: gpu["uuid"],
    "nvmlDeviceGetName": lambda _, gpu: gpu["name"],
    "nvmlDeviceGetMemoryInfo": lambda _, gpu, *__: SimpleNamespace(
        total=gpu["memory_bytes"], used=5 << 20, free=gpu["memory_bytes"] - (5 << 20)
    ),
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda *_: 5,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda *_: 16,
    "nvmlDeviceGetCudaComputeCapability": lambda *_: (9, 0),
    "nvmlDeviceGetArchitecture": lambda *_: 9,
    "nvmlDeviceGetMigMode": lambda _, gpu: [gpu["mig"], gpu["mig"]],
    "nvmlDeviceGetPciInfo": lambda _, gpu: SimpleNamespace(busId=gpu["uuid"].encode()),
    "nvmlDeviceGetComputeRunningProcesses": lambda *_: [],
    "nvmlDeviceGetPersistenceMode": lambda _, gpu: gpu["persistence"],
    "nvmlDeviceGetTotalEnergyConsumption": lambda fake, gpu: round(fake.joules(gpu) * 1000),
    "nvmlDeviceGetPowerUsage": lambda _, gpu: round(draw_watts(gpu) * 1000),
    "nvmlDeviceGetPowerManagementLimit": _milliwatts("power_limit_watts"),
    "nvmlDeviceGetEnforcedPowerLimit": _milliwatts("power_limit_watts"),
    "nvmlDeviceGetPowerManagementDefaultLimit": _milliwatts("power_default_watts"),
    "nvmlDeviceGetPowerManagementLimitConstraints": _range,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _, gpu: _clock_reasons(gpu),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda _, gpu: _clock_reasons(gpu),
    "nvmlDeviceGetClockInfo": lambda _, gpu, *__: round(MAX_CLOCK_MHZ * _clock_ratio(gpu)),
    "nvmlDeviceGetMaxClockInfo": lambda *_: MAX_CLOCK_MHZ,
    "nvmlDeviceGetTemperature": lambda _, gpu, *__: round(30 + draw_watts(gpu) / 15),
    "nvmlDeviceGetUtilizationRates": lambda _, gpu: SimpleNamespace(
        gpu=round(gpu["load"] * 100), memory=round(gpu["load"] * 50)
    ),
    "nvmlDeviceGetFieldValues": _fields,
}


def _runs(pid: int) -> bool:
    """Whether a process exists that has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
