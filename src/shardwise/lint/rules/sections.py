"""Other sections: checkpointing, compilation, profiling, logging."""

from collections.abc import Iterator

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, rule
from shardwise.lint.rules.keys import WORDS
from shardwise.lint.rules.zero import is_template, stage_of
from shardwise.lint.schema import by_key
from shardwise.lint.setup import Setup

_SLOW: dict[Key, str] = by_key("slow_diagnostics")


@rule("warning", "deepspeed/runtime/activation_checkpointing/checkpointing.py: configure")
def activation_checkpointing(document: Document, setup: Setup) -> Iterator[Hit]:
    """Hugging Face models use torch's checkpointing, which this section does not reach."""
    key = ("activation_checkpointing",)
    asked = any(value not in (False, None) for value in document.section(*key).values())
    if asked and setup.reader != "deepspeed":
        what = "it only affects models that call deepspeed.checkpointing; Hugging Face models do not: "
        what += "nothing is recomputed"
        fix = "gradient_checkpointing in the TrainingArguments, or model.gradient_checkpointing_enable()"
        changes = (Drop(key),) if setup.hugging_face else ()
        yield Hit(key, what, fix, changes, "warning" if setup.hugging_face else "note")


@rule("warning", "deepspeed/runtime/engine.py: compile, get_deepspeed_compile_backend")
def deepcompile_is_called(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepCompile takes effect when the program calls engine.compile(), at stages 1 to 3."""
    key = ("compile", "deepcompile")
    if document.on(*key) and stage_of(document) == 0:
        yield Hit(key, "at stage 0 plain torch.compile runs instead", "`stage`: 1, 2 or 3")
    if document.on(*key) and setup.reader == "trainer":
        what = "it takes effect in engine.compile(), which the Trainer does not call"
        yield Hit(key, what, "remove it, or call engine.compile() in your own script")


@rule("note", "deepspeed/utils/timer.py: SynchronizedWallClockTimer; profiling; comm/comm.py: timed_op")
def slow_diagnostics(document: Document, _: Setup) -> Iterator[Hit]:
    """Timers and profilers make the GPU wait."""
    for key, what in _SLOW.items():
        if document.on(*key):
            yield Hit(key, what, "false, after you have measured", (Put(key, False),))


@rule("note", "deepspeed/utils/timer.py: ThroughputTimer; config.py: synchronized")
def throughput_timer(document: Document, _: Setup) -> Iterator[Hit]:
    """The timer keeps the host from sending work ahead: runs it limits are 3 to 26 % faster without."""
    timer = ("timers", "throughput")
    sections = [key for key in (timer, timer[:1]) if document.has(*key)]
    if any(not isinstance(document.get(*key), dict) for key in sections):
        return  # wrong-kind-of-value
    for name in ("enabled", "synchronized"):
        value = document.get(*timer, name)
        if value in (False, 0, AUTO) or WORDS.get(str(value).lower()) is False:
            return
    what = "DeepSpeed's throughput timer is on: the process waits for the GPU twice per micro-batch"
    fix = '"timers": {"throughput": {"enabled": false}}; or "synchronized": false, which keeps the log'
    yield Hit(next(iter(sections), ()), what, fix, (Put((*timer, "enabled"), False),))


@rule("warning", "deepspeed/launcher/runner.py: --autotuning")
def autotuning_section(document: Document, setup: Setup) -> Iterator[Hit]:
    """The autotuner is a separate program: only `deepspeed --autotuning run` starts it, in many jobs."""
    if document.on("autotuning", "enabled") and not setup.training("autotuning"):
        template = is_template(document)  # without the section it would not be one
        changes = () if template else (Drop(("autotuning",)),)
        fix = "start it so; the file is its template" if template else "remove the section"
        yield Hit(("autotuning", "enabled"), "", fix, changes, "note" if template else None)


@rule("warning", "deepspeed/monitor/config.py: api_key; runtime/config.py: print_user_config")
def access_key_in_the_file(document: Document, _: Setup) -> Iterator[Hit]:
    """The file holds an access key; it is printed at the start and saved with checkpoints."""
    key = ("comet", "api_key")
    if document.get(*key) and key not in document.unknown:
        yield Hit(key, fix="the environment variable COMET_API_KEY", changes=(Drop(key),))
