"""NVIDIA GPUs by their management library (NVML). It makes no CUDA context and waits for no GPU."""

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from shardwise.device import (
    POWER_LIMIT,
    Card,
    Device,
    NoDevice,
    NoPermission,
    Paths,
    Reading,
    Unavailable,
)

T = TypeVar("T")

LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t in the words of `nvidia-smi topo -m`; 0: two GPUs of one board."""

SWITCH = "switch"
CLOCK_REASONS = {
    0x02: "clocks set by an administrator",
    0x08: "hardware slowdown (heat, or too little power from the supply)",
    0x20: "heat (software slowdown)",
    0x40: "heat (hardware slowdown)",
    0x80: "power brake of the chassis",
}
"""nvmlClocksEventReasons that mean trouble."""

ORDINARY_CLOCK_REASONS = {
    0x01: "idle",
    0x04: POWER_LIMIT,
    0x10: "sync boost with a slower GPU",
    0x100: "display clocks",
}

READINGS: Mapping[Reading, Callable[[Any, Any], float]] = {
    # version 2 leaves out what the driver reserves for itself
    "memory_used_bytes": lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used),
    "energy_joules": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    "power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "power_limit_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000,
    "power_default_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
    "power_min_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[0] / 1000,
    "power_max_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[1] / 1000,
    "temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "sm_clock_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "utilization_fraction": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    # drivers before 535 know only this name of it
    "clock_reasons": lambda nvml, gpu: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
}


def open_nvml(library: Any = None) -> Device:
    """The NVIDIA GPUs of this machine; `library` stands in for the module pynvml of nvidia-ml-py."""
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return NoDevice("nvidia-ml-py is not installed: pip install nvidia-ml-py", broken=True)
    try:
        library.nvmlInit()
        device = Nvml(library)
    except library.NVMLError as error:
        if error.value == library.NVML_ERROR_LIBRARY_NOT_FOUND:
            return NoDevice("there is no NVIDIA driver (libnvidia-ml.so.1)")
        return NoDevice(f"NVML: {error}", broken=True)
    return device if device.cards else NoDevice("the NVIDIA driver shows no GPU", broken=True)


class Nvml:
    """The GPUs that NVML lets this process use."""

    visible_variable = "CUDA_VISIBLE_DEVICES"
    clock_reasons: Mapping[int, str] = CLOCK_REASONS
    ordinary_clock_reasons: Mapping[int, str] = ORDINARY_CLOCK_REASONS

    def __init__(self, library: Any) -> None:
        """`library` is the module pynvml, after nvmlInit. NVMLError where a GPU is lost."""
        self._nvml = library
        handles = [handle for i in range(library.nvmlDeviceGetCount()) if (handle := self._handle(i))]
        self._handles = {library.nvmlDeviceGetUUID(handle): handle for handle in handles}
        self.cards: Sequence[Card] = [self._card(index, uuid) for index, uuid in enumerate(self._handles)]

    def driver_version(self) -> str | Unavailable:
        return self._ask(lambda: str(self._nvml.nvmlSystemGetDriverVersion()))

    def read(self, uuid: str, what: Reading) -> float | Unavailable:
        return self._of(uuid, READINGS[what])

    def processes(self, uuid: str) -> Mapping[int, int | Unavailable] | Unavailable:
        found = self._of(uuid, lambda nvml, gpu: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
        if isinstance(found, Unavailable):
            return found
        unknown = Unavailable(reason="NVML does not show this process's memory")
        return {one.pid: unknown if one.usedGpuMemory is None else one.usedGpuMemory for one in found}

    def limit_power(self, uuid: str, watts: float) -> Unavailable | None:
        def limit(nvml: Any, gpu: Any) -> None:
            nvml.nvmlDeviceSetPowerManagementLimit(gpu, round(watts * 1000))

        return self._of(uuid, limit)

    def paths(self) -> Paths:
        """NVLinks where two GPUs have them, directly or through switches; else their PCIe topology."""
        nvml, gpus, found = self._nvml, list(self._handles.values()), {}
        links = [self._links(gpu) for gpu in gpus]
        buses = [nvml.nvmlDeviceGetPciInfo(gpu).busId for gpu in gpus]
        for i, j in itertools.permutations(range(len(gpus)), 2):
            # a switch joins all its GPUs, each with all its links
            count = links[i][buses[j]] or min(links[i][SWITCH], links[j][SWITCH])
            level = self._ask(partial(nvml.nvmlDeviceGetTopologyCommonAncestor, gpus[i], gpus[j]))
            if count:
                found[i, j] = f"NV{count}"
            elif not isinstance(level, Unavailable):
                found[i, j] = LEVELS[level]
        return found

    def _links(self, gpu: Any) -> Counter[str]:
        """Active NVLinks of a GPU by what is at their other end: a GPU's PCI bus id, or SWITCH."""
        nvml, ends = self._nvml, Counter[str]()
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not nvml.nvmlDeviceGetNvLinkState(gpu, link):
                    continue
                kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link)
                switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
                ends[SWITCH if switch else nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId] += 1
            except nvml.NVMLError:
                break  # the GPU has no link of this number, or none at all
        return ends

    def _handle(self, number: int) -> Any:
        """None where this process may not use the GPU, as a control group can rule."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(number)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
                return None
            raise

    def _card(self, index: int, uuid: str) -> Card:
        ask, nvml = partial(self._of, uuid), self._nvml
        return Card(
            index=index,
            uuid=uuid,
            name=nvml.nvmlDeviceGetName(self._handles[uuid]),
            memory_bytes=ask(lambda _, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)),
            pcie_generation=ask(lambda _, gpu: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu))),
            pcie_lanes=ask(lambda _, gpu: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu))),
            compute_capability=ask(
                lambda _, gpu: ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(gpu)))
            ),
            divided=ask(lambda _, gpu: nvml.nvmlDeviceGetMigMode(gpu)[0]) == 1,
        )

    def _of(self, uuid: str, question: Callable[[Any, Any], T]) -> T | Unavailable:
        if uuid not in self._handles:
            return Unavailable(reason=f"NVML shows no GPU {uuid}")
        return self._ask(lambda: question(self._nvml, self._handles[uuid]))

    def _ask(self, question: Callable[[], T]) -> T | Unavailable:
        try:
            return question()
        except self._nvml.NVMLError as error:
            refused = error.value == self._nvml.NVML_ERROR_NO_PERMISSION
            return (NoPermission if refused else Unavailable)(reason=f"NVML: {error}")
