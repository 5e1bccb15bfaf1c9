"""Offloading: what works, and what DeepSpeed silently ignores."""

from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.edit import Put
from shardwise.lint.finding import Hit, rule
from shardwise.lint.rules.zero import ZERO, stage_of
from shardwise.lint.setup import Setup

OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"
_CONFIG, _OFFLOAD = "deepspeed/runtime/zero/config.py", "deepspeed/runtime/zero/offload_config.py"


_EARLIER = {OPTIMIZER: "cpu_offload", PARAMETERS: "cpu_offload_param"}  # names that still work


def place(document: Document, which: str) -> str:
    """The device, cpu or nvme; `none` for everything else, `auto` included."""
    value = "cpu" if document.on(ZERO, _EARLIER[which]) else document.get(ZERO, which, "device")
    return value if value in ("cpu", "nvme") else "none"


@rule("error", f"{_CONFIG}: offload_param, valid only with stage 3; run with 0.19.8")
def offload_param_needs_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    """At stages 0 to 2 parameters are not sharded; the request to offload them is silently ignored."""
    stage = stage_of(document)
    if stage in (0, 1, 2) and place(document, PARAMETERS) != "none":
        what = f"at stage {stage} DeepSpeed silently ignores it: the parameters stay on the GPU"
        fix = "`stage`: 3, or remove it (`offload_optimizer` works at stages 1 and 2)"
        yield Hit((ZERO, PARAMETERS), what, fix)


@rule("error", f"{_CONFIG}: offload_optimizer; run with 0.19.8")
def offload_optimizer_needs_zero(document: Document, _: Setup) -> Iterator[Hit]:
    """At stage 0 DeepSpeed silently ignores it: the optimizer stays on the GPU."""
    if stage_of(document) == 0 and place(document, OPTIMIZER) != "none":
        yield Hit((ZERO, OPTIMIZER), fix="`stage`: 1 or 2")


@rule("error", f"{_OFFLOAD}: nvme_path; run with 0.19.8")
def nvme_needs_a_path(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed does not check `nvme_path`: the first write fails, with a TypeError about NoneType."""
    for which in (OPTIMIZER, PARAMETERS):
        if place(document, which) == "nvme" and not document.get(ZERO, which, "nvme_path"):
            yield Hit((ZERO, which, "device"), fix='"nvme_path": a folder on a local NVMe disk')


@rule("error", "deepspeed/runtime/zero/stage_1_and_2.py: any device but `none` is the CPU")
def nvme_needs_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    """Only ZeRO-3 writes to NVMe; stages 1 and 2 use host memory instead."""
    key = (ZERO, OPTIMIZER, "device")
    if stage_of(document) in (1, 2) and place(document, OPTIMIZER) == "nvme":
        yield Hit(key, fix='"device": "cpu", or `stage`: 3', changes=(Put(key, "cpu"),))


@rule("error", f"{_OFFLOAD}: device")
def offload_without_device(document: Document, _: Setup) -> Iterator[Hit]:
    """The default of `device` is `none`: nothing is offloaded."""
    for which in (OPTIMIZER, PARAMETERS):
        section = document.section(ZERO, which)
        if section and "device" not in section:
            yield Hit((ZERO, which), fix='"device": "cpu", or remove the section')
