"""What a job must not ask for at once: small functions, each with its reason.

Each sees the complete job and the keys the user gave a value, so that a setting which would have no
effect is refused instead of ignored. What an engine can and cannot combine is not here: `strategy.rules`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.job.schema import Job


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A contradiction between keys; it is shown at the lines of those the user wrote."""

    keys: tuple[str, ...]
    what: str
    fix: str


Given = frozenset[str]
Check = Callable[[Job, Given], Finding | None]


def find(job: Job, given: Given) -> Iterator[Finding]:
    """Every contradiction in a job. `given` holds the dotted keys that have a value in the file or a flag."""
    for check in CHECKS:
        finding = check(job, given)
        if finding is not None:
            yield finding


def steps_and_epochs(job: Job, given: Given) -> Finding | None:
    """Both say how long to train."""
    if job.train.steps is None or job.train.epochs is None:
        return None
    return Finding(
        keys=("train.steps", "train.epochs"),
        what="train.steps and train.epochs both say how long to train",
        fix="keep one; `--set train.epochs=null` unsets a key of the file",
    )


def warmup_without_end(job: Job, given: Given) -> Finding | None:
    """A warm-up as long as the run never reaches the peak learning rate."""
    warmup, steps = job.optimizer.warmup_steps, job.train.steps
    if warmup is None or steps is None or warmup < steps or warmup == 0:
        return None
    return Finding(
        keys=("optimizer.warmup_steps", "train.steps"),
        what=f"a warm-up of {warmup} steps does not end within {steps} steps",
        fix="lower optimizer.warmup_steps, or leave it out for 3 % of the steps",
    )


def final_fraction_of_constant(job: Job, given: Given) -> Finding | None:
    """A constant learning rate ends where it began."""
    if job.optimizer.schedule != "constant" or "optimizer.final_fraction" not in given:
        return None
    return Finding(
        keys=("optimizer.final_fraction", "optimizer.schedule"),
        what="optimizer.final_fraction has no meaning with schedule: constant",
        fix="remove it, or choose schedule: linear or cosine",
    )


def micro_batch_divides(job: Job, given: Given) -> Finding | None:
    """A step is a whole number of micro-batches."""
    micro, whole = job.train.micro_batch, job.train.global_batch
    if micro is None or whole % micro == 0:
        return None
    below = max(size for size in range(1, micro + 1) if whole % size == 0)
    return Finding(
        keys=("train.micro_batch", "train.global_batch"),
        what=f"train.micro_batch {micro} does not divide train.global_batch {whole}",
        fix=f"micro_batch: {below}, or leave it out",
    )


def random_with_lora(job: Job, given: Given) -> Finding | None:
    """Adapters train a small change to weights worth keeping; random weights stay random below them."""
    if job.model.weights != "random" or job.model.lora is None:
        return None
    return Finding(
        keys=("model.weights", "model.lora"),
        what="model.lora would freeze weights that are random",
        fix="weights: pretrained, or remove model.lora to pretrain all weights",
    )


def quantization_without_lora(job: Job, given: Given) -> Finding | None:
    """A step of the optimizer is lost between two quantised values: such weights are never trained."""
    if job.model.quantization == "none" or job.model.lora is not None:
        return None
    return Finding(
        keys=("model.quantization", "model.lora"),
        what="model.quantization freezes the weights, and without model.lora nothing else is trained",
        fix="add `lora: {rank: 16}` to model, or remove model.quantization to train all weights",
    )


def config_of_pretrained(job: Job, given: Given) -> Finding | None:
    """Pretrained weights fit one shape."""
    if job.model.weights != "pretrained" or not job.model.config:
        return None
    return Finding(
        keys=("model.config", "model.weights"),
        what="model.config changes the shape that pretrained weights were made for",
        fix="remove model.config, or start from weights: random",
    )


def tokenizer_for_pretrained(job: Job, given: Given) -> Finding | None:
    """Pretrained embeddings know the tokens of one tokenizer."""
    if job.model.weights != "pretrained" or job.model.tokenizer != "train":
        return None
    return Finding(
        keys=("model.tokenizer", "model.weights"),
        what="a tokenizer trained on your data does not match pretrained weights",
        fix="remove model.tokenizer to use the model's own, or start from weights: random",
    )


