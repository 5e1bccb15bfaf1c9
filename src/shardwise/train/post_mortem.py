"""`python -m shardwise.train.post_mortem REQUEST.json`: explains how GPU memory ran out.

The launcher starts it when all workers have ended. It touches no GPU, and answers in a file: what was short,
which term is not as it was planned, what would help, and what a retry is to go on with (launch/aftermath.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.engines import settings_of
from shardwise.errors import JobError, MachineError, Problem
from shardwise.hardware.detect import detect_hardware, gpu_count
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.launch.resume import resume_command
from shardwise.launch.spec import LaunchSpec
from shardwise.planner.plan import Option, Plan, in_words
from shardwise.planner.planning import make_plan, nearest_change, predict_strategy
from shardwise.planner.relief import flags, following, leaner_unpredicted, reliefs, same_state
from shardwise.planner.search import MARGIN
from shardwise.record.schema import OutOfMemory
from shardwise.simulate.prediction import Memory
from shardwise.space.candidates import candidates
from shardwise.strategy import Strategy
from shardwise.train.out_of_memory import headline, memory_in_words, size
from shardwise.units import gib

WORTH_TELLING = 0.005
"""Excesses below this share of the GPU are not told."""
HARDER = "shorter rows (data.sequence_length), LoRA (model.lora), more GPUs or larger ones"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What there is to go by."""

    spec: LaunchSpec
    job: Job
    failures: Sequence[OutOfMemory]
    """In order; the last one is to be explained."""
    saved_step: int | None
    hardware: Hardware | None
    """None where nobody can tell what GPUs these are: then nothing is predicted."""

    @property
    def last(self) -> OutOfMemory:
        return self.failures[-1]

    @cached_property
    def tried(self) -> list[Strategy]:
        return [Strategy.from_json(failure.strategy) for failure in self.failures]

    @property
    def failed(self) -> Strategy:
        return self.tried[-1]

    @cached_property
    def prediction(self) -> Option | None:
        """What the simulator says of the strategy that failed; None where it does not know it."""
        if self.hardware is None:
            return None
        if self.failed.tensor_parallel > 1 and not self.own_kind:
            return None  # space/candidates.py: predictable
        return predict_strategy(self.job, self.hardware, self.failed, **self._asked)

    @cached_property
    def beyond_bytes(self) -> int:
        """What the process needed more than predicted, at least."""
        assert self.prediction is not None
        return max(0, used_bytes(self.last) - self.prediction.prediction.memory.needed_bytes)

    @cached_property
    def own_kind(self) -> tuple[Option, ...]:
        """The failed strategy's kind, with every micro-batch and checkpointing."""
        return self._options(self._open(settings_of(self.failed)))

    @cached_property
    def all_kinds(self) -> tuple[Option, ...]:
        return self._options(self._open("auto"))

    def nearest(self) -> str:
        """The nearest change of job or hardware that would help, as advice."""
        if self.prediction is None:
            return HARDER
        assert self.hardware is not None
        short = self.beyond_bytes / self.prediction.prediction.memory.capacity_bytes
        near = nearest_change(self._open("auto"), self.hardware, margin=MARGIN + short, **self._asked)
        if near is None:
            return f"{HARDER}: none that was tried is enough by itself"
        needed = gib(near.option.prediction.memory.needed_bytes)
        return f"{near.how} ({near.what}): {in_words(near.option.strategy)} fits, in {needed}"

    @property
    def _asked(self) -> dict[str, Any]:
        return {"memory_cap_bytes": self.spec.memory_cap_bytes, "vocab_size": self.last.vocab_size}

    def _open(self, strategy: Any) -> Job:
        """The job with micro-batch and checkpointing left open."""
        train = self.job.train.model_copy(update={"micro_batch": None, "checkpointing": "auto"})
        return self.job.model_copy(update={"train": train, "strategy": strategy})

    def _options(self, job: Job) -> tuple[Option, ...]:
        assert self.hardware is not None
        try:
            plan: Plan = make_plan(job, self.hardware, **self._asked)
        except JobError:  # no strategy is allowed
            return ()
        return plan.options


def main(arguments: list[str] | None = None) -> int:
    """Answers the request."""
    arguments = sys.argv[1:] if arguments is None else arguments
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = Path(request["answer"])
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(post_mortem(request, _hardware(request))), encoding="utf-8")
    partial.rename(answer)
    return 0


