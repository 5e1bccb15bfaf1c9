"""Batch sizes: DeepSpeed asserts `train_batch_size = micro-batch x accumulation x GPUs` at the start."""

from collections.abc import Iterator

from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, rule
from shardwise.lint.rules.zero import ZERO, is_template
from shardwise.lint.setup import Setup, launched_processes
from shardwise.units import processes

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
ROWS = "per_device_train_batch_size"  # the argument of the Trainer
_STOPS = "DeepSpeed stops with an AssertionError"
_ASSERTION = "deepspeed/runtime/config.py: _set_batch_related_parameters, _batch_assertion"


def _given(document: Document) -> tuple[int | None, int | None, int | None]:
    numbers = (document.number(name) for name in (TOTAL, MICRO, ACCUMULATION))
    total, micro, accumulation = (int(n) if n is not None and n > 0 else None for n in numbers)
    return total, micro, accumulation


def data_ranks(document: Document, setup: Setup) -> int | None:
    """DeepSpeed's factor: processes divided by the sequence-parallel size, not by AutoTP's."""
    if setup.world_size is None or "PipelineModule(" in setup.scripts:
        return None
    return setup.world_size // max(1, int(document.number("sequence_parallel_size") or 1))


@rule("error", _ASSERTION)
def batch_arithmetic(document: Document, setup: Setup) -> Iterator[Hit]:
    """The total batch must be micro-batch x accumulation x GPUs, or a multiple of them: else it stops."""
    total, micro, accumulation = _given(document)
    if total is None:
        return
    if setup.reader == "trainer" and isinstance(rows := setup.training(ROWS), int):
        micro, accumulation = micro or rows, accumulation or setup.training(ACCUMULATION) or 1
    known = [n for n in (micro, accumulation) if n is not None]
    ranks, complete = data_ranks(document, setup), len(known) == 2
    if not known:
        yield from _total_alone(total, ranks)
        return
    stops = "the Trainer stops" if micro not in (None, document.get(MICRO)) else _STOPS
    product, words = known[0] * (known[1] if complete else 1), " x ".join(map(str, known))
    if ranks is None:
        complete &= "PipelineModule(" not in setup.scripts  # whose stages share rows
        yield from _without_ranks(total, product, words, complete=complete)
        return
    fits = product * ranks
    if total == fits or (not complete and total % fits == 0):
        return
    instead = f"`{TOTAL}`: {fits}"
    if complete and micro and total % (micro * ranks) == 0:
        instead = f"`{ACCUMULATION}`: {total // (micro * ranks)} for a batch of {total}, or {instead}"
    sign = "is not" if complete else "is no multiple of"
    what = f"{total} {sign} {words} x {processes(ranks)} = {fits}: {stops}"
    # no change: only the owner knows which number is right, and the batch decides the training
    yield Hit((TOTAL,), what, f"remove `{TOTAL}` (DeepSpeed computes it), or {instead}")


