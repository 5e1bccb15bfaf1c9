"""How the file is written, and who reads it."""

from collections.abc import Iterator

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document, line_at
from shardwise.lint.edit import Drop, Strict
from shardwise.lint.finding import Hit, Severity, rule
from shardwise.lint.rules.accelerate import given_twice
from shardwise.lint.rules.batch import ACCUMULATION, MICRO, TOTAL
from shardwise.lint.schema import names
from shardwise.lint.setup import READER_NAMES, Setup

_BY_BOTH = frozenset(names("filled_autos"))
FILLED = {"trainer": _BY_BOTH | {"optimizer.params.betas", "optimizer.params.eps"}, "accelerate": _BY_BOTH}
"""Keys whose `auto` the Trainer and Accelerate replace; the plugin they share fills stage and devices."""

_OWN_AUTO = frozenset(names("own_autos"))

_FAILS = dict.fromkeys((TOTAL, MICRO, ACCUMULATION), "TypeError at the start")
_FAILS["gradient_clipping"] = "TypeError at the first step"
_JSON_LOAD = "deepspeed/runtime/config.py: hjson.load; accelerate/utils/deepspeed.py: json.load"


def autos(document: Document) -> list[Key]:
    """Keys with the value `auto` that are not DeepSpeed's own."""
    keys = [key for key in document.marks if document.get(*key) == AUTO and key not in document.unknown]
    off = [one for one in ("fp16", "bf16") if document.get(one, "enabled") is False]  # which is not read
    return [key for key in keys if ".".join(key) not in _OWN_AUTO and (key[0] not in off or len(key) < 2)]


@rule("error", "deepspeed/runtime/config_utils.py: DeepSpeedConfigModel.__init__; run with 0.19.8")
def auto_without_trainer(document: Document, setup: Setup) -> Iterator[Hit]:
    """Only the Trainer and Accelerate replace `auto`; DeepSpeed drops it (`stage` becomes 0) or stops."""
    keys = autos(document)
    if setup.reader is None and keys:
        more = "" if len(keys) == 1 else f", and for {len(keys) - 1} more keys"
        what = f"it is `auto`{more}: the Trainer and Accelerate fill it in; "
        what += "DeepSpeed itself drops it or stops"
        fix = "nothing, if the Trainer or Accelerate reads it (--reader trainer); else write the values"
        yield Hit(keys[0], what, fix, severity="note")
    for key in keys if setup.reader == "deepspeed" else ():
        in_params = key[0] in ("optimizer", "scheduler")
        default = "TypeError at the start" if in_params else "it drops `auto` and uses the default"
        harmless = key[0] == "zero_optimization" and key[-1].endswith(("_size", "_threshold"))
        severity: Severity = "warning" if harmless else "error"
        effect = _FAILS.get(".".join(key), default)
        what = f"only the Trainer and Accelerate fill in `auto`; DeepSpeed itself: {effect}"
        yield Hit(key, what, "write the value", (Drop(key),) if harmless else (), severity)


@rule("error", "transformers/integrations/deepspeed.py; accelerate/accelerator.py: _prepare_deepspeed", "")
def auto_nobody_fills(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer and Accelerate replace `auto` for some keys only; for others it reaches DeepSpeed."""
    if setup.reader not in FILLED:
        return
    for key in autos(document):
        if ".".join(key) in FILLED[setup.reader]:
            continue
        dropped = key[0] in ("zero_optimization", "bf16", "fp16", "tensor_parallel", "compile")
        effect = "uses its default" if dropped else "finds text where it needs a value"
        what = f"{READER_NAMES[setup.reader]} does not fill in this `auto`; DeepSpeed then {effect}"
        changes = (Drop(key),) if dropped else ()
        yield Hit(key, what, "write the value, or remove the key", changes, "warning" if dropped else "error")


@rule("error", _JSON_LOAD)
def braces_are_missing(document: Document, _: Setup) -> Iterator[Hit]:
    """A part copied out of a configuration is no JSON: its keys need braces around them."""
    if document.bare:
        yield Hit((), fix="{ before the first key, } after the last value; one file for all sections", line=1)


@rule("error", _JSON_LOAD)
def comments_in_json(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed reads the file with hjson, which allows comments; the Trainer and Accelerate use json."""
    if document.comments and setup.reader != "deepspeed":
        first, count = line_at(document.text, document.comments[0][0]), len(document.comments)
        words = ("a comment in JSON", "it") if count == 1 else (f"{count} comments in JSON", "them")
        yield _not_strict(document, setup, first, *words)


@rule("error", _JSON_LOAD)
def trailing_comma_in_json(document: Document, setup: Setup) -> Iterator[Hit]:
    """As with comments: hjson allows a trailing comma, json does not."""
    if document.trailing_commas and setup.reader != "deepspeed":
        first = line_at(document.text, document.trailing_commas[0])
        yield _not_strict(document, setup, first, "a comma before a closing bracket", "it")


@rule("error", "accelerate/utils/deepspeed.py: json.load; run with 1.15.0, and DeepSpeed 0.19.8")
def byte_order_mark(document: Document, setup: Setup) -> Iterator[Hit]:
    """Windows editors start a file with a mark: the Trainer and Accelerate stop there, DeepSpeed does not."""
    if document.marked and setup.reader != "deepspeed":
        yield _not_strict(document, setup, 1, "the file begins with a UTF-8 byte order mark", "it")


def _not_strict(document: Document, setup: Setup, line: int, what: str, it: str) -> Hit:
    fatal = setup.hugging_face or bool(autos(document))  # `auto` is written for one of the two
    changes = (Strict(),) if fatal else ()  # the owner may want the comments if strict JSON is not needed
    what += f": DeepSpeed ignores {it}; the Trainer and Accelerate stop with JSONDecodeError"
    return Hit((), what, f"remove {it}", changes, "error" if fatal else "warning", line)


@rule("error", "deepspeed/runtime/config_utils.py: dict_raise_error_on_duplicate_keys; run with 0.19.8")
def duplicate_key(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed refuses a key or section given twice; the others use the last, and ignore the first."""
    happens, goes_on = "DeepSpeed stops with a ValueError: Duplicate keys", setup.hugging_face
    if goes_on and setup.reader:
        happens = f"{READER_NAMES[setup.reader]} uses this one, and silently ignores the first"
    yield from given_twice(document, happens, stops=not goes_on)
