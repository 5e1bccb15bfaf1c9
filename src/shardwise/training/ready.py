"""Prepares a job: tokenizer, model on the meta device, tokenised data, strategy; no weights, no GPU.

Every mistake in the job, the data and the model is found here, before anything is written.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from shardwise.data.loader import BatchStream, EvalStream
from shardwise.data.prepare import Prepared, documents, prepare
from shardwise.engines.facts import Architecture
from shardwise.engines.runtime.protocol import World
from shardwise.errors import MachineError
from shardwise.hardware.detect import detect_hardware, multiplies_bf16
from shardwise.hardware.hardware import Link
from shardwise.hardware.links import network_link, network_names
from shardwise.job.identity import identity_of
from shardwise.job.schema import Job
from shardwise.models.build import BuiltModel, build_model, check_length
from shardwise.models.fingerprint import fingerprint, tokenizer_fingerprint
from shardwise.models.structure import DTYPES
from shardwise.models.tokenizer import load_tokenizer, rows_for
from shardwise.planner.plan import Plan
from shardwise.planner.planning import make_plan
from shardwise.planner.why import does_not_fit
from shardwise.space.auto import resolve
from shardwise.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A job with its model, data and strategy; no weights yet, nothing on a GPU."""

    job: Job
    tokenizer: PreTrainedTokenizerBase
    built: BuiltModel
    data: Prepared
    strategy: Strategy
    why: list[str]
    plan: Plan | None = None  # What the strategy was chosen from, where it was
    chosen: Mapping[str, Any] | None = None  # For a resumed run or a retry, as plan.json has it

    def to_json(self) -> dict[str, Any]:
        """The run folder's plan.json."""
        if self.plan is not None:
            return self.plan.to_json()
        if self.chosen is not None:
            return {"schema": 1, "chosen": dict(self.chosen)}
        return {"schema": 1, "chosen": {"strategy": self.strategy.to_json(), "why": self.why}}