def post_mortem(request: Mapping[str, Any], hardware: Hardware | None) -> dict[str, Any]:
    """The answer: `headline`, `facts` and `changes` of the error, and what a retry goes on with.

    `next` is that as plan.json's `chosen`, and comes with `next_in_words`; where it is null, and a retry was
    asked for, `why_no_next` says so, and `instead` what would have to change.
    """
    spec = LaunchSpec.from_json(request["spec"])
    case = Case(
        spec=spec,
        job=Job.model_validate(spec.job),
        failures=[OutOfMemory(**failure) for failure in request["failures"]],
        saved_step=request["saved_step"],
        hardware=hardware,
    )
    problems = [_memory(case.last), *_against_the_plan(case)]
    answer: dict[str, Any] = {"headline": headline(case.last), "next": None}
    if spec.on_oom == "retry":
        chosen = _next(case)
        if chosen is None:
            kept = "" if case.saved_step is None else ", with the state that was saved,"
            answer["why_no_next"] = f"nothing{kept} is known to need less than what was tried"
            answer["instead"] = case.nearest()
        else:
            answer["next"] = chosen
            answer["next_in_words"] = in_words(Strategy.from_json(chosen["strategy"]))
    changes = list(_changes(case))
    if not changes and "instead" not in answer:
        changes = [Problem(what="no strategy needs less than this one", fix=case.nearest())]
    answer["facts"] = [asdict(problem) for problem in problems]
    answer["changes"] = [asdict(problem) for problem in changes]
    return answer


def used_bytes(evidence: OutOfMemory) -> int:
    """What the process would have held of the GPU with what it asked for; other processes' share included.

    At least: after this allocation others may have followed. 0 where nobody could tell.
    """
    if evidence.allocated_bytes is None or evidence.total_bytes is None or evidence.free_bytes is None:
        return 0
    others_and_own = evidence.total_bytes - evidence.free_bytes
    if evidence.allowed_bytes is not None and evidence.process_bytes is not None:
        others_and_own = evidence.process_bytes  # the cap counts this process only
    unused = (evidence.reserved_bytes or 0) - evidence.allocated_bytes
    asked = max(0, (evidence.asked_bytes or 0) - unused)
    return others_and_own + asked


def _memory(evidence: OutOfMemory) -> Problem:
    return Problem(what=memory_in_words(evidence), where=f"rank {evidence.rank}, {evidence.call}")


