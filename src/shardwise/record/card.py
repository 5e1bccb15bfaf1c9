"""The model card of an export: what a stranger should know of the run, and nothing of its machine."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from shardwise.job.schema import Job
from shardwise.record.manifest import Manifest
from shardwise.record.write import redact
from shardwise.units import processes

_FILES = {".json", ".jsonl", ".parquet", ".txt"}
_LIBRARIES = ("shardwise", "torch", "transformers", "peft", "deepspeed", "bitsandbytes")

Events = Sequence[Mapping[str, Any]]


def model_card(job: Job, events: Events, manifest: Manifest, written: Mapping[str, Any], *, out: str) -> str:
    """README.md in the hub's form for what `export` wrote of a checkpoint; `out` is the model's name.

    Names of folders, system messages, the machine and its user are not in it.
    """
    adapter = written["kind"] == "adapter"
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    head["pipeline_tag"] = "text-generation"
    head["tags"] = ["shardwise", *(["lora"] if job.model.lora else [])]
    if job.model.weights == "pretrained" and _on_hub(job.model.source):
        head["base_model"] = job.model.source
    facts = "\n".join(f"| {name} | {_cell(text)} |" for name, text in _facts(job, events, manifest, written))
    loader = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    return redact(
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {_cell(out)}\n\n"
        f"Trained with shardwise.\n\n| | |\n| --- | --- |\n{facts}\n\n"
        f"```python\nfrom {head['library_name']} import {loader}\n\n"
        f'model = {loader}.from_pretrained("FOLDER OR REPOSITORY")\n```\n'
    )


def _facts(
    job: Job, events: Events, manifest: Manifest, written: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    step, model = manifest.step, job.model
    yield "base", f"{_public(model.source)}, {model.weights} weights"
    if model.lora:
        quantised = "" if model.quantization == "none" else f", trained on the base in {model.quantization}"
        merged = ", merged into the base" if written["kind"] == "merged" else ""
        yield "LoRA", f"rank {model.lora.rank}, alpha {model.lora.alpha:g}{quantised}{merged}"
    data = [job.data.train] if isinstance(job.data.train, str) else job.data.train
    yield "data", ", ".join(map(_public, data))
    yield "steps", f"{step}, of {job.train.global_batch} rows of {job.data.sequence_length} tokens"
    for kind, name in (("step", "training loss"), ("eval", "held-out loss")):
        of_kind = [event for event in events if event["kind"] == kind and event["step"] <= step]
        losses = [(event["step"], event["loss"]) for event in of_kind if event["loss"] is not None]
        if losses:
            (first, at_first), (last, at_last) = losses[0], losses[-1]
            yield name, f"{at_first:.4f} at step {first}, {at_last:.4f} at step {last}"
    yield "optimizer", f"AdamW, rate {job.optimizer.learning_rate:g}, {job.optimizer.schedule} schedule"
    strategies = [event["strategy"] for event in events if event["kind"] == "run"]
    yield "strategy", f"{strategies[-1]}, {processes(manifest.origin.world_size)}"
    yield "precision", f"{job.train.precision}; these weights: {written['dtype']}"
    versions = manifest.origin.versions
    yield "versions", ", ".join(f"{name} {versions[name]}" for name in _LIBRARIES if name in versions)


def _on_hub(name: str) -> bool:
    named = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None
    return named and PurePath(name).suffix not in _FILES and not Path(name).exists()


def _public(name: str) -> str:
    """A repository's id, or the last part of a path."""
    return name if _on_hub(name) else PurePath(name).name


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