def get_ready(
    job: Job,
    *,
    processes: int,
    nodes: int = 1,
    memory_cap_bytes: int | None = None,
    chosen: Mapping[str, Any] | None = None,
) -> Ready:
    """Tokenizer, model on the meta device, data (tokenised once, by one process), strategy.

    `processes`: on all nodes.

    On GPUs `strategy: auto` is the plan's choice; DoesNotFitError where nothing fits. `chosen`: see
    LaunchSpec.
    """
    tokenizer = load_tokenizer(job.model, corpus=lambda: documents(job))
    built = build_model(
        job.model,
        dtype=DTYPES[job.train.precision],
        seed=job.train.seed,
        vocab_size=rows_for(job.model, len(tokenizer)),
        sequence_length=job.data.sequence_length,
    )
    check_length(built, job.data.sequence_length)
    data = prepare(job, tokenizer, vocab_size=built.config.get_text_config().vocab_size)
    if data.chat_template is not None:
        tokenizer.chat_template = data.chat_template  # saved with the weights: asked as it was trained
    ready = partial(Ready, job=job, tokenizer=tokenizer, built=built, data=data)
    if chosen is not None:
        return ready(strategy=Strategy.from_json(chosen["strategy"]), why=list(chosen["why"]), chosen=chosen)
    if job.strategy == "auto" and torch.cuda.is_available():
        plan = _plan(job, built, data, (nodes, processes // nodes), memory_cap_bytes)
        assert plan.chosen is not None
        return ready(strategy=plan.chosen.strategy, why=list(plan.chosen.why), plan=plan)
    strategy, why = _resolve(job, built, processes)
    return ready(strategy=strategy, why=why)


def _plan(
    job: Job, built: BuiltModel, data: Prepared, shape: tuple[int, int], memory_cap_bytes: int | None
) -> Plan:
    """The plan for `shape`, (nodes, GPUs of each) like this machine's, in which something is chosen."""
    hardware, (nodes, gpus) = detect_hardware(), shape
    if hardware is None:
        fix = "see `shardwise doctor`, or name a strategy"
        raise MachineError("the GPUs cannot be asked what they are", where="strategy: auto", fix=fix)
    plan = make_plan(
        job,
        replace(hardware, nodes=nodes, gpus_per_node=gpus, inter=None if nodes == 1 else _network(gpus)),
        memory_cap_bytes=memory_cap_bytes,
        vocab_size=built.config.get_text_config().vocab_size if job.model.weights == "random" else None,
        epoch_tokens=int(data.summary["tokens"]),
        document_tokens=data.summary.get("document_tokens"),
    )
    if plan.chosen is None:
        raise does_not_fit(plan)
    return plan


def _network(gpus_per_node: int) -> Link:
    """The network between the nodes: the catalog's fastest Ethernet no faster than this node's interface."""
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "")
    speed = 0
    with suppress(OSError, ValueError):
        speed = int(Path(f"/sys/class/net/{interface}/speed").read_text(encoding="ascii")) // 1000
    known = {int(name[3:]): name for name in network_names() if name.startswith("eth")}
    fitting = [gbit for gbit in known if gbit <= speed]
    if not fitting:
        what = f"the speed of the network between the nodes is not known (interface {interface or 'unknown'})"
        fix = "name a strategy: `shardwise plan JOB --gpus 2x4xRTX4080+eth25` (your own) shows the best"
        raise MachineError(what, where="strategy: auto", fix=fix)
    return network_link(known[max(fitting)], adapters=1, gpus_per_node=gpus_per_node)


def _resolve(job: Job, built: BuiltModel, processes: int) -> tuple[Strategy, list[str]]:
    cuda = torch.cuda.is_available()
    strategy, why = resolve(
        job,
        world_size=processes,
        devices="cuda" if cuda else "cpu",
        trainable_parameters=built.trainable,
        total_parameters=built.total,
        device_memory_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else None,
        architecture=Architecture.of(built.config),
        capability=torch.cuda.get_device_capability(0) if cuda else None,
    )
    if not cuda and job.train.precision == "bf16" and not multiplies_bf16():
        why = [*why, "this processor has no instructions for bf16: train.precision: fp32 is faster on it"]
    return strategy, why


def count_steps(ready: Ready) -> int:
    """Optimizer steps of the full run: as asked, or all that the epochs need, rounded up."""
    train = ready.job.train
    if train.steps is not None:
        return train.steps
    stream, _ = make_streams(ready, None)
    return stream.steps_for(train.epochs or 1.0)


def make_streams(ready: Ready, world: World | None) -> tuple[BatchStream, EvalStream | None]:
    """Training and evaluation batches of this rank (of a single one, without a world)."""
    job, strategy = ready.job, ready.strategy
    shared: dict[str, Any] = {
        "sequence_length": job.data.sequence_length,
        "micro_batch": strategy.micro_batch,
        "data_rank": world.data_rank if world else 0,
        "data_size": world.data_size if world else strategy.data_parallel,
        "packing": job.data.packing,
        "pad_id": ready.tokenizer.pad_token_id or 0,
        "pin_memory": world is not None and world.device.type == "cuda",
        "pad_to_length": strategy.pipeline > 1,  # what stages pass on has one shape
    }
    stream = BatchStream(
        ready.data.train,
        global_batch=job.train.global_batch,
        seed=job.train.seed,
        worst_case_first=job.train.worst_case_first,
        **shared,
    )
    return stream, None if ready.data.eval is None else EvalStream(ready.data.eval, **shared)


def identity(ready: Ready) -> dict[str, Any]:
    """What a checkpoint belongs to: a run with another value here is another run.

    `data` is a hash of what the tokens are made from, `tokens` of the tokens: templates can write the date.
    `base` is for frozen weights, which no checkpoint holds; see `models.fingerprint`.
    """
    base, tokenizer = fingerprint(ready.job.model, ready.built.found), tokenizer_fingerprint(ready.job.model)
    return {
        **identity_of(ready.job),
        "data": ready.data.summary["key"],
        "tokens": ready.data.content,
        **({} if base is None else {"base": base}),
        **({} if tokenizer is None else {"tokenizer": tokenizer}),
    }