def _against_the_plan(case: Case) -> Iterator[Problem]:
    """Measured beside predicted, the largest excess first."""
    if case.prediction is None:
        return
    memory, evidence = case.prediction.prediction.memory, case.last
    needed, capacity = gib(memory.needed_bytes), gib(memory.capacity_bytes)
    planned = f"the plan says {needed} of {capacity} for {in_words(case.failed)}"
    terms = [term for term in measured(evidence, memory) if term.measured is not None]
    worth_telling = WORTH_TELLING * memory.capacity_bytes
    over = sorted((term for term in terms if term.excess > worth_telling), key=lambda term: -term.excess)
    lines = [
        f"{term.name} {size(term.measured or 0)} beside {size(term.predicted)}" for term in over or terms
    ]
    if not terms:
        said = planned
    elif over:
        said = f"more than planned: {'; '.join(lines)}; {planned}"
    else:
        said = f"no term is over its prediction so far ({'; '.join(lines)}); {planned}"
    if evidence.phase in ("evaluation", "saving", "restoring", "building"):
        said += ", which counts training steps only"
    yield Problem(what=said)


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of the memory; bytes."""

    name: str
    measured: int | None
    predicted: int

    @property
    def excess(self) -> int:
        return 0 if self.measured is None else self.measured - self.predicted


def measured(evidence: OutOfMemory, memory: Memory) -> list[Term]:
    """What can be told apart after the failure, beside the plan's terms; None where it was not measured.

    Measured are: what stays when the step is let go of; what goes, with what was asked for; what was reserved
    in fragments; what this process holds beside torch's allocator; and what other processes hold.
    """
    terms = memory.terms
    resident, allocated, reserved = evidence.resident_bytes, evidence.allocated_bytes, evidence.reserved_bytes
    step = outside = others = None
    if resident is not None and allocated is not None:
        step = allocated - resident + (evidence.asked_bytes or 0)
    if evidence.process_bytes is not None and reserved is not None:
        outside = evidence.process_bytes - reserved
        if evidence.total_bytes is not None and evidence.free_bytes is not None:
            others = max(0, evidence.total_bytes - evidence.free_bytes - evidence.process_bytes)
    states = terms.weights_bytes + terms.optimizer_bytes + terms.gradients_bytes + terms.engine_buffers_bytes
    return [
        Term(name="weights, optimizer, gradients and buffers", measured=resident, predicted=states),
        Term(
            name="activations and the loss",
            measured=step,
            predicted=terms.activations_bytes + terms.loss_bytes,
        ),
        Term(
            name="fragments",
            measured=None if reserved is None or allocated is None else reserved - allocated,
            predicted=terms.fragmentation_bytes,
        ),
        Term(name="CUDA and NCCL", measured=outside, predicted=memory.outside_allocator_bytes),
        Term(name="other processes", measured=others, predicted=0),
    ]


def _changes(case: Case) -> Iterator[Problem]:
    """Two or three things to do, with what they save and cost where that can be predicted."""
    failed = case.prediction
    if failed is None:
        for strategy in list(_unpredicted(case, keep_state=False))[:3]:
            yield Problem(what=in_words(strategy), fix=_how(case, strategy))
        return
    assert case.hardware is not None
    options = {option.strategy: option for option in (*case.own_kind, *case.all_kinds)}
    options.pop(case.failed, None)
    found = reliefs(failed, list(options.values()), beyond_bytes=case.beyond_bytes, hardware=case.hardware)
    for option in found:
        saved = failed.prediction.memory.needed_bytes - option.prediction.memory.needed_bytes
        times = option.prediction.time.step_seconds / failed.prediction.time.step_seconds
        enough = "" if option.fit != "no" else ", which is not enough"
        yield Problem(
            what=f"{in_words(option.strategy)}: {size(saved)} less{enough}, {times:.2f}x the time of a step "
            "(predicted)",
            fix=_how(case, option.strategy),
        )


def _how(case: Case, strategy: Strategy) -> str:
    """The flags, and whether they can go on with what was saved."""
    said = " ".join(flags(case.failed, strategy))
    if case.saved_step is None:
        return said
    if same_state(case.failed, strategy):
        return f"{resume_command(Path(case.spec.run_dir))} {said}"
    return f"{said}, from the start under another name: another kind of strategy cannot load the state"


def _next(case: Case) -> dict[str, Any] | None:
    """What a retry goes on with, as plan.json's `chosen`: the job's own kind where one of it fits."""
    why = f"instead of {in_words(case.failed)}: {headline(case.last)}"
    if case.prediction is None:
        first = next(_unpredicted(case, keep_state=case.saved_step is not None), None)
        return None if first is None else {"strategy": first.to_json(), "why": [why]}
    assert case.hardware is not None
    found = None
    for options in _pools(case):
        found = found or following(
            case.prediction,
            options,
            tried=case.tried,
            beyond_bytes=case.beyond_bytes,
            hardware=case.hardware,
        )
    return None if found is None else replace(found, why=(why,)).to_json()


def _pools(case: Case) -> Iterator[Sequence[Option]]:
    """What to choose from, in order: with a saved state, or a kind that the job names, its own kind first."""
    if case.saved_step is not None or case.job.strategy != "auto":
        yield [option for option in case.own_kind if same_state(case.failed, option.strategy)]
    if case.saved_step is None:
        yield case.all_kinds


def _unpredicted(case: Case, *, keep_state: bool) -> Iterator[Strategy]:
    allowed: list[Strategy] = []
    for strategy in (settings_of(case.failed), "auto"):
        accepted, _ = candidates(
            strategy,
            train=case.job.train.model_copy(update={"micro_batch": None, "checkpointing": "auto"}),
            clip_norm=case.job.optimizer.clip_norm,
            lora=case.job.model.lora is not None,
            world_size=case.spec.processes,
            gpus_per_node=case.spec.processes,
            devices="cuda" if gpu_count() else "cpu",
        )
        # without the model's architecture nobody knows whether its layers can be cut
        allowed += [one for one in accepted if strategy != "auto" or one.tensor_parallel == 1]
    fresh = leaner_unpredicted(list(dict.fromkeys(allowed)), case.failed, keep_state=keep_state)
    return (strategy for strategy in fresh if strategy not in case.tried)


def _hardware(request: Mapping[str, Any]) -> Hardware | None:
    try:
        found = detect_hardware()
    except MachineError:  # GPUs that differ, or parts of one
        return None
    return None if found is None else replace(found, gpus_per_node=request["spec"]["processes"])


if __name__ == "__main__":
    sys.exit(main())
