"""`python -m shardwise.training.post_mortem REQUEST.json`: explains how GPU memory ran out.

The launcher starts it when all workers have ended (launch/oom.py). It uses no GPU, and answers in a file:
what was short, which term exceeds its prediction, what would help, and what to retry with.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.engines import settings_of
from shardwise.errors import JobError, MachineError, Problem
from shardwise.folders import replace_json
from shardwise.hardware.detect import detect_hardware
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.links import network_link
from shardwise.job.schema import Job
from shardwise.launch.resume import resume_command
from shardwise.launch.spec import LaunchSpec
from shardwise.planner.plan import Option, in_words
from shardwise.planner.planning import make_plan, nearest_change, predict_strategy
from shardwise.planner.relief import flags, following, leaner_unpredicted, reliefs, same_state
from shardwise.planner.search import MARGIN
from shardwise.record.schema import OutOfMemory
from shardwise.simulate.prediction import Memory
from shardwise.strategy import Strategy
from shardwise.training.oom import headline, memory_in_words, size
from shardwise.units import gib

WORTH_NAMING = 0.005  # Excesses below this share of the GPU are left out
HARDER = "shorter rows (data.sequence_length), LoRA (model.lora), another strategy (zero3, zero3-offload), "
HARDER += "more GPUs or larger ones"


class Case:
    """A failed strategy, what was tried before it, and what the simulator predicts for it and for others."""

    def __init__(self, request: Mapping[str, Any], hardware: Hardware | None) -> None:
        """`hardware` is None where the GPUs are unknown; then nothing is predicted."""
        self.spec = LaunchSpec.from_json(request["spec"])
        self.job = Job.model_validate(self.spec.job)
        self.evidence = OutOfMemory(**request["failures"][-1])
        self.tried = [Strategy.from_json(failure["strategy"]) for failure in request["failures"]]
        self.failed = self.tried[-1]
        self.saved = request["saved_step"] is not None
        self.hardware = hardware
        self.limits: dict[str, Any] = {"memory_cap_bytes": self.spec.memory_cap_bytes}
        self.limits["vocab_size"] = self.evidence.vocab_size

    @cached_property
    def prediction(self) -> Option | None:
        """For the failed strategy; None where it cannot be simulated."""
        if self.hardware is None or (self.failed.tensor_parallel > 1 and not self.own_kind):
            return None  # space/candidates.py: predictable
        return predict_strategy(self.job, self.hardware, self.failed, **self.limits)

    @cached_property
    def beyond_bytes(self) -> int:
        """What the process needed more than predicted, at least."""
        assert self.prediction is not None
        return max(0, used_bytes(self.evidence) - self.prediction.prediction.memory.needed_bytes)

    @cached_property
    def own_kind(self) -> tuple[Option, ...]:
        """The failed strategy's kind, with every micro-batch and checkpointing."""
        return self._options(settings_of(self.failed))

    @cached_property
    def all_kinds(self) -> tuple[Option, ...]:
        return self._options("auto")

    def unpredicted(self) -> list[Strategy]:
        return [one for one in leaner_unpredicted(self.failed) if one not in self.tried]

    def nearest(self) -> str:
        """The nearest change of job or hardware that would help, as advice."""
        if self.prediction is None or self.hardware is None:
            return HARDER
        short = self.beyond_bytes / self.prediction.prediction.memory.capacity_bytes
        near = nearest_change(self._open("auto"), self.hardware, margin=MARGIN + short, **self.limits)
        if near is None:
            return f"{HARDER}: none that was tried is enough by itself"
        needed = gib(near.option.prediction.memory.needed_bytes)
        return f"{near.how} ({near.what}): {in_words(near.option.strategy)} fits, in {needed}"

    def _open(self, strategy: Any) -> Job:
        """The job with micro-batch and checkpointing left open."""
        train = self.job.train.model_copy(update={"micro_batch": None, "checkpointing": "auto"})
        return self.job.model_copy(update={"train": train, "strategy": strategy})

    def _options(self, strategy: Any) -> tuple[Option, ...]:
        assert self.hardware is not None
        try:
            return make_plan(self._open(strategy), self.hardware, **self.limits).options
        except JobError:  # no strategy is allowed
            return ()


def main(arguments: list[str] | None = None) -> int:
    """Answer the request."""
    request = json.loads(Path((arguments or sys.argv[1:])[0]).read_text(encoding="utf-8"))
    hardware = None
    with suppress(MachineError):  # GPUs that differ, or parts of one
        hardware = detect_hardware()
    if hardware is not None:
        gpus, nodes = request["spec"]["processes"], (request["spec"].get("nodes") or {}).get("count", 1)
        # What fits does not depend on the network between nodes: any stands for it.
        inter = None if nodes == 1 else network_link("eth25", adapters=1, gpus_per_node=gpus)
        hardware = replace(hardware, gpus_per_node=gpus, nodes=nodes, inter=inter)
    replace_json(Path(request["answer"]), post_mortem(request, hardware))
    return 0


def post_mortem(request: Mapping[str, Any], hardware: Hardware | None) -> dict[str, Any]:
    """The answer: `headline`, `facts` and `changes` of the error, and `next`, what to retry with.

    `next` is plan.json's `chosen`, in words `next_in_words`. If it is null although a retry was asked for,
    `why_no_next` gives the reason, and `instead` what would have to change.
    """
    case = Case(request, hardware)
    evidence = case.evidence
    facts = [Problem(what=memory_in_words(evidence), where=f"rank {evidence.rank}, {evidence.call}")]
    if case.prediction is not None:
        facts.append(Problem(what=_against_the_plan(case, case.prediction.prediction.memory)))
    answer: dict[str, Any] = {"headline": headline(evidence), "next": None}
    if case.spec.on_oom == "retry":
        answer["next"] = chosen = _next(case)
        if chosen is None:
            answer["why_no_next"] = "nothing is known to need less than what was tried"
            answer["instead"] = case.nearest()
        else:
            answer["next_in_words"] = in_words(Strategy.from_json(chosen["strategy"]))
    changes = list(_changes(case))
    if not changes and "instead" not in answer:
        changes = [Problem(what="no strategy needs less than this one", fix=case.nearest())]
    return {**answer, "facts": [*map(asdict, facts)], "changes": [*map(asdict, changes)]}


