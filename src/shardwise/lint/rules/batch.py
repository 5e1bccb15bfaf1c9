"""Batch sizes: `train_batch_size = micro-batch x accumulation x GPUs` is asserted when DeepSpeed starts."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Put
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.setup import Setup, launched_processes
from shardwise.units import processes

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def _given(document: Document) -> tuple[int | None, int | None, int | None]:
    numbers = (document.number(name) for name in (TOTAL, MICRO, ACCUMULATION))
    total, micro, accumulation = (int(n) if n is not None and n > 0 else None for n in numbers)
    return total, micro, accumulation


def data_ranks(document: Document, setup: Setup) -> int | None:
    """What DeepSpeed multiplies by: processes over the sequence-parallel size, not over AutoTP's."""
    if setup.world_size is None:
        return None
    return setup.world_size // max(1, int(document.number("sequence_parallel_size") or 1))


def _arithmetic(document: Document, setup: Setup) -> Iterator[Hit]:
    total, micro, accumulation = _given(document)
    if total is None:
        return
    known = [n for n in (micro, accumulation) if n is not None]
    if not known:
        yield from _total_alone(total, data_ranks(document, setup))
        return
    product = known[0] * (known[1] if len(known) > 1 else 1)
    words = " x ".join(str(n) for n in known)
    ranks = data_ranks(document, setup)
    if ranks is None:
        yield from _without_ranks(total, product, words, complete=len(known) == 2)
        return
    right = total == product * ranks if len(known) == 2 else total % (product * ranks) == 0
    if right:
        return
    sign = "is not" if len(known) == 2 else "is no multiple of"
    fits = product * ranks
    instead = f"`{TOTAL}`: {fits}"
    if len(known) == 2 and micro and total % (micro * ranks) == 0:
        instead = f"`{ACCUMULATION}`: {total // (micro * ranks)} for a batch of {total}, or {instead}"
    yield Hit(
        key=(TOTAL,),
        what=f"{total} {sign} {words} x {processes(ranks)} = {fits}: DeepSpeed stops with an AssertionError",
        fix=f"leave `{TOTAL}` out (DeepSpeed computes it), or {instead}",
    )  # which of them was meant, only the owner knows: the batch decides the training


