"""Offloading: what works, and what DeepSpeed silently ignores."""

from collections.abc import Iterator

from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, rule
from shardwise.lint.rules.zero import ZERO, stage_of
from shardwise.lint.setup import Setup

OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"
_CONFIG, _OFFLOAD = "deepspeed/runtime/zero/config.py", "deepspeed/runtime/zero/offload_config.py"


def place(document: Document, which: str) -> str:
    """The device, cpu or nvme; `none` for everything else, `auto` included."""
    value = document.get(ZERO, which, "device")
    return value if value in ("cpu", "nvme") else "none"


@rule("error", f"{_CONFIG}: offload_param, valid only with stage 3; run with 0.19.8")
def offload_param_needs_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    """At stages 0 to 2 parameters are not sharded; the request to offload them is silently ignored."""
    stage = stage_of(document)
    if stage in (0, 1, 2) and place(document, PARAMETERS) != "none":
        what = f"at stage {stage} DeepSpeed silently ignores it: the parameters stay on the GPU"
        fix = "`stage`: 3, or remove it (`offload_optimizer` works at stages 1 and 2)"
        yield Hit((ZERO, PARAMETERS), what, fix, (Drop((ZERO, PARAMETERS)),))


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


@rule("error", f"{_CONFIG}: offload_ratio_check")
def partial_offload_needs_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    """Only ZeRO-3 can offload a part of the optimizer (`ratio` below 1): DeepSpeed stops."""
    key = (ZERO, OPTIMIZER, "ratio")
    ratio = document.number(*key)
    if ratio is not None and ratio < 1 and stage_of(document) in (0, 1, 2):
        yield Hit(key, fix="remove it, or `stage`: 3", changes=(Drop(key),))


@rule("error", "deepspeed/runtime/engine.py: super_offload, used for stage 3 only; run with 0.19.8")
def super_offload_needs_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    """At other stages it is ignored; it speeds up offloading to the CPU and nothing else."""
    key, stage = (ZERO, OPTIMIZER, "super_offload"), stage_of(document)
    if document.on(*key) and stage in (0, 1, 2):
        what = f"at stage {stage} it is ignored: plain offloading runs"
        yield Hit(key, what, "`stage`: 3, or remove it", (Drop(key),))
    elif document.on(*key) and document.get(*key[:-1], "device") not in ("cpu", AUTO):
        yield Hit(key, "it speeds up offloading to `cpu`, which is not requested", '"device": "cpu"')


@rule("error", "deepspeed/runtime/zenflow; run with 0.19.8")
def zenflow_needs_offload(document: Document, _: Setup) -> Iterator[Hit]:
    """`Zenflow must be used with cpu offload`, and not with torch_adam."""
    key, adam = (ZERO, "zenflow"), ("optimizer", "params", "torch_adam")
    if document.get(*key) is None:
        return
    if document.get(ZERO, OPTIMIZER, "device") not in ("cpu", AUTO):
        what = "ZenFlow needs the optimizer in host memory: without `offload_optimizer` it stops at the start"
        yield Hit(key, what, '"offload_optimizer": {"device": "cpu"}')
    if adam[-1] in document.section(*adam[:-1]):
        what = "together with `zenflow` this key stops DeepSpeed with a TypeError, even if it is false"
        yield Hit(adam, what, changes=(Drop(adam),))
    if document.on(*key, "offload") and document.get(ZERO, "overlap_comm") is False:
        yield Hit((*key, "offload"), "it needs `overlap_comm`", '"overlap_comm": true')


@rule("warning", "deepspeed/runtime/engine.py: get_optimizer_configuration")
def offloaded_torch_adam(document: Document, _: Setup) -> Iterator[Hit]:
    """The offloaded step runs in torch's AdamW on the CPU; DeepSpeed's own is vectorised."""
    key = ("optimizer", "params", "torch_adam")
    if document.on(*key) and place(document, OPTIMIZER) != "none" and document.get(ZERO, "zenflow") is None:
        fix = "remove it (DeepSpeed then compiles cpu_adam once: g++ and ninja)"
        yield Hit(key, fix=fix, changes=(Drop(key),))


@rule("error", f"{_OFFLOAD}: device")
def offload_without_device(document: Document, _: Setup) -> Iterator[Hit]:
    """The default of `device` is `none`: nothing is offloaded."""
    for which in (OPTIMIZER, PARAMETERS):
        section = document.section(ZERO, which)
        if section and "device" not in section:
            yield Hit((ZERO, which), fix='"device": "cpu", or remove the section')


@rule("note", "https://github.com/deepspeedai/DeepSpeed/pull/8207", "deepspeed>=0.19.5,<0.20")
def pinned_by_default(document: Document, _: Setup) -> Iterator[Hit]:
    """`pin_memory` is true by default since 0.19.5: never paged out; a low `ulimit -l` stops the run."""
    for which in (OPTIMIZER, PARAMETERS):
        if place(document, which) != "none" and not document.has(ZERO, which, "pin_memory"):
            fix = 'write it: "pin_memory": true, or false if host memory is short'
            yield Hit((ZERO, which), fix=fix, changes=(Put((ZERO, which, "pin_memory"), True),))


@rule("note", "deepspeed/runtime/zero/stage3.py: aio_config, for swapping only")
def aio_without_nvme(document: Document, _: Setup) -> Iterator[Hit]:
    """The section tunes reading and writing on NVMe, and nothing is offloaded there."""
    devices = [document.get(ZERO, which, "device") for which in (OPTIMIZER, PARAMETERS)]
    if document.section("aio") and "nvme" not in devices and AUTO not in devices:
        yield Hit(("aio",), changes=(Drop(("aio",)),))
