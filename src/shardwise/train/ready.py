"""A job made ready: tokenizer, model on the meta device, tokenised data, strategy; no weights, no GPU.

Everything that can be wrong with the job, the data and the model is found here, before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from shardwise.data.loader import BatchStream, EvalStream
from shardwise.data.prepare import Prepared, documents, prepare
from shardwise.engine.parameters import DTYPES
from shardwise.engine.protocol import World
from shardwise.job.schema import Job
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.tokenizer import load_tokenizer, model_vocabulary
from shardwise.strategy.auto import resolve
from shardwise.strategy.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A job with its model, data and strategy; no weights yet, nothing on a GPU."""

    job: Job
    tokenizer: PreTrainedTokenizerBase
    built: BuiltModel
    data: Prepared
    strategy: Strategy
    why: list[str]


def get_ready(job: Job, *, processes: int) -> Ready:
    """Tokenizer, model on the meta device, data (tokenised once, by one process), strategy."""
    tokenizer = load_tokenizer(job.model, corpus=lambda: documents(job))
    built = build_model(
        job.model,
        dtype=DTYPES[job.train.precision],
        seed=job.train.seed,
        vocab_size=model_vocabulary(job.model, tokenizer),
    )
    data = prepare(job, tokenizer, vocab_size=built.config.get_text_config().vocab_size)
    if data.chat_template is not None:
        tokenizer.chat_template = data.chat_template  # saved with the weights: asked as it was trained
    cuda = torch.cuda.is_available()
    strategy, why = resolve(
        job.strategy,
        train=job.train,
        clip_norm=job.optimizer.clip_norm,
        world_size=processes,
        devices="cuda" if cuda else "cpu",
        trainable_parameters=built.trainable,
        total_parameters=built.total,
        device_memory_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else None,
        lora=job.model.lora is not None,
    )
    return Ready(job=job, tokenizer=tokenizer, built=built, data=data, strategy=strategy, why=why)


def count_steps(ready: Ready) -> int:
    """Optimizer steps of the whole run: as asked, or rounded up to whole epochs."""
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
    """What a checkpoint belongs to: a run with another value here is another run."""
    job = ready.job
    return {
        "model": job.model.model_dump(mode="json"),
        "data": ready.data.summary["key"],
        "sequence_length": job.data.sequence_length,
        "packing": job.data.packing,
        "optimizer": job.optimizer.model_dump(mode="json"),
        "global_batch": job.train.global_batch,
        "micro_batch": ready.strategy.micro_batch,
        "steps": job.train.steps,
        "epochs": job.train.epochs,
        "precision": job.train.precision,
        "seed": job.train.seed,
        "worst_case_first": job.train.worst_case_first,
    }