def vocabulary_of_given_tokenizer(job: Job, given: Given) -> Finding | None:
    """A tokenizer that exists has its size already."""
    if job.model.tokenizer == "train" or "model.tokenizer_vocab" not in given:
        return None
    return Finding(
        keys=("model.tokenizer_vocab",),
        what="model.tokenizer_vocab is the size of a tokenizer to train, and none is trained",
        fix="remove it, or set tokenizer: train",
    )


def vocabulary_twice(job: Job, given: Given) -> Finding | None:
    """Random weights have as many rows as their tokenizer has tokens."""
    if job.model.tokenizer is None or "vocab_size" not in job.model.config:
        return None
    return Finding(
        keys=("model.config.vocab_size", "model.tokenizer"),
        what="model.config.vocab_size has no effect: the tokenizer's size decides",
        fix="remove it; of a tokenizer to train model.tokenizer_vocab is the size",
    )


def remote_code_without_commit(job: Job, given: Given) -> Finding | None:
    """A branch or tag can change under the user's feet: code is run at a commit that was read."""
    revision = job.model.revision or ""
    if not job.model.trust_remote_code or Path(job.model.source).is_dir():
        return None
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return None
    return Finding(
        keys=("model.trust_remote_code", "model.revision"),
        what="model.trust_remote_code runs a repository's code, and model.revision does not pin it",
        fix="set model.revision to the 40-digit commit you have read",
    )


def revision_of_folder(job: Job, given: Given) -> Finding | None:
    """A folder has one state."""
    if job.model.revision is None or not Path(job.model.source).is_dir():
        return None
    return Finding(
        keys=("model.revision", "model.source"),
        what="model.revision belongs to a hub model, and model.source is a local folder",
        fix="remove model.revision",
    )


def eval_twice(job: Job, given: Given) -> Finding | None:
    """Held-out data is either given or taken from the samples."""
    if job.data.eval is None or "data.eval_fraction" not in given:
        return None
    return Finding(
        keys=("data.eval", "data.eval_fraction"),
        what="data.eval and data.eval_fraction both say what is held out",
        fix="keep one",
    )


def split_of_files(job: Job, given: Given) -> Finding | None:
    """Splits belong to hub datasets."""
    names = [job.data.train] if isinstance(job.data.train, str) else job.data.train
    if "data.split" not in given or not all(Path(name).exists() for name in names):
        return None
    return Finding(
        keys=("data.split", "data.train"),
        what="data.split belongs to a hub dataset, and data.train is local",
        fix="remove data.split",
    )


def chat_keys_of_text(job: Job, given: Given) -> Finding | None:
    """Plain text has no conversations."""
    keys = ("data.loss_on", "data.chat_template", "data.system", "data.too_long")
    present = tuple(key for key in keys if key in given)
    if job.data.format != "text" or not present or (present == keys[:1] and job.data.loss_on == "all"):
        return None
    return Finding(
        keys=present,
        what=f"{', '.join(present)} {'are' if len(present) > 1 else 'is'} for conversations, "
        "and data.format is text",
        fix="remove, or choose the format of the conversations",
    )


def trackers_twice(job: Job, given: Given) -> Finding | None:
    """One tracker writes a metric once."""
    if len(set(job.tracking)) == len(job.tracking):
        return None
    return Finding(keys=("tracking",), what="tracking names a tracker twice", fix="name each once")


CHECKS: tuple[Check, ...] = (
    steps_and_epochs,
    warmup_without_end,
    final_fraction_of_constant,
    micro_batch_divides,
    random_with_lora,
    quantization_without_lora,
    config_of_pretrained,
    tokenizer_for_pretrained,
    vocabulary_of_given_tokenizer,
    vocabulary_twice,
    remote_code_without_commit,
    revision_of_folder,
    eval_twice,
    split_of_files,
    chat_keys_of_text,
    trackers_twice,
)