def _total_alone(total: int, ranks: int | None) -> Iterator[Hit]:
    """The rest of the division is lost: DeepSpeed makes a micro-batch of it, and asserts the product."""
    if ranks is None or total % ranks == 0:
        return
    above = -(-total // ranks) * ranks
    near = f"{above - ranks} or {above}" if above > ranks else f"{above}"
    yield Hit(
        key=(TOTAL,),
        what=f"{total} is no multiple of {processes(ranks)}: with any micro-batch DeepSpeed stops with an "
        "AssertionError",
        fix=f"`{TOTAL}`: {near}, or leave it out and give `{MICRO}`",
    )


def _without_ranks(total: int, product: int, words: str, *, complete: bool) -> Iterator[Hit]:
    if total % product:
        yield Hit(
            key=(TOTAL,),
            what=f"{total} is no multiple of {words} = {product}: it is wrong on any number of GPUs",
            fix=f"leave `{TOTAL}` out: DeepSpeed computes it",
        )
    elif complete:
        yield Hit(
            key=(TOTAL,),
            what=f"{total} = {words} x GPUs holds on exactly {total // product}; on any other number "
            "DeepSpeed stops with an AssertionError",
            fix=f"leave `{TOTAL}` out: DeepSpeed computes it; --gpus checks it for your GPUs",
            severity="note",
        )


def _no_batch_size(document: Document, setup: Setup) -> Iterator[Hit]:
    if document.has(TOTAL) or document.has(MICRO):
        return
    yield Hit(
        key=(),
        what=f"neither `{MICRO}` nor `{TOTAL}` is given: DeepSpeed stops with an AssertionError",
        fix=f'"{MICRO}": "auto" takes the data loader\'s' if setup.hugging_face else f'"{MICRO}": 1',
        changes=(Put(key=(MICRO,), value=AUTO),) if setup.hugging_face else (),
    )


def _micro_with_total_only(document: Document, setup: Setup) -> Iterator[Hit]:
    total, micro, accumulation = _given(document)
    if total is not None and micro is None and accumulation is None and not document.has(MICRO):
        ranks = data_ranks(document, setup)
        if ranks and total % ranks:
            return  # DeepSpeed does not start: batch-arithmetic
        rows = total // ranks if ranks else total
        each = f"{rows} row{'' if rows == 1 else 's'}{'' if ranks else ' over the number of GPUs'}"
        yield Hit(
            key=(TOTAL,),
            what=f"with `{TOTAL}` alone DeepSpeed takes no accumulation: each GPU computes {each} at a time",
            fix=f"give `{MICRO}` as well, the rows that fit",
            severity="warning" if ranks is None or total // ranks > 1 else "note",
        )


def _tensor_parallel(document: Document, _: Setup) -> Iterator[Hit]:
    degree = document.number("tensor_parallel", "autotp_size") or 0
    if degree > 1 and document.number(TOTAL) is not None:
        yield Hit(
            key=(TOTAL,),
            what=f"DeepSpeed checks it against all GPUs, though {degree:g} of them share each row: the real "
            f"batch is {document.number(TOTAL) / degree:g} rows",  # type: ignore[operator]
            fix=f"leave `{TOTAL}` out and count micro-batch x accumulation x GPUs / {degree:g}",
        )


def _launches_differ(document: Document, setup: Setup) -> Iterator[Hit]:
    started = launched_processes(document)
    if started is not None and setup.asked_world_size not in (None, started):
        name = next(n for n in ("num_processes", "num_gpus", "nproc_per_node") if document.has(n))
        yield Hit(
            key=(name,),
            what=f"it starts {processes(started)}, and --gpus names {setup.asked_world_size} GPUs",
            fix=f"`{name}`: one process a GPU",
        )


_ASSERTION = "deepspeed/runtime/config.py: _set_batch_related_parameters, _batch_assertion"

RULES = (
    Rule(
        name="batch-arithmetic",
        severity="error",
        kind="deepspeed",
        happens="Given together, the three sizes have to multiply to the whole on the GPUs that run, and a "
        "whole given alone has to be a multiple of them; otherwise DeepSpeed stops. A note where the number "
        "of GPUs is not known and one would fit.",
        source=_ASSERTION,
        find=_arithmetic,
    ),
    Rule(
        name="no-batch-size",
        severity="error",
        kind="deepspeed",
        happens="Without a micro-batch or a whole batch DeepSpeed stops.",
        source=_ASSERTION,
        find=_no_batch_size,
    ),
    Rule(
        name="whole-batch-alone",
        severity="warning",
        kind="deepspeed",
        happens="The whole batch without a micro-batch is computed at once: the easiest way out of memory.",
        source=_ASSERTION,
        find=_micro_with_total_only,
    ),
    Rule(
        name="batch-under-tensor-parallelism",
        severity="warning",
        kind="deepspeed",
        happens="The configuration's arithmetic does not divide by autotp_size: the batch that is trained "
        "is smaller than the one that is written.",
        source="deepspeed/runtime/config.py: world_size without an mpu; run with 2 processes, autotp_size 2",
        find=_tensor_parallel,
    ),
    Rule(
        name="launch-and-gpus-differ",
        severity="warning",
        kind="training",
        happens="The launch command starts another number of processes than there are GPUs.",
        source="arithmetic",
        versions="",
        find=_launches_differ,
    ),
    Rule(
        name="processes-and-gpus-differ",
        severity="warning",
        kind="accelerate",
        happens="`num_processes` is another number than there are GPUs.",
        source="arithmetic",
        versions="",
        find=_launches_differ,
    ),
)
