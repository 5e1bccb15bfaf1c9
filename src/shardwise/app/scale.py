"""A job on several numbers of GPUs."""

import re
from collections.abc import Sequence
from contextlib import nullcontext

from shardwise.app.jobs import AnyJob, read
from shardwise.app.plan import plan
from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware, resized
from shardwise.planner.plan import Objective
from shardwise.planner.planning import Making
from shardwise.planner.scaling import Scaling, Size
from shardwise.planner.sketch import default_global_batch
from shardwise.planner.why import does_not_fit

FIX = "numbers of GPUs, or nodes x GPUs, with commas, such as 1,2,4,8,16x8"


def scale(
    sizes: str,
    job: AnyJob | None = None,
    *,
    gpus: str | None,
    model: str | None = None,
    changes: Sequence[str] = (),
    objective: Objective = "throughput",
    memory_cap: str | int | None = None,
    straggler: str | float | None = None,
    making: Making = nullcontext,
) -> Scaling:
    """Plan the same job on several numbers of GPUs.

    Args:
        sizes: `1,2,4,8,16x8`: GPUs, or nodes x GPUs. More GPUs than a node has are several nodes.
        job: as for `plan`. Without one, the rows of a step are those that `plan` takes for the most GPUs.
        gpus: their kind and links, as for `plan`; its last number says how many a node has.
        model: as for `plan`, as are the others.
        changes: `key=value` texts.
        objective: the metric to choose by.
        memory_cap: use no more of each GPU.
        straggler: standard deviation of a GPU's step time.
        making: entered while a plan is made.

    Returns:
        The choice for each size, in the order asked for.

    Raises:
        JobError: the sizes cannot be read, or the job is wrong whatever the number of GPUs.
    """
    if gpus is None:
        raise JobError("--scale needs to know which GPUs", where="--scale", fix="name them: --gpus 8xH100")
    found = [_hardware(size, gpus) for size in sizes.split(",")]
    key = "train.global_batch="
    if job is None and not any(change.replace(" ", "").startswith(key) for change in changes):
        most = max(hardware.world_size for _, hardware in found)
        changes = [*changes, f"{key}{default_global_batch(most)}"]
    shared = {"model": model, "changes": changes, "objective": objective, "memory_cap": memory_cap}
    rows = []
    for text, hardware in found:
        problem = ""
        try:
            made = plan(job, gpus=text, straggler=straggler, making=making, **shared)  # type: ignore[arg-type]
        except JobError as error:
            made, problem = None, "; ".join(one.what for one in error.problems)
        if made is not None and made.chosen is None:
            problem = does_not_fit(made).problems[0].what
        rows.append(Size(gpus=text, world_size=hardware.world_size, plan=made, problem=problem))
    if all(row.plan is None for row in rows):
        raise JobError(
            f"no number of GPUs is possible: {rows[0].problem}", where="--scale", fix="change the job"
        )
    return Scaling(sizes=tuple(rows), price_per_gpu_hour=_price(job, changes))


def _hardware(size: str, gpus: str) -> tuple[str, Hardware]:
    """The hardware text of one size, and what it means."""
    numbers = re.fullmatch(r"\s*(?:([1-9][0-9]{0,4})\s*[x×]\s*)?([1-9][0-9]{0,4})\s*", size)
    if numbers is None:
        raise JobError(f"{size.strip()!r} is no number of GPUs", where="--scale", fix=FIX)
    nodes = None if numbers[1] is None else int(numbers[1])
    text = resized(gpus, nodes=nodes, gpus=int(numbers[2]))
    return text, parse_hardware(text)


def _price(job: AnyJob | None, changes: Sequence[str]) -> float | None:
    """The job's `energy.price_per_gpu_hour`."""
    if job is not None:
        return read(job, changes).job.energy.price_per_gpu_hour
    named = dict(change.split("=", 1) for change in changes)
    price = named.get("energy.price_per_gpu_hour")
    return None if price is None else float(price)