def used_bytes(evidence: OutOfMemory) -> int:
    """The GPU memory in use if the failed allocation had succeeded, with other processes' share.

    A lower bound: more allocations may have followed. 0 where it is unknown.
    """
    if evidence.allocated_bytes is None or evidence.total_bytes is None or evidence.free_bytes is None:
        return 0
    used = evidence.total_bytes - evidence.free_bytes
    if evidence.allowed_bytes is not None and evidence.process_bytes is not None:
        used = evidence.process_bytes  # the cap counts this process only
    unused = (evidence.reserved_bytes or 0) - evidence.allocated_bytes
    return used + max(0, (evidence.asked_bytes or 0) - unused)


def measured(evidence: OutOfMemory, memory: Memory) -> list[tuple[str, int, int]]:
    """(part of the memory, bytes measured, bytes predicted), for the parts that were measured.

    What stays allocated after the step's tensors are freed; what that freed, with what was asked for; what
    was reserved in fragments; what this process holds outside torch's allocator; what other processes hold.
    """
    e, terms, found = evidence, memory.terms, []
    states = terms.weights_bytes + terms.optimizer_bytes + terms.gradients_bytes + terms.engine_buffers_bytes
    if e.resident_bytes is not None:
        found.append(("weights, optimizer, gradients and buffers", e.resident_bytes, states))
        if e.allocated_bytes is not None:
            step = e.allocated_bytes - e.resident_bytes + (e.asked_bytes or 0)
            found.append(("activations and the loss", step, terms.activations_bytes + terms.loss_bytes))
    if e.reserved_bytes is not None and e.allocated_bytes is not None:
        found.append(("fragments", e.reserved_bytes - e.allocated_bytes, terms.fragmentation_bytes))
    if e.reserved_bytes is not None and e.process_bytes is not None:
        outside = e.process_bytes - e.reserved_bytes
        found.append(("CUDA and NCCL", outside, memory.outside_allocator_bytes))
        if e.total_bytes is not None and e.free_bytes is not None:
            others = max(0, e.total_bytes - e.free_bytes - e.process_bytes)
            found.append(("other processes", others, 0))
    return found


def _against_the_plan(case: Case, memory: Memory) -> str:
    """Measured compared with predicted, the largest excess first."""
    terms = sorted(measured(case.evidence, memory), key=lambda term: term[2] - term[1])
    over = [term for term in terms if term[1] - term[2] > WORTH_NAMING * memory.capacity_bytes]
    compared = "; ".join(f"{name} {size(now)}, predicted {size(then)}" for name, now, then in over or terms)
    needed, capacity = gib(memory.needed_bytes), gib(memory.capacity_bytes)
    begins = f"more than predicted: {compared}; " if over else ""
    if terms and not over:
        begins = f"no term is over its prediction so far ({compared}); "
    not_planned = case.evidence.phase in ("evaluation", "saving", "restoring", "building")
    ends = ", and counts training steps only" if not_planned else ""
    return f"{begins}the plan predicts {needed} of {capacity} for {in_words(case.failed)}{ends}"


def _changes(case: Case) -> Iterator[Problem]:
    """Up to three changes, with what they save and cost where that can be predicted."""
    failed = case.prediction
    if failed is None or case.hardware is None:
        yield from (Problem(what=in_words(one), fix=_how(case, one)) for one in case.unpredicted()[:3])
        return
    options = {option.strategy: option for option in (*case.own_kind, *case.all_kinds)}
    options.pop(case.failed, None)
    for option in reliefs(failed, list(options.values()), case.beyond_bytes, case.hardware):
        saved = failed.prediction.memory.needed_bytes - option.prediction.memory.needed_bytes
        times = option.prediction.time.step_seconds / failed.prediction.time.step_seconds
        enough = "" if option.fit != "no" else ", which is not enough"
        what = f"{in_words(option.strategy)}: {size(saved)} less{enough}, {times:.2f}x the time of a step"
        yield Problem(what=f"{what} (predicted)", fix=_how(case, option.strategy))


def _how(case: Case, strategy: Strategy) -> str:
    """The flags; with what was saved, where something was."""
    arguments = " ".join(flags(case.failed, strategy))
    return f"{resume_command(Path(case.spec.run_dir))} {arguments}" if case.saved else arguments


def _next(case: Case) -> dict[str, Any] | None:
    """What to retry with, as plan.json's `chosen`.

    Where the job names a kind, that comes first.
    """
    why = f"instead of {in_words(case.failed)}: {headline(case.evidence)}"
    if case.prediction is None or case.hardware is None:
        leaner = case.unpredicted()
        return {"strategy": leaner[0].to_json(), "why": [why]} if leaner else None
    found, against = None, (case.tried, case.beyond_bytes, case.hardware)
    if case.job.strategy != "auto":
        own = [option for option in case.own_kind if same_state(case.failed, option.strategy)]
        found = following(case.prediction, own, *against)
    if found is None:
        found = following(case.prediction, case.all_kinds, *against)
    return None if found is None else replace(found, why=(why,)).to_json()


if __name__ == "__main__":
    sys.exit(main())
