"""What a job must not ask for at once, with the reasons.

Each check sees the complete job and the keys that the user gave, so that a setting without effect is refused
instead of ignored. What an engine can and cannot combine is in `strategy.rules`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import Problem
from shardwise.job.schema import Job


def find(job: Job, given: frozenset[str]) -> Iterator[Problem]:
    """Yield every contradiction in a job, with the keys, separated by ", ", in `where`.

    `given` has the dotted keys with a value in the file or a flag.
    """
    for part in (_training, _model, _data, _energy):
        yield from part(job, given)


def _training(job: Job, given: frozenset[str]) -> Iterator[Problem]:
    train, optimizer = job.train, job.optimizer
    if train.steps is not None and train.epochs is not None:
        what = "train.steps and train.epochs both say how long to train"
        fix = "keep one; `--set train.epochs=null` unsets a key of the file"
        yield Problem(what=what, where="train.steps, train.epochs", fix=fix)
    if optimizer.warmup_steps and train.steps is not None and optimizer.warmup_steps >= train.steps:
        what = f"a warm-up of {optimizer.warmup_steps} steps does not end within {train.steps} steps"
        fix = "lower optimizer.warmup_steps, or remove it for 3 % of the steps"
        yield Problem(what=what, where="optimizer.warmup_steps, train.steps", fix=fix)
    if optimizer.schedule == "constant" and "optimizer.final_fraction" in given:
        what = "optimizer.final_fraction has no meaning with schedule: constant"
        fix = "remove it, or choose schedule: linear or cosine"
        yield Problem(what=what, where="optimizer.final_fraction, optimizer.schedule", fix=fix)
    micro, batch = train.micro_batch, train.global_batch
    if micro is not None and batch % micro:
        below = max(size for size in range(1, micro + 1) if batch % size == 0)
        what = f"train.micro_batch {micro} does not divide train.global_batch {batch}"
        fix = f"micro_batch: {below}, or remove it"
        yield Problem(what=what, where="train.micro_batch, train.global_batch", fix=fix)
    for name, value in train.keep.items() if isinstance(train.keep, dict) else ():
        place = bool(re.match("/|[a-z0-9+.-]+://", str(value)))
        number = isinstance(value, float | int) and (name == "days" or value % 1 == 0)
        if not (place if name == "mirror" else number):
            what = f"`{name}` of train.keep is {value}"
            fix = "last, best and every take integers, days a number, mirror a URL or an absolute path"
            yield Problem(what=what, where="train.keep", fix=fix)
    if len(set(job.tracking)) < len(job.tracking):
        yield Problem(what="tracking names a tracker twice", where="tracking", fix="name each once")


def _model(job: Job, given: frozenset[str]) -> Iterator[Problem]:
    model = job.model
    if model.weights == "random" and model.lora is not None:
        what = "model.lora would freeze weights that are random"
        fix = "weights: pretrained, or remove model.lora to pretrain all weights"
        yield Problem(what=what, where="model.weights, model.lora", fix=fix)
    if model.quantization != "none" and model.lora is None:
        # An optimizer step is lost between two quantised values, so such weights are never trained.
        what = "model.quantization freezes the weights, and without model.lora nothing else is trained"
        fix = "add `lora: {rank: 16}` to model, or remove model.quantization to train all weights"
        yield Problem(what=what, where="model.quantization, model.lora", fix=fix)
    if model.lora is None and "optimizer.lora_plus" in given:
        what = "optimizer.lora_plus is the rate of adapters, and there are none"
        yield Problem(what=what, where="optimizer.lora_plus", fix="remove it, or set model.lora")
    if model.weights == "pretrained" and model.config:
        what = "model.config changes the shape that pretrained weights were made for"
        fix = "remove model.config, or start from weights: random"
        yield Problem(what=what, where="model.config, model.weights", fix=fix)
    if model.weights == "pretrained" and model.tokenizer == "train":
        what = "a tokenizer trained on your data does not match pretrained weights"
        fix = "remove model.tokenizer to use the model's own, or start from weights: random"
        yield Problem(what=what, where="model.tokenizer, model.weights", fix=fix)
    if model.tokenizer != "train" and "model.tokenizer_vocab" in given:
        what = "model.tokenizer_vocab is the size of a tokenizer to train, and none is trained"
        yield Problem(what=what, where="model.tokenizer_vocab", fix="remove it, or set tokenizer: train")
    if model.tokenizer is not None and "vocab_size" in model.config:
        what = "model.config.vocab_size has no effect: the tokenizer's size decides"
        fix = "remove it; model.tokenizer_vocab is the size of a tokenizer to train"
        yield Problem(what=what, where="model.config.vocab_size, model.tokenizer", fix=fix)
    local, pinned = Path(model.source).is_dir(), re.fullmatch(r"[0-9a-f]{40}", model.revision or "")
    # A branch or a tag can change after the user has read its code.
    if model.trust_remote_code and not local and not pinned:
        what = (
            "model.trust_remote_code runs a repository's code, which can change: model.revision is no commit"
        )
        fix = "set model.revision to the 40-digit commit you have read"
        yield Problem(what=what, where="model.trust_remote_code, model.revision", fix=fix)
    if model.revision is not None and local:
        what = "model.revision belongs to a hub model, and model.source is a local folder"
        yield Problem(what=what, where="model.revision, model.source", fix="remove model.revision")


def _data(job: Job, given: frozenset[str]) -> Iterator[Problem]:
    data = job.data
    if data.eval is not None and "data.eval_fraction" in given:
        what = "data.eval and data.eval_fraction both say what is held out"
        fix = "keep one; `--set data.eval_fraction=null` unsets a key of the file"
        yield Problem(what=what, where="data.eval, data.eval_fraction", fix=fix)
    files = [data.train] if isinstance(data.train, str) else data.train
    if data.weights is not None and len(data.weights) != len(files):
        what = f"data.weights has {len(data.weights)} numbers, and data.train {len(files)} entries"
        yield Problem(what=what, where="data.weights, data.train", fix="one number for each entry")
    for key in ("data.split", "data.subset"):
        if key in given and all(Path(name).exists() for name in files):
            what = f"{key} belongs to a hub dataset, and data.train is local"
            yield Problem(what=what, where=f"{key}, data.train", fix=f"remove {key}")
    chat = ("data.loss_on", "data.chat_template", "data.system", "data.too_long")
    keys = tuple(key for key in chat if key in given)
    names = ", ".join(keys)
    text = data.format == "text" or (isinstance(data.format, dict) and "text" in data.format)
    if text and keys and not (keys == chat[:1] and data.loss_on == "all"):
        what = f"{names} {'are' if len(keys) > 1 else 'is'} for conversations, and data.format is text"
        yield Problem(what=what, where=names, fix="remove, or choose the format of the conversations")


def _energy(job: Job, given: frozenset[str]) -> Iterator[Problem]:
    """Numbers that the objective needs, and those that it would ignore; None stands for all but `measure`."""
    energy = job.energy
    prices = ("price_per_kwh", "price_per_gpu_hour")
    needed = {"eta": ("eta",), "cost": prices}.get(energy.objective, ())
    for key in needed:
        if getattr(energy, key) is None:
            what = f"objective {energy.objective} needs energy.{key}"
            yield Problem(what=what, where=f"energy.{key}, energy.objective", fix=f"set energy.{key}")
    if energy.power_limit is not None and energy.objective != "measure":
        what = f"energy.power_limit sets one limit, and objective {energy.objective} searches for it"
        yield Problem(what=what, where="energy.power_limit, energy.objective", fix="remove one of them")
    for key, objective in (("eta", "eta"), ("max_slowdown", "max-slowdown"), ("power_limits", None)):
        used = energy.objective != "measure" if objective is None else energy.objective == objective
        if f"energy.{key}" in given and not used:
            what = f"energy.{key} has no effect with objective: {energy.objective}"
            fix = f"remove it, or set energy.objective: {objective or 'energy'}"
            yield Problem(what=what, where=f"energy.{key}, energy.objective", fix=fix)
