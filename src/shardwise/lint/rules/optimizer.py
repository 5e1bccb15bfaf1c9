"""Optimizer, clipping, schedule."""

import ast
import json
from collections.abc import Iterator
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Change, Drop, Put, Rename
from shardwise.lint.finding import Hit, rule, training_rule
from shardwise.lint.rules.loop import made_by
from shardwise.lint.rules.program import calls, is_optimizer
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.schema import as_number, closest, names, table
from shardwise.lint.setup import Setup

DEEPSPEED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
TORCH_OPTIMIZERS = names("torch_optimizers")
REMOVED = ("onebitadam", "onebitlamb", "zerooneadam")
ADAM_PARAMS = names("adam_parameters")
_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "betas")
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps", "beta": "betas", "decay": "weight_decay"}
SCHEDULES: dict[str, list[str]] = table("schedules")  # with their parameters without a default
_TYPE, _PARAMS, _SCHEDULE = ("optimizer", "type"), ("optimizer", "params"), ("scheduler", "params")
_BASIC = "deepspeed/runtime/engine.py: _configure_basic_optimizer"
_SCHEDULES = "deepspeed/runtime/lr_schedules.py"


def _name(document: Document) -> str:
    return str(document.get(*_TYPE)).lower()


@rule("error", "deepspeed/runtime/engine.py: _is_supported_optimizer; run with 0.19.8")
def unknown_optimizer(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed stops; that includes the 1-bit optimizers, which were removed."""
    name = document.get(*_TYPE)
    known = {one.lower() for one in DEEPSPEED_OPTIMIZERS}
    if not isinstance(name, str) or name.lower() in {*known, AUTO} or name in TORCH_OPTIMIZERS:
        return
    if name.lower() in REMOVED:
        fix = '"type": "AdamW"; fewer bytes are sent with bf16 sums, or PowerSGD as a hook of PyTorch\'s DDP'
        yield Hit(_TYPE, f"{name} was removed in DeepSpeed 0.19.7: it stops", fix)
        return
    near = closest(name, (*TORCH_OPTIMIZERS, *DEEPSPEED_OPTIMIZERS))
    what = f"DeepSpeed and torch.optim have no optimizer {name!r}: DeepSpeed stops with an AssertionError"
    fix = f"did you mean {near}?" if near else '"type": "AdamW"'
    yield Hit(_TYPE, what, fix, (Put(_TYPE, near),) if near else ())


@rule("error", "deepspeed/runtime/engine.py: _do_optimizer_sanity_check; run with 0.19.8")
def untested_optimizer(document: Document, _: Setup) -> Iterator[Hit]:
    """ZeRO refuses optimizers that were not tested with it, unless the file allows them."""
    name, allow = document.get(*_TYPE), ("zero_allow_untested_optimizer",)
    refuses = stage_of(document) in (1, 2, 3) and document.get(*allow) not in (True, AUTO)
    if name in TORCH_OPTIMIZERS and refuses:
        what = f"ZeRO refuses {name} as untested: DeepSpeed stops with an AssertionError"
        fix = f'"{allow[0]}": true, if it updates each element on its own'
        yield Hit(_TYPE, what, fix, (Put(allow, True),))


@rule("warning", f"{_BASIC}: ADAM_W_MODE_DEFAULT")
def adam_is_adamw(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed's Adam is AdamW unless `adam_w_mode` is false: weight decay is decoupled."""
    decays = document.get(*_PARAMS, "weight_decay") not in (None, 0)  # else both are the same
    if decays and _name(document) == "adam" and "adam_w_mode" not in document.section(*_PARAMS):
        fix = '"type": "AdamW", or "adam_w_mode": false in its params'
        yield Hit(_TYPE, fix=fix, changes=(Put(_TYPE, "AdamW"),))


@rule("error", f"{_BASIC}; run with 0.19.8")
def max_grad_norm(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed stops with a ValueError: the optimizer has no parameter `max_grad_norm`."""
    key, clipping = (*_PARAMS, "max_grad_norm"), ("gradient_clipping",)
    if document.has(*key):
        value = document.get(*key)
        put = () if document.has(*clipping) else (Put(clipping, value),)
        yield Hit(key, fix=f'"gradient_clipping": {value} at the top level', changes=(Drop(key), *put))


@rule("error", f"{_BASIC}: parameters are passed on unchanged")
def unknown_optimizer_parameter(document: Document, _: Setup) -> Iterator[Hit]:
    """The optimizer's constructor stops with a TypeError."""
    for name in document.section(*_PARAMS) if _name(document) in ("adam", "adamw") else ():
        if name in ADAM_PARAMS or name == "max_grad_norm":
            continue
        near, key = _OTHER_NAMES.get(name) or closest(name, ADAM_PARAMS), (*_PARAMS, name)
        change: Change = Rename(key, near) if near and not document.has(*_PARAMS, near) else Drop(key)
        fix = f"did you mean `{near}`?" if near else ""
        yield Hit(key, f"AdamW has no parameter `{name}`: TypeError at the start", fix, (change,))


@rule("error", f"{_BASIC}, _configure_lr_scheduler; run with 0.19.8")
def text_for_a_number(document: Document, _: Setup) -> Iterator[Hit]:
    """Parameters are passed on unchanged: AdamW stops with a TypeError at `"lr": "1e-5"`, schedules later."""
    for above, who in ((_PARAMS, "the optimizer"), (_SCHEDULE, "the schedule")):
        for name, value in document.section(*above).items():
            items = enumerate(value) if isinstance(value, list) else ()
            inner = [((*above, name, str(index)), item) for index, item in items]
            for key, one in [((*above, name), value), *inner]:
                if isinstance(one, str) and one != AUTO and name != "warmup_type":
                    yield from _text(key, one, who, number=name in _NUMBERS or above == _SCHEDULE)


def _text(key: Key, text: str, who: str, *, number: bool) -> Iterator[Hit]:
    meant: Any = as_number(text)
    if text.lower() in ("false", "no", "off"):
        meant = False
        what = "Python counts any text as true, also this one"
    elif meant is not None or number:
        what = f"DeepSpeed passes it on unchanged, and {who} stops at its first computation"
    else:
        return
    fix = "a number, without quotes" if meant is None else f"write {json.dumps(meant)}"
    changes = () if meant is None else (Put(key, meant),)
    yield Hit(key, f'`{".".join(key[2:])}` is the text "{text}": {what}', fix, changes)


@rule("note", "https://github.com/deepspeedai/DeepSpeed/pull/8068", "deepspeed>=0.19.3,<0.20")
def clipping_default(document: Document, setup: Setup) -> Iterator[Hit]:
    """The default changed from 0.0, no clipping, to 1.0."""
    key = ("gradient_clipping",)
    if not (document.has(*key) or document.has(*_PARAMS, "max_grad_norm") or setup.lightning):
        unused = "; the Trainer's max_grad_norm is not used" if setup.reader == "trainer" else ""
        what = f"gradients are clipped at 1.0, the default since 0.19.3 (before: no clipping){unused}"
        yield Hit((), what, 'write it: "gradient_clipping": 1.0, or 0.0 for none', (Put(key, 1.0),))


@rule("error", f"{_SCHEDULES}: VALID_LR_SCHEDULES; run with 0.19.8")
def unknown_schedule(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed stops with an AssertionError."""
    key = ("scheduler", "type")
    name = document.get(*key)
    if isinstance(name, str) and name not in (*SCHEDULES, AUTO):
        near = closest(name, SCHEDULES)
        fix = f"did you mean {near}?" if near else f"one of {', '.join(SCHEDULES)}"
        changes = (Put(key, near),) if near else ()
        yield Hit(key, f"DeepSpeed has no schedule {name!r}: it stops", fix, changes)


@rule("error", f"{_SCHEDULES}; run with 0.19.8")
def schedule_needs_a_parameter(document: Document, setup: Setup) -> Iterator[Hit]:
    """The schedule's constructor stops with a TypeError."""
    kind = str(document.get("scheduler", "type"))
    for name in SCHEDULES.get(kind, ()):
        if not document.has(*_SCHEDULE, name):
            auto = setup.hugging_face and name == "total_num_steps"
            changes = (Put((*_SCHEDULE, name), AUTO),) if auto else ()
            fix = "" if auto else f'"{name}": a number'
            yield Hit(("scheduler",), f"{kind} needs `{name}`: TypeError at the start", fix, changes)


@rule("error", f"{_SCHEDULES}: WarmupLR.__init__; run with 0.19.8", "deepspeed>=0.19.6,<0.20")
def warmup_steps(document: Document, _: Setup) -> Iterator[Hit]:
    """A warm-up of 0 steps stops DeepSpeed; before 0.19.6 it became 2."""
    key = (*_SCHEDULE, "warmup_num_steps")
    steps, total = document.number(*key), document.number(*_SCHEDULE, "total_num_steps")
    if steps is not None and (steps <= 0 or steps != int(steps)):
        what = f"{steps:g} stops DeepSpeed: warm-up must be an integer number of steps, at least 1"
        yield Hit(key, what, "1 is almost no warm-up", (Put(key, max(1, round(steps))),))
    elif steps is not None and total is not None and total < steps:
        what = f"warm-up takes {steps:g} of {total:g} steps: the peak is never reached"
        yield Hit(key, what, "fewer than `total_num_steps`", severity="warning")


@training_rule("error", "engine.py: _configure_optimizer; accelerate/accelerator.py: _prepare_deepspeed")
def two_optimizers(document: Document, setup: Setup) -> Iterator[Hit]:
    """A script's optimizer: DeepSpeed refuses it with offloading, and it meets the one of the file."""
    made, device = made_by(document), ("zero_optimization", "offload_optimizer", "device")
    for config in setup.of("deepspeed"):
        both, file = bool(config.section("optimizer")), config.name
        offloads = config.get(*device) in ("cpu", "nvme")
        offloads &= config.get("zero_force_ds_cpu_optimizer") is not False
        for engine, own, line in _optimizers(document, made):
            if engine and offloads and not own.startswith("DeepSpeedCPU"):
                what = f"{file} offloads the optimizer, and the script gives {own}: DeepSpeed refuses it"
                fix = f"deepspeed.ops.adam.DeepSpeedCPUAdam, or only the `optimizer` of {file}, or there "
                yield Hit((), what, f'{fix}"zero_force_ds_cpu_optimizer" off', line=line)
            elif engine and both:
                what = f"DeepSpeed uses the script's {own}, and silently ignores `optimizer` of {file}"
                yield Hit((), what, "keep one of the two", severity="warning", line=line)
            elif both and setup.reader == "accelerate":
                what = f"an optimizer in {file} and in the script: Accelerate stops with a ValueError"
                fix = f"accelerate.utils.DummyOptim here, or remove `optimizer` from {file}"
                yield Hit((), what, fix, line=line)


def _optimizers(document: Document, made: dict[str, str]) -> Iterator[tuple[bool, str, int]]:
    """Whether an engine gets it, else an Accelerator; the class of an optimizer; the line."""
    for call in calls(document, "initialize", "prepare"):
        engine = ast.unparse(call.func) == "deepspeed.initialize"
        given = [one.value for one in call.keywords if one.arg == "optimizer" and engine]
        given += call.args[1:2] if engine else call.args
        names_ = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in given]
        for called in (made.get(name, name) for name in names_):
            if is_optimizer(called):
                yield engine, called.rpartition(".")[2], call.lineno