def _total_alone(total: int, ranks: int | None) -> Iterator[Hit]:
    """DeepSpeed rounds the micro-batch down, then asserts the product."""
    if ranks is None or total % ranks == 0:
        return
    above = -(-total // ranks) * ranks
    near = f"{above - ranks} or {above}" if above > ranks else f"{above}"
    what = f"{total} is no multiple of {processes(ranks)}: {_STOPS}, whatever the micro-batch"
    yield Hit((TOTAL,), what, f"`{TOTAL}`: {near}, or remove it and give `{MICRO}`")


def _without_ranks(total: int, product: int, words: str, *, complete: bool) -> Iterator[Hit]:
    fix = f"remove `{TOTAL}`: DeepSpeed computes it"
    if total % product:
        what = f"{total} is no multiple of {words} = {product}: wrong for any number of GPUs"
        yield Hit((TOTAL,), what, fix)
    elif complete:
        what = f"{total} = {words} x GPUs is true with {processes(total // product)} only; else {_STOPS}"
        yield Hit((TOTAL,), what, f"{fix}; --gpus checks it for your GPUs", severity="note")


@rule("error", _ASSERTION)
def no_batch_size(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without a micro-batch or a total batch DeepSpeed stops."""
    if document.has(TOTAL) or document.has(MICRO) or is_template(document) or setup.lightning:
        return
    part = setup.reader is None and set(document.values) <= {ZERO, "bf16", "fp16"}
    what = f"neither `{MICRO}` nor `{TOTAL}` is given: DeepSpeed stops with an AssertionError"
    what += ", unless this is a part of a larger file" if part else ""
    fix = f'"{MICRO}": "auto" uses the data loader\'s' if setup.hugging_face else f'"{MICRO}": 1'
    changes = (Put((MICRO,), AUTO),) if setup.hugging_face else ()
    yield Hit((), what, fix, changes, "warning" if part else None)


@rule("error", "lightning/pytorch/strategies/deepspeed.py: _format_batch_size_and_grad_accum_config", "")
def accumulation_under_lightning(document: Document, setup: Setup) -> Iterator[Hit]:
    """Lightning's Trainer stops with a MisconfigurationException: it sets the accumulation itself."""
    if document.has(ACCUMULATION) and setup.lightning:
        fix = "remove it, and give the Trainer accumulate_grad_batches"
        yield Hit((ACCUMULATION,), fix=fix, changes=(Drop((ACCUMULATION,)),))


@rule("warning", _ASSERTION)
def global_batch_alone(document: Document, setup: Setup) -> Iterator[Hit]:
    """A total batch without a micro-batch is computed at once, which easily runs out of memory."""
    total, micro, accumulation = _given(document)
    ranks = data_ranks(document, setup)
    if total is None or micro is not None or accumulation is not None or document.has(MICRO):
        return
    if (ranks and total % ranks) or (setup.reader == "trainer" and setup.training(ROWS)):
        return  # DeepSpeed does not start; the Trainer's arguments say how many rows
    rows = total // ranks if ranks else total
    each = f"{rows} row{'' if rows == 1 else 's'}{'' if ranks else ' over the number of GPUs'}"
    what = f"with `{TOTAL}` alone DeepSpeed does not accumulate: each GPU computes {each} at a time"
    fix = f"also give `{MICRO}`, the rows that fit"
    yield Hit((TOTAL,), what, fix, severity="warning" if ranks is None or rows > 1 else "note")


@rule("warning", "deepspeed/runtime/config.py: world_size without an mpu; run with 2 processes")
def batch_under_tensor_parallelism(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed's check does not divide by autotp_size: the real batch is smaller than the written one."""
    degree, total = document.number("tensor_parallel", "autotp_size") or 0, document.number(TOTAL)
    if degree > 1 and total is not None:
        what = f"{degree:g} GPUs share each row, and DeepSpeed counts all: "
        what += f"the batch is {total / degree:g} rows"
        fix = f"remove `{TOTAL}` and count micro-batch x accumulation x GPUs / {degree:g}"
        yield Hit((TOTAL,), what, fix)


@rule("warning", "arithmetic", versions="", kind="training")
def launch_and_gpus_differ(document: Document, setup: Setup) -> Iterator[Hit]:
    """The launch command starts another number of processes than there are GPUs."""
    return _processes_differ(document, setup)


@rule("warning", "arithmetic", versions="", kind="accelerate")
def processes_and_gpus_differ(document: Document, setup: Setup) -> Iterator[Hit]:
    """`num_processes` is another number than there are GPUs."""
    return _processes_differ(document, setup)


def _processes_differ(document: Document, setup: Setup) -> Iterator[Hit]:
    started = launched_processes(document)
    if started is not None and setup.asked_world_size not in (None, started):
        name = next(n for n in ("num_processes", "num_gpus", "nproc_per_node") if document.has(n))
        what = f"it starts {processes(started)}, but --gpus names {setup.asked_world_size} GPUs"
        yield Hit((name,), what, f"`{name}`: one process per GPU")
