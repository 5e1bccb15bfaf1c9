"""Offloading: where it works, and what DeepSpeed does where it does not."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.rules.zero import ZERO, stage_of
from shardwise.lint.setup import Setup

OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"


def place(document: Document, which: str) -> str:
    """cpu, nvme or none; `auto` is told apart by nobody and counts as none."""
    value = document.get(ZERO, which, "device")
    return value if value in ("cpu", "nvme") else "none"


def _parameters_below_3(document: Document, _: Setup) -> Iterator[Hit]:
    stage = stage_of(document)
    if stage in (0, 1, 2) and place(document, PARAMETERS) != "none":
        yield Hit(
            key=(ZERO, PARAMETERS),
            what=f"at stage {stage} DeepSpeed accepts it and does nothing, without a word: the parameters "
            "stay on the GPU",
            fix="`stage`: 3, or take it out (`offload_optimizer` works at stages 1 and 2)",
            changes=(Drop(key=(ZERO, PARAMETERS)),),
        )


def _optimizer_at_0(document: Document, _: Setup) -> Iterator[Hit]:
    if stage_of(document) == 0 and place(document, OPTIMIZER) != "none":
        yield Hit(
            key=(ZERO, OPTIMIZER),
            what="at stage 0 DeepSpeed accepts it and does nothing: the optimizer stays on the GPU",
            fix="`stage`: 1 or 2",
        )


def _nvme_path(document: Document, _: Setup) -> Iterator[Hit]:
    for which in (OPTIMIZER, PARAMETERS):
        if place(document, which) == "nvme" and not document.get(ZERO, which, "nvme_path"):
            yield Hit(
                key=(ZERO, which, "device"),
                what="`nvme` without `nvme_path` fails late, with a TypeError about NoneType",
                fix='"nvme_path": a folder on a local NVMe disk',
            )


def _nvme_below_3(document: Document, _: Setup) -> Iterator[Hit]:
    if stage_of(document) in (1, 2) and place(document, OPTIMIZER) == "nvme":
        yield Hit(
            key=(ZERO, OPTIMIZER, "device"),
            what="only ZeRO-3 writes to NVMe; at stages 1 and 2 everything but `none` is host memory",
            fix='"device": "cpu", or `stage`: 3',
            changes=(Put(key=(ZERO, OPTIMIZER, "device"), value="cpu"),),
        )


def _ratio(document: Document, _: Setup) -> Iterator[Hit]:
    ratio = document.number(ZERO, OPTIMIZER, "ratio")
    if ratio is not None and ratio < 1 and stage_of(document) in (0, 1, 2):
        yield Hit(
            key=(ZERO, OPTIMIZER, "ratio"),
            what="a part of the optimizer can be offloaded by ZeRO-3 only: DeepSpeed stops",
            fix="take it out, or `stage`: 3",
            changes=(Drop(key=(ZERO, OPTIMIZER, "ratio")),),
        )


def _super_offload(document: Document, _: Setup) -> Iterator[Hit]:
    key = (ZERO, OPTIMIZER, "super_offload")
    if not document.on(*key):
        return
    if stage_of(document) in (0, 1, 2):
        yield Hit(
            key=key,
            what=f"at stage {stage_of(document)} it is ignored: plain offloading runs",
            fix="`stage`: 3, or take it out",
            changes=(Drop(key=key),),
        )
    elif place(document, OPTIMIZER) != "cpu":
        yield Hit(
            key=key, what="it speeds up offloading to `cpu`, which is not asked for", fix='"device": "cpu"'
        )


def _zenflow(document: Document, _: Setup) -> Iterator[Hit]:
    key = (ZERO, "zenflow")
    if document.get(*key) is None:
        return
    if place(document, OPTIMIZER) != "cpu":
        yield Hit(
            key=key,
            what="ZenFlow works on an optimizer in host memory: without `offload_optimizer` it stops at "
            "the start",
            fix='"offload_optimizer": {"device": "cpu"}',
        )
    if "torch_adam" in document.section("optimizer", "params"):
        yield Hit(
            key=("optimizer", "params", "torch_adam"),
            what="beside `zenflow` this key stops DeepSpeed with a TypeError, even as false",
            fix="take it out",
            changes=(Drop(key=("optimizer", "params", "torch_adam")),),
        )
    if document.on(ZERO, "zenflow", "offload") and document.get(ZERO, "overlap_comm") is False:
        yield Hit(
            key=(ZERO, "zenflow", "offload"), what="it needs `overlap_comm`", fix='"overlap_comm": true'
        )


def _torch_adam(document: Document, _: Setup) -> Iterator[Hit]:
    key = ("optimizer", "params", "torch_adam")
    if document.on(*key) and place(document, OPTIMIZER) != "none" and document.get(ZERO, "zenflow") is None:
        yield Hit(
            key=key,
            what="the offloaded step runs in torch's AdamW on the CPU; DeepSpeed's own is vectorised",
            fix="take it out (DeepSpeed then compiles cpu_adam once: g++ and ninja)",
            changes=(Drop(key=key),),
        )


def _nothing_offloaded(document: Document, _: Setup) -> Iterator[Hit]:
    for which in (OPTIMIZER, PARAMETERS):
        section = document.section(ZERO, which)
        if section and "device" not in section:
            yield Hit(
                key=(ZERO, which),
                what="the default of `device` is `none`: nothing is offloaded",
                fix='"device": "cpu", or take the section out',
            )


def _pinned(document: Document, _: Setup) -> Iterator[Hit]:
    for which in (OPTIMIZER, PARAMETERS):
        if place(document, which) != "none" and not document.has(ZERO, which, "pin_memory"):
            yield Hit(
                key=(ZERO, which),
                what="`pin_memory` is true by default since 0.19.5 (false before): that host memory "
                "cannot be paged out, and a low `ulimit -l` stops the run",
                fix='write it: "pin_memory": true, or false where host memory is short',
                changes=(Put(key=(ZERO, which, "pin_memory"), value=True),),
            )


def _aio(document: Document, _: Setup) -> Iterator[Hit]:
    if document.section("aio") and "nvme" not in (place(document, OPTIMIZER), place(document, PARAMETERS)):
        yield Hit(
            key=("aio",),
            what="it tunes reading and writing on NVMe, and nothing is offloaded there",
            fix="take it out",
            changes=(Drop(key=("aio",)),),
        )


_OFFLOAD = "deepspeed/runtime/zero/offload_config.py"

RULES = (
    Rule(
        name="offload-param-needs-stage-3",
        severity="error",
        kind="deepspeed",
        happens="At stages 0 to 2 parameters are not sharded; the request to offload them is ignored "
        "silently.",
        source="deepspeed/runtime/zero/config.py: offload_param, valid only with stage 3; run with 0.19.8",
        find=_parameters_below_3,
    ),
    Rule(
        name="offload-optimizer-needs-zero",
        severity="error",
        kind="deepspeed",
        happens="At stage 0 there is no ZeRO optimizer to offload; the request is ignored silently.",
        source="deepspeed/runtime/zero/config.py: offload_optimizer; run with 0.19.8",
        find=_optimizer_at_0,
    ),
    Rule(
        name="nvme-needs-a-path",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed does not check: it fails when the first file is written.",
        source=f"{_OFFLOAD}: nvme_path; run with 0.19.8",
        find=_nvme_path,
    ),
    Rule(
        name="nvme-needs-stage-3",
        severity="error",
        kind="deepspeed",
        happens="ZeRO-1 and 2 keep in host memory what was meant for the disk.",
        source="deepspeed/runtime/zero/stage_1_and_2.py: any device but `none` is the CPU",
        find=_nvme_below_3,
    ),
    Rule(
        name="partial-offload-needs-stage-3",
        severity="error",
        kind="deepspeed",
        happens="`ratio` below 1 stops DeepSpeed at other stages.",
        source="deepspeed/runtime/zero/config.py: offload_ratio_check",
        find=_ratio,
    ),
    Rule(
        name="super-offload-needs-stage-3",
        severity="error",
        kind="deepspeed",
        happens="At other stages it is ignored; it speeds up offloading to the CPU and nothing else.",
        source="deepspeed/runtime/engine.py: super_offload, used for stage 3 only; run with 0.19.8",
        find=_super_offload,
    ),
    Rule(
        name="zenflow-needs-offload",
        severity="error",
        kind="deepspeed",
        happens="`Zenflow must be used with cpu offload`, and not with torch_adam.",
        source="deepspeed/runtime/zenflow; run with 0.19.8",
        find=_zenflow,
    ),
    Rule(
        name="offloaded-torch-adam",
        severity="warning",
        kind="deepspeed",
        happens="torch_adam takes the place of the vectorised CPU optimizer.",
        source="deepspeed/runtime/engine.py: get_optimizer_configuration",
        find=_torch_adam,
    ),
    Rule(
        name="offload-without-device",
        severity="error",
        kind="deepspeed",
        happens="A section without `device` offloads nothing.",
        source=f"{_OFFLOAD}: device",
        find=_nothing_offloaded,
    ),
    Rule(
        name="pinned-by-default",
        severity="note",
        kind="deepspeed",
        happens="The default changed; host memory is pinned unless the file says otherwise.",
        source="https://github.com/deepspeedai/DeepSpeed/pull/8207",
        versions="deepspeed>=0.19.5,<0.20",
        find=_pinned,
    ),
    Rule(
        name="aio-without-nvme",
        severity="note",
        kind="deepspeed",
        happens="The section has no effect.",
        source="deepspeed/runtime/zero/stage3.py: aio_config, for swapping only",
        find=_aio,
    ),
)
