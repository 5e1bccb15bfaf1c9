"""Facts about a training beyond one file: the reader, the number of GPUs, the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from shardwise.lint.document import Document, Kind, Syntax
from shardwise.lint.schema import as_number, deepspeed_schema
from shardwise.lint.script_settings import ARGUMENT_CLASSES, LORA
from shardwise.lint.shell_text import OPEN

Reader = Literal["trainer", "accelerate", "deepspeed"]
READER_NAMES: dict[Reader, str] = {"trainer": "the Hugging Face Trainer", "accelerate": "Accelerate"}
READER_NAMES["deepspeed"] = "DeepSpeed itself"
READERS = tuple(READER_NAMES)
MOST = 2**31  # upper limit of a model's hidden size and number of heads
_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
_LIBRARIES = ("transformers", "trl", "unsloth", "sentence_transformers", "setfit", "optimum")
_LIGHTNING = re.compile(r"^\s*(import|from) (pytorch_)?lightning\b", re.MULTILINE)
_SPAWNS = re.compile(r"(?m)^[^#\n]*\b(mp|multiprocessing|xmp)\.spawn\(")
_HALF = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}


def deepspeed_version() -> str:
    """The installed DeepSpeed's version; the schema's if there is none or its minor version differs."""
    known = deepspeed_schema().version
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        return known
    return installed if installed.startswith("0.19.") else known


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts of a model that decide whether a configuration suits it; None if unknown."""

    name: str
    hidden_size: int | None = None
    key_value_heads: int | None = None
    precision: str | None = None  # bf16 or fp16 if the weights are published in that format
    model_type: str = ""
    model_types: tuple[str, ...] = ()  # its own type and its parts'; empty if its code is not in transformers
    experts: bool = False

    @classmethod
    def of_config(cls, name: str, config: Mapping[str, Any]) -> ModelFacts:
        """Read the content of a Hugging Face config.json."""
        inner = [value for value in config.values() if isinstance(value, Mapping)]
        text = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
        types = [str(part["model_type"]) for part in (config, *inner) if part.get("model_type")]

        def first(*names: str) -> Any:
            return next((text[name] for name in names if text.get(name)), None)

        dtype = str(first("dtype", "torch_dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        return cls(
            name=name,
            hidden_size=_count(first("hidden_size", "n_embd", "d_model")),
            key_value_heads=_count(first(*_HEADS)),
            precision=_HALF.get(dtype),
            model_type=str(config.get("model_type", "")),
            model_types=() if config.get("auto_map") else tuple(types),
            experts=bool(first("num_experts", "num_local_experts", "n_routed_experts")),
        )


def _count(value: Any) -> int | None:
    """The value if it is a plausible count: anyone may have written the config.json."""
    return value if isinstance(value, int) and 0 < value < MOST else None


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The files of one training, and the flags of the command."""

    documents: tuple[Document, ...] = ()
    asked_reader: Reader | None = None
    asked_world_size: int | None = None  # from --gpus
    gpus_per_node: int | None = None
    gpu: str = ""  # the kind, from --gpus
    model: ModelFacts | None = None
    deepspeed: str = deepspeed_schema().version  # the version of DeepSpeed that the run would use

    def of(self, kind: Kind, syntax: Syntax | None = None) -> tuple[Document, ...]:
        return tuple(one for one in self.documents if one.kind == kind and syntax in (None, one.syntax))

    @property
    def scripts(self) -> str:
        """The text of all scripts."""
        return "\n".join(one.text for one in self.of("training", "python"))

    @property
    def reader(self) -> Reader | None:
        """The library that reads the DeepSpeed JSON; None if no file shows it."""
        if self.asked_reader is not None:
            return self.asked_reader
        scripts = self.of("training", "python")
        called = [one for one in map(of_script, scripts) if one]  # counts more than flags
        itself = _gives_file_itself(self.of("training"))
        if itself or ("deepspeed" in called and not any(map(_trainers, scripts))):
            called = [one for one in called if one != "trainer"]  # it has the Trainer's arguments only
        flags = [_of_flags(document, seen=bool(scripts)) for document in self.of("training")]
        found = called or [reader for reader in flags if reader]
        kinds = [str(one.get("distributed_type")).upper() for one in self.of("accelerate")]
        elsewhere = itself or (kinds and "DEEPSPEED" not in kinds)
        unused = any(map(leaves_the_file, self.of("training"))) and not kinds and called != ["trainer"]
        if unused or (scripts and not called and elsewhere and self.of("deepspeed")):
            return None  # or the script reads the JSON by itself
        if kinds and not {"trainer", "deepspeed"} & {*found}:
            return "accelerate"
        return min(found, key=READERS.index, default=None)

    @property
    def hugging_face(self) -> bool:
        """Whether the Trainer or Accelerate reads the file for DeepSpeed."""
        return self.reader in ("trainer", "accelerate")

    @property
    def lightning(self) -> bool:
        """Whether Lightning's Trainer fills the DeepSpeed JSON; its Fabric does not."""
        return any(_LIGHTNING.search(one.text) and "Fabric" not in one.text for one in self.of("training"))

    @property
    def world_size(self) -> int | None:
        """Processes, one per GPU: from --gpus, else from the launch; None if unknown."""
        return self.asked_world_size or self.launched

    @property
    def launched(self) -> int | None:
        """The number of processes that the accelerate file or the launch command starts."""
        if _SPAWNS.search(self.scripts):
            return None  # each process that is launched starts others
        counts = map(launched_processes, (*self.of("accelerate"), *self.of("training")))
        return next((count for count in counts if count is not None), None)

    def training(self, *names: str) -> Any:
        """The first of these values in a script, its arguments or its command; None if there is none."""
        values = (document.get(name) for document in self.of("training") for name in names)
        return next((value for value in values if value is not None), None)

    @property
    def named_model(self) -> str | None:
        """The model that a script, its arguments or a job names."""
        named = self.training("model_name_or_path", "base_model", "model_name")
        return named if isinstance(named, str) else None

    @property
    def lora(self) -> bool:
        """Whether the script trains LoRA adapters."""
        given = map(self.training, ("use_peft", "use_lora", "lora_r", "adapter", "finetuning_type"))
        made = any(one.get(LORA) or "get_peft_model" in one.uses for one in self.of("training"))
        return made or any(value not in (None, False, 0, "full") for value in given)


def launched_processes(document: Document) -> int | None:
    """The number of processes that an accelerate file or a launch command starts; None if not given."""
    count = document.number("num_processes")
    if document.kind == "accelerate":
        return None if count is None or count < 1 else int(count)
    per_node = document.number("num_gpus") or document.number("nproc_per_node")
    if document.get("launcher") == "swift":  # variables say it
        each, nodes = (document.environment.get(n, document.get(n)) for n in ("NPROC_PER_NODE", "NNODES"))
        counts = as_number(each), as_number(1 if nodes is None else nodes)
        return int(counts[0] * counts[1]) if counts[0] and counts[1] else None
    if re.fullmatch(r"([\w.-]+:\d+(,\d+)*@?)+", include := str(document.get("include"))):  # of deepspeed
        return len(re.findall(r"[:,]\d+", include))
    if document.has("hostfile") and not document.has("num_nodes"):
        return None  # as many nodes as that file has lines
    if any(document.has(name) and document.number(name) is None for name in ("num_nodes", "nnodes")):
        return None  # only the shell knows how many nodes
    if per_node is not None:
        return int(per_node) * int(document.number("num_nodes") or document.number("nnodes") or 1)
    return None if count is None else int(count)


def leaves_the_file(document: Document) -> bool:
    """Whether `accelerate launch` gets a DeepSpeed file, and no flag that turns DeepSpeed on."""
    on = document.has("use_deepspeed") or document.has(OPEN) or "ACCELERATE_USE_DEEPSPEED" in document.text
    given = "deepspeed_config_file" in document.values.keys() - document.flags
    return document.get("launcher") == "accelerate" and given and not on


def of_script(document: Document) -> Reader | None:
    """The library that a script trains with, as its calls show."""
    last = {name.rpartition(".")[2] for name in document.uses}
    if {"deepspeed.initialize", "deepspeed.add_config_arguments"} & document.uses:
        return "deepspeed"
    if _trainers(document) or last & {*ARGUMENT_CLASSES}:
        return "trainer"
    if _LIGHTNING.search(document.text):
        return "deepspeed"  # Lightning's Trainer gives the file to DeepSpeed as it is
    if "HfArgumentParser" in last and any(name.endswith("Trainer") for name in last):  # of another module
        return "trainer"
    return "accelerate" if "Accelerator" in last else None


def _trainers(document: Document) -> list[str]:
    """The Trainers that a script calls: of libraries, and its own that are derived of them."""
    named = [name.partition(".") for name in document.uses if name.endswith("Trainer")]
    return [last or first for first, _, last in named if not last or first in _LIBRARIES]


def _gives_file_itself(documents: tuple[Document, ...]) -> bool:
    """Whether a command gives the JSON by `--deepspeed_config`, a flag that no TrainingArguments has."""
    given = [one for one in documents if "deepspeed_config" in one.flags]
    flags = [one for one in given if one.get("deepspeed") in (None, True)]
    uses = {name.rpartition(".")[2] for one in documents for name in one.uses}
    given_file = {f"{one}({word})" for one in ARGUMENT_CLASSES for word in ("deepspeed", "**")}
    return bool(flags) and not uses & given_file


def _of_flags(document: Document, *, seen: bool) -> Reader | None:
    """`seen`: a script that was read, and calls no reader; it may call one in another module."""
    arguments = any(document.has(n) for n in ("output_dir", "per_device_train_batch_size", "base_model"))
    if arguments and document.syntax == "yaml" and not seen:  # LLaMA-Factory's, Axolotl's
        return "trainer"
    if isinstance(document.get("deepspeed"), str | Mapping):
        return "trainer" if (arguments and document.syntax != "yaml") or not seen else None
    if document.get("launcher") == "accelerate":  # the flags of its plugin leave no file to read
        by_flags = document.has("zero_stage") and not document.has("deepspeed_config_file")
        return None if by_flags else "accelerate"
    return "deepspeed" if document.has("deepspeed_config") else None
