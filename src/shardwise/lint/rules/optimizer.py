"""Optimizer, clipping and learning-rate schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardwise.lint.document import AUTO, Document, Key
from shardwise.lint.edit import Change, Drop, Put, Rename
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.schema import as_number, closest
from shardwise.lint.setup import Setup

DEEPSPEED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
TORCH_OPTIMIZERS = (
    "Adadelta",
    "Adafactor",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)
REMOVED = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
ADAM_PARAMS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "bias_correction",
    "amsgrad",
    "torch_adam",
    "adam_w_mode",
    "fp32_optimizer_states",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
)
_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "betas")
_WORDS_OF_SCHEDULES = ("warmup_type",)
_OFF = ("false", "no", "off")
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps", "beta": "betas", "decay": "weight_decay"}
SCHEDULES = {
    "LRRangeTest": (),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupLR": (),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
"""Names, and the parameters without a default."""
_PARAMS = ("optimizer", "params")
_SCHEDULE = ("scheduler", "params")


def _unknown(document: Document, _: Setup) -> Iterator[Hit]:
    name = document.get("optimizer", "type")
    known = {n.lower(): n for n in DEEPSPEED_OPTIMIZERS}
    if not isinstance(name, str) or name.lower() in known or name in TORCH_OPTIMIZERS:
        return
    key = ("optimizer", "type")
    if name.lower() in [n.lower() for n in REMOVED]:
        yield Hit(key=key, what=f"{name} was removed in DeepSpeed 0.19.7: it stops", fix='"type": "AdamW"')
        return
    near = closest(name, [*known, *(n.lower() for n in TORCH_OPTIMIZERS)])
    proper = known.get(near or "") or next((n for n in TORCH_OPTIMIZERS if n.lower() == near), None)
    yield Hit(
        key=key,
        what=f"DeepSpeed and torch.optim know no optimizer {name!r}: it stops with an AssertionError",
        fix=f"did you mean {proper}?" if proper else '"type": "AdamW"',
        changes=(Put(key=key, value=proper),) if proper else (),
    )


def _untested(document: Document, _: Setup) -> Iterator[Hit]:
    name = document.get("optimizer", "type")
    if name in TORCH_OPTIMIZERS and stage_of(document) in (1, 2, 3):
        key = ("zero_allow_untested_optimizer",)
        if not document.on(*key):
            yield Hit(
                key=("optimizer", "type"),
                what=f"ZeRO refuses {name} as untested: DeepSpeed stops with an AssertionError",
                fix=f'"{key[0]}": true, if you know that it works element by element',
                changes=(Put(key=key, value=True),),
            )


def _adam_is_adamw(document: Document, _: Setup) -> Iterator[Hit]:
    params = document.section(*_PARAMS)
    if str(document.get("optimizer", "type")).lower() == "adam" and "adam_w_mode" not in params:
        yield Hit(
            key=("optimizer", "type"),
            what="DeepSpeed's Adam is AdamW unless `adam_w_mode` is false: weight decay is decoupled",
            fix='"type": "AdamW", or "adam_w_mode": false in its params',
            changes=(Put(key=("optimizer", "type"), value="AdamW"),),
        )


def _max_grad_norm(document: Document, _: Setup) -> Iterator[Hit]:
    key = (*_PARAMS, "max_grad_norm")
    if document.has(*key):
        value = document.get(*key)
        put = () if document.has("gradient_clipping") else (Put(key=("gradient_clipping",), value=value),)
        yield Hit(
            key=key,
            what="DeepSpeed stops: the optimizer takes no `max_grad_norm`",
            fix=f'"gradient_clipping": {value} at the top level',
            changes=(Drop(key=key), *put),
        )


def _params(document: Document, _: Setup) -> Iterator[Hit]:
    if str(document.get("optimizer", "type")).lower() not in ("adam", "adamw"):
        return
    for name in document.section(*_PARAMS):
        if name in ADAM_PARAMS or name == "max_grad_norm":
            continue
        near = _OTHER_NAMES.get(name) or closest(name, list(ADAM_PARAMS))
        key = (*_PARAMS, name)
        change: Change = Drop(key=key)
        if near and not document.has(*_PARAMS, near):
            change = Rename(key=key, name=near)
        yield Hit(
            key=key,
            what=f"AdamW takes no `{name}`: TypeError at the start",
            fix=f"did you mean `{near}`?" if near else "take it out",
            changes=(change,),
        )


def _text_for_a_number(document: Document, _: Setup) -> Iterator[Hit]:
    for above, who in ((_PARAMS, "the optimizer"), (_SCHEDULE, "the schedule")):
        for name, value in document.section(*above).items():
            items = enumerate(value) if isinstance(value, list) else ()
            inner = [((*above, name, str(index)), item) for index, item in items]
            for key, one in [((*above, name), value), *inner]:
                if isinstance(one, str) and one != AUTO and name not in _WORDS_OF_SCHEDULES:
                    yield from _text(key, one, who, number=name in _NUMBERS or above == _SCHEDULE)


def _text(key: Key, text: str, who: str, *, number: bool) -> Iterator[Hit]:
    meant: Any = as_number(text)
    if text.lower() in _OFF:
        meant = False
        what = "Python takes any text for true, this one too"
    elif meant is not None or number:
        what = f"DeepSpeed hands it on as it stands, and {who} stops where it first computes with it"
    else:
        return
    yield Hit(
        key=key,
        what=f'`{".".join(key[2:])}` is the text "{text}": {what}',
        fix="a number, without quotes" if meant is None else f"write {json.dumps(meant)}",
        changes=() if meant is None else (Put(key=key, value=meant),),
    )


def _clipping_default(document: Document, setup: Setup) -> Iterator[Hit]:
    if not document.has("gradient_clipping") and not document.has(*_PARAMS, "max_grad_norm"):
        beside = "; the Trainer's max_grad_norm does not get there" if setup.reader == "trainer" else ""
        yield Hit(
            key=(),
            what=f"gradients are clipped at 1.0, the default since 0.19.3 (before: not at all){beside}",
            fix='write it: "gradient_clipping": 1.0, or 0.0 for none',
            changes=(Put(key=("gradient_clipping",), value=1.0),),
        )


def _unknown_schedule(document: Document, _: Setup) -> Iterator[Hit]:
    name, key = document.get("scheduler", "type"), ("scheduler", "type")
    if isinstance(name, str) and name not in SCHEDULES:
        lower = {n.lower(): n for n in SCHEDULES}
        near = closest(name, list(lower))
        yield Hit(
            key=key,
            what=f"DeepSpeed knows no schedule {name!r}: it stops",
            fix=f"did you mean {lower[near]}?" if near else f"one of {', '.join(SCHEDULES)}",
            changes=(Put(key=key, value=lower[near]),) if near else (),
        )


def _missing_parameter(document: Document, setup: Setup) -> Iterator[Hit]:
    for name in SCHEDULES.get(str(document.get("scheduler", "type")), ()):
        if not document.has(*_SCHEDULE, name):
            auto = setup.hugging_face and name == "total_num_steps"
            yield Hit(
                key=("scheduler",),
                what=f"{document.get('scheduler', 'type')} needs `{name}`: TypeError at the start",
                fix=f'"{name}": "auto"' if auto else f'"{name}": a number',
                changes=(Put(key=(*_SCHEDULE, name), value=AUTO),) if auto else (),
            )


def _warmup(document: Document, _: Setup) -> Iterator[Hit]:
    key = (*_SCHEDULE, "warmup_num_steps")
    steps, total = document.number(*key), document.number(*_SCHEDULE, "total_num_steps")
    if steps is not None and (steps <= 0 or steps != int(steps)):
        yield Hit(
            key=key,
            what=f"{steps:g} stops DeepSpeed: warm-up has to be a whole number of steps, at least 1",
            fix="1 is next to no warm-up",
            changes=(Put(key=key, value=max(1, round(steps))),),
        )
    elif steps is not None and total is not None and total < steps:
        yield Hit(
            key=key,
            what=f"warm-up takes {steps:g} of {total:g} steps: the peak is never reached",
            fix="fewer than `total_num_steps`",
            severity="warning",
        )


def _muon(document: Document, _: Setup) -> Iterator[Hit]:
    zero = ("zero_optimization", "reduce_scatter")
    is_muon = str(document.get("optimizer", "type")).lower() == "muon"
    if is_muon and stage_of(document) == 3 and document.get(*zero) is not False:
        yield Hit(
            key=("optimizer", "type"),
            what="at stage 3 Muon needs whole gradients: DeepSpeed stops",
            fix='"reduce_scatter": false in zero_optimization',
            changes=(Put(key=zero, value=False),),
        )


_BASIC = "deepspeed/runtime/engine.py: _configure_basic_optimizer"
_SCHEDULES = "deepspeed/runtime/lr_schedules.py"

RULES = (
    Rule(
        name="unknown-optimizer",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed stops; so it does for the 1-bit optimizers, which are gone.",
        source="deepspeed/runtime/engine.py: _is_supported_optimizer; run with 0.19.8",
        find=_unknown,
    ),
    Rule(
        name="untested-optimizer",
        severity="error",
        kind="deepspeed",
        happens="ZeRO refuses optimizers that were not tested with it, unless it is told not to.",
        source="deepspeed/runtime/engine.py: _do_optimizer_sanity_check; run with 0.19.8",
        find=_untested,
    ),
    Rule(
        name="adam-is-adamw",
        severity="warning",
        kind="deepspeed",
        happens="`Adam` runs AdamW.",
        source=f"{_BASIC}: ADAM_W_MODE_DEFAULT",
        find=_adam_is_adamw,
    ),
    Rule(
        name="max-grad-norm",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed stops with a ValueError.",
        source=f"{_BASIC}; run with 0.19.8",
        find=_max_grad_norm,
    ),
    Rule(
        name="unknown-optimizer-parameter",
        severity="error",
        kind="deepspeed",
        happens="The optimizer's constructor stops with a TypeError.",
        source=f"{_BASIC}: parameters are passed on as they stand",
        find=_params,
    ),
    Rule(
        name="text-for-a-number",
        severity="error",
        kind="deepspeed",
        happens="Parameters of optimizers and schedules reach them as they stand: torch's AdamW stops with a "
        'TypeError at `"lr": "1e-5"`, a schedule when it is built or at the first step.',
        source=f"{_BASIC}, _configure_lr_scheduler; run with 0.19.8",
        find=_text_for_a_number,
    ),
    Rule(
        name="clipping-default",
        severity="note",
        kind="deepspeed",
        happens="The default changed from 0.0, no clipping, to 1.0.",
        source="https://github.com/deepspeedai/DeepSpeed/pull/8068",
        versions="deepspeed>=0.19.3,<0.20",
        find=_clipping_default,
    ),
    Rule(
        name="unknown-schedule",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed stops with an AssertionError.",
        source=f"{_SCHEDULES}: VALID_LR_SCHEDULES; run with 0.19.8",
        find=_unknown_schedule,
    ),
    Rule(
        name="schedule-needs-a-parameter",
        severity="error",
        kind="deepspeed",
        happens="The schedule's constructor stops with a TypeError.",
        source=f"{_SCHEDULES}; run with 0.19.8",
        find=_missing_parameter,
    ),
    Rule(
        name="warmup-steps",
        severity="error",
        kind="deepspeed",
        happens="A warm-up of 0 steps stops DeepSpeed; before 0.19.6 it became 2.",
        source=f"{_SCHEDULES}: WarmupLR.__init__; run with 0.19.8",
        versions="deepspeed>=0.19.6,<0.20",
        find=_warmup,
    ),
    Rule(
        name="muon-at-stage-3",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed stops: Muon and reduce scatter cannot be used together.",
        source="deepspeed/runtime/zero/stage3.py; run with 0.19.8",
        find=_muon,
    ),
)
