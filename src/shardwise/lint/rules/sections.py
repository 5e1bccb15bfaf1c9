"""Other sections: checkpointing, compilation, profiling, logging."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.rules.keys import WORDS
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.setup import Setup


def _activation_checkpointing(document: Document, setup: Setup) -> Iterator[Hit]:
    key = ("activation_checkpointing",)
    asked = [name for name, value in document.section(*key).items() if value not in (False, None)]
    if asked and setup.reader != "deepspeed":
        yield Hit(
            key=key,
            what="it speaks to models that call deepspeed.checkpointing; Hugging Face models do not: "
            "nothing is recomputed",
            fix="gradient_checkpointing in the TrainingArguments, or model.gradient_checkpointing_enable()",
            changes=(Drop(key=key),) if setup.hugging_face else (),
            severity="warning" if setup.hugging_face else "note",
        )


def _writer(document: Document, setup: Setup) -> Iterator[Hit]:
    key = ("checkpoint", "writer")
    if not document.section(*key):
        return
    if document.get(*key, "data_parallel") is None:
        yield Hit(
            key=key,
            what="without `data_parallel` it fails at the first save: AttributeError `dp_rank`",
            fix='"data_parallel": "replica"',
            changes=(Put(key=(*key, "data_parallel"), value="replica"),),
        )
    if setup.training("launcher") in ("torchrun", "accelerate") or setup.of("accelerate"):
        yield Hit(
            key=key,
            what="it needs CROSS_RANK and CROSS_SIZE, which only the deepspeed launcher sets: KeyError",
            fix="start with `deepspeed`, or take it out",
        )


def _tag_validation(document: Document, _: Setup) -> Iterator[Hit]:
    key = ("checkpoint", "tag_validation")
    value = document.get(*key)
    if document.has(*key) and str(value).lower() not in ("warn", "ignore", "fail"):
        yield Hit(
            key=key, what=f"DeepSpeed stops: {value!r} is no way to validate", fix="Warn, Ignore or Fail"
        )


def _compile(document: Document, setup: Setup) -> Iterator[Hit]:
    key = ("compile", "deepcompile")
    if not document.on(*key):
        return
    if stage_of(document) == 0:
        yield Hit(key=key, what="at stage 0 it falls back to plain torch.compile", fix="`stage`: 1, 2 or 3")
    if setup.reader == "trainer":
        yield Hit(
            key=key,
            what="it takes effect in engine.compile(), which the Trainer does not call",
            fix="take it out, or call it in a script of your own",
        )


def _passes(document: Document, _: Setup) -> Iterator[Hit]:
    key = ("compile", "passes")
    passes = document.get(*key)
    if isinstance(passes, list) and "autotp" in passes and len(passes) > 1:
        yield Hit(
            key=key, what="the autotp pass cannot run with others: NotImplementedError", fix='["autotp"]'
        )
    elif isinstance(passes, list) and "autosp" in passes and stage_of(document) in (2, 3):
        yield Hit(
            key=key, what="the autosp pass runs at stages 0 and 1 only", fix="`stage`: 1", severity="warning"
        )


def _summed(document: Document, _: Setup) -> Iterator[Hit]:
    if document.get("gradient_allreduce_op") != "sum":
        return
    against = "ZeRO-3" if stage_of(document) == 3 else ""
    against = "ZenFlow" if document.get("zero_optimization", "zenflow") is not None else against
    against = "DeepCompile" if document.on("compile", "deepcompile") else against
    key = ("gradient_allreduce_op",)
    if against:
        yield Hit(key=key, what=f"DeepSpeed stops: `sum` does not work with {against}", fix='"mean"')


def _slow(document: Document, _: Setup) -> Iterator[Hit]:
    slow = {
        ("wall_clock_breakdown",): "every part of a step is timed, with the GPU waiting at each end",
        ("memory_breakdown",): "memory is printed around every call, with the GPU waiting",
        ("flops_profiler", "enabled"): "the profiled step runs slowly, and every step is timed part by part",
        ("comms_logger", "enabled"): "each collective is timed, and waits for the one before",
        ("dump_state",): "the whole state is printed",
    }
    for key, what in slow.items():
        if document.on(*key):
            yield Hit(
                key=key, what=what, fix="false, once you have measured", changes=(Put(key=key, value=False),)
            )


def _throughput_timer(document: Document, _: Setup) -> Iterator[Hit]:
    timer = ("timers", "throughput")
    sections = [key for key in (timer, timer[:1]) if document.has(*key)]
    if any(not isinstance(document.get(*key), dict) for key in sections):
        return  # which is said already
    for name in ("enabled", "synchronized"):
        value = document.get(*timer, name)
        if value in (False, 0) or WORDS.get(str(value).lower()) is False:
            return
    yield Hit(
        key=next(iter(sections), ()),
        what="DeepSpeed's throughput timer is on: to log samples a second the process waits for the GPU "
        "twice a micro-batch",
        fix='"timers": {"throughput": {"enabled": false}}; or "synchronized": false, which keeps the log',
        changes=(Put(key=(*timer, "enabled"), value=False),),
    )


def _autotuning(document: Document, _: Setup) -> Iterator[Hit]:
    if document.on("autotuning", "enabled"):
        yield Hit(
            key=("autotuning", "enabled"),
            what="it works through `deepspeed --autotuning run` only, and starts dozens of jobs there",
            fix="take the section out",
            changes=(Drop(key=("autotuning",)),),
        )


def _secret(document: Document, _: Setup) -> Iterator[Hit]:
    key = ("comet", "api_key")
    if document.get(*key):
        yield Hit(
            key=key,
            what="an access key in a file that is copied, logged and shared",
            fix="the environment variable COMET_API_KEY",
            changes=(Drop(key=key),),
        )


_COMPILE = "deepspeed/runtime/engine.py: compile, get_deepspeed_compile_backend"

RULES = (
    Rule(
        name="activation-checkpointing",
        severity="warning",
        kind="deepspeed",
        happens="Hugging Face models recompute by torch's checkpointing, which this section does not reach.",
        source="deepspeed/runtime/activation_checkpointing/checkpointing.py: configure",
        find=_activation_checkpointing,
    ),
    Rule(
        name="checkpoint-writer",
        severity="error",
        kind="deepspeed",
        happens="The fast writer needs the deepspeed launcher's variables and a setting that has no "
        "working default.",
        source="deepspeed/runtime/model_checkpointing; run with 0.19.8",
        find=_writer,
    ),
    Rule(
        name="checkpoint-tag-validation",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed stops.",
        source="deepspeed/runtime/config.py: get_checkpoint_tag_validation_mode",
        find=_tag_validation,
    ),
    Rule(
        name="deepcompile-is-called",
        severity="warning",
        kind="deepspeed",
        happens="DeepCompile takes effect when the program calls engine.compile(), at stages 1 to 3.",
        source=_COMPILE,
        find=_compile,
    ),
    Rule(
        name="compile-passes",
        severity="error",
        kind="deepspeed",
        happens="Not all passes work together, or at every stage.",
        source=_COMPILE,
        find=_passes,
    ),
    Rule(
        name="summed-gradients",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed stops with a ValueError.",
        source="deepspeed/runtime/config.py: _do_error_check",
        find=_summed,
    ),
    Rule(
        name="slow-diagnostics",
        severity="note",
        kind="deepspeed",
        happens="Timers and profilers make the GPU wait.",
        source="deepspeed/utils/timer.py: SynchronizedWallClockTimer; profiling; comm/comm.py: timed_op",
        find=_slow,
    ),
    Rule(
        name="throughput-timer",
        severity="note",
        kind="deepspeed",
        happens="Nothing is asked of the GPU ahead of time. Nine of ten runs that the host holds up were 3 "
        "to 26 % faster without.",
        source="deepspeed/utils/timer.py: ThroughputTimer; config.py: synchronized; "
        "benchmarks/deepspeed_host/results/2xh200-throughput-timer.json",
        find=_throughput_timer,
    ),
    Rule(
        name="autotuning-section",
        severity="warning",
        kind="deepspeed",
        happens="The autotuner is a program of its own.",
        source="deepspeed/launcher/runner.py: --autotuning",
        find=_autotuning,
    ),
    Rule(
        name="access-key-in-the-file",
        severity="warning",
        kind="deepspeed",
        happens="The configuration is printed at the start and saved beside checkpoints.",
        source="deepspeed/monitor/config.py: api_key; runtime/config.py: print_user_config",
        find=_secret,
    ),
)
