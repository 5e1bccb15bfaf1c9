"""What the tools do where no file says it (foreign.toml: defaults)."""

import re
from collections.abc import Sequence
from pathlib import Path

from shardwise.lint.document import AUTO, Document, line_at
from shardwise.lint.foreign.datasets import started
from shardwise.lint.foreign.table import TABLE, leaves
from shardwise.lint.read import is_file
from shardwise.lint.schema import names
from shardwise.lint.setup import Setup, of_script

_TARGETS = "model.lora.targets"
_KINDS = ("finetuning_type", "train_type", "tuner_type", "sft_type")
_PRECISION = re.compile(r"autocast|\bamp\b|float16|\.half\(|bf16|fp16|mixed_precision|Accelerator|deepspeed")
_IDLE = re.compile(r"args\.(bf16|fp16)\b|\b(bf16|fp16)\w*['\"]?[ =:]+(?i:false)\b")  # of a precision
_SEVERAL = re.compile(r"Parallel|distributed|Accelerator|deepspeed|fully_shard|Fabric|colossalai")
_SFT = {"max_seq_length", "packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field"}
_OLD_TRL = re.compile(r"DataCollatorForCompletionOnlyLM|ConstantLengthDataset|max_seq_length")  # until 0.19
_PINS = ("requirements*.txt", "pyproject.toml", "setup.py", "environment.y*ml")
_OLD_PIN = re.compile(r"(?m)^[^#\n]*(?<![\w-])trl(\[\w+\])?\s*(==|~=|<=?)\s*0\.(\d|1\d|2[01])\b")
_CHATS = re.compile(r"(?i)chat|instruct|[-_]it\b|zephyr|hermes|sft|dpo")  # in names of models with a template
_EVALUATION, _EVALUATES = ("do_eval", "eval_strategy", "evaluation_strategy"), (True, "steps", "epoch")
_CHAT = re.compile(r"chat_template|messages|conversations|\.map\(|formatting_func")  # rows of another shape
_LOOP = re.compile(r"(?m)^[^#\n]*\.backward\(")
_EVALUATED = ("every evaluation", "an evaluation after epochs")  # of a loop
_OTHERS = {key: re.compile(words) for key, words in TABLE["of_other_libraries"].items()}
_BITS = ("bnb_4bit_use_double_quant", "bnb_4bit_quant_type")  # whose defaults are not a job's


def defaults(given: set[str], documents: Sequence[Document], model: str, said: list[str]) -> list[str]:
    """The changes; `given`: keys of the job and of the files that something says."""
    scripts = [one for one in documents if one.syntax == "python" and one.kind == "training"]
    scripts = [one for one in scripts if not re.search(r"import run_exp\b", one.text)]  # LLaMA-Factory's own
    first = sorted(documents, key=lambda one: one.syntax != "shell")  # whose tool reads the other files
    tools = [*dict.fromkeys(tool for one in first for tool in _tools(one, alone=not scripts))]
    if any(one.has("max_seq_length") for one in documents):  # a name that TRL has not since 0.20
        tools = [one for one in tools if one != "trl_22"]
    if any(one.has("swift") for one in documents):  # its file may have any keys
        tools = ["swift" if any(one.has("model") for one in documents) else "swift_2"]  # had other names
    given = given | {"full" for one in documents for name in _KINDS if one.get(name) == "full"}
    given |= {f"{k}={v}" for one in documents for k, v in leaves(one.values) if k.endswith(".type")}
    given |= set() if _CHATS.search(model) else {"base model"}
    places = [(one, key) for one in documents for key in _EVALUATION if one.get(key) in _EVALUATES]
    places += [(one, key) for one in scripts for key in _EVALUATED if one.has(key)]
    evaluation = next((f"{one.name}:{one.line((key,))}: {key}" for one, key in places), "")
    setup = Setup(documents=tuple(documents)) if " is not there;" not in " ".join(said) else Setup()
    also = {
        "zero": "loop" in tools and any(map(_with_auto_clip, documents)),
        "plain": "loop" in tools and not any(_PRECISION.search(one.text) for one in scripts),
        "unmixed": bool({"trainer", "trl"} & {*tools}) and _without_halves(documents, tools),
        "alone": "loop" in tools and not any(_SEVERAL.search(one.text) for one in scripts),
        "spread": any(map(_in_one_process, scripts)),
        "several": setup.hugging_face and (setup.launched or 1) > 1,
        "neither": any(one.get("fp16") is one.get("bf16") is False for one in documents),
        "do_eval": bool(evaluation),
        "text_field": any(one.get("dataset_text_field") == "text" for one in documents)
        and not any(_CHAT.search(one.text) for one in scripts)
        and not any("data.format" in one for one in said),
        "trl_peft": with_peft(documents),
    }
    made_by = (tool for tool in TABLE["tools"] if any(one.has(tool) for one in scripts))  # `Plugin()`
    tools = [*made_by, *(tool for tool in also if also[tool]), *tools, "any"]
    for key, words in _OTHERS.items() if "loop" in tools else ():
        for one in scripts:
            if key not in given and (name := words.search(one.text)):
                said.append(f"to do: {one.name}:{line_at(one.text, name.start(1))}: {name[1]}: write {key}")
                given |= {key}
    made = dict[str, str]()
    for tool in tools:
        own = list[str]()
        for row in TABLE["defaults"]:
            if tool in row["of"] and not given & {*row["unless"]} and given.issuperset(row.get("where", ())):
                own += [change for change in row["job"] if change.partition("=")[0] not in made]
                said += [row["say"].replace("do_eval", evaluation)] if "say" in row else []
        if tool in ("peft", "trl_peft") and _TARGETS not in given | made.keys() and model:
            by_name = TABLE["peft_targets"].items()
            modules = next(one for sign, one in by_name if re.search(sign, model, re.IGNORECASE))
            own.append(f"{_TARGETS}=[{modules}]")
        if own and not (tool == "any" and evaluation):  # whose rows the user is asked for
            shown = ", ".join(own).replace("batch.micro=", "train.micro_batch=").replace("batch.", "")
            said.append(f"assumed, as {TABLE['tools'][tool]} does: {shown}")
        made |= {change.partition("=")[0]: change for change in own}
    return [*made.values()]


def _without_halves(documents: Sequence[Document], tools: Sequence[str]) -> bool:
    """Whether nothing may ask the Trainer, or what starts it, for bf16 or fp16, which are off by default."""
    scripts = [one for one in documents if one.syntax == "python"]
    off = any(one.get("bf16") is False for one in documents)  # whatever TRL does by default
    others = {"unsloth", "factory", "deepspeed", *["sft_config", "sft_yaml"] * (not off)} & {*tools}
    files = ("accelerate_config", "config_file")  # which may ask for bf16 again: TRL's own do
    launched = any(one.get("launcher") == "accelerate" for one in documents)
    launched = any(one.has(key) for one in documents for key in files) if off else launched
    known = (off or bool(scripts)) and not launched and all(one.kind == "training" for one in documents)
    filled = any("HfArgumentParser" in one.text for one in scripts) and len(scripts) == len(documents)
    texts = (_IDLE.sub("", one.text) for one in documents)
    return known and not (others or filled or any(map(_PRECISION.search, texts)))


def with_peft(documents: Sequence[Document]) -> bool:
    """Whether TRL's ModelConfig gives the model adapters."""
    scripts = [one for one in documents if one.syntax == "python" and one.kind == "training"]
    read = not scripts or any(name.endswith("get_peft_config") for one in scripts for name in one.uses)
    return read and any(one.get("use_peft") is True for one in documents)


def _before_22(script: Document) -> bool:
    """Whether a script is for TRL before 0.22: by its own words, or by what is installed for it."""
    pins = (one for folder in Path(script.name).parents for name in _PINS for one in folder.glob(name))
    texts = (one.read_text(encoding="utf-8", errors="replace") for one in pins if is_file(one))
    return bool(_OLD_TRL.search(script.text) or any(_OLD_PIN.search(text) for text in texts))


def _in_one_process(script: Document) -> bool:
    """Whether a script places its model on one GPU, or on all that one process sees: `{"": 0}`, `auto`."""
    place = script.get("device_map")
    place = place.get("") if isinstance(place, dict) else place  # else Accelerate refuses `auto`
    return type(place) is int or str(place) == "auto" or str(place).startswith("cuda")


def _with_auto_clip(document: Document) -> bool:
    """Whether Accelerate fills in DeepSpeed's clipping, with 1.0 (accelerator.py: _prepare_deepspeed)."""
    section = document.section("deepspeed_config")
    asks = bool(section) or document.get("use_deepspeed") is True
    own = {"deepspeed_config_file", "gradient_clipping"} & {*document.values, *section}
    return document.get("gradient_clipping") == AUTO or (asks and not own)


def _tools(document: Document, *, alone: bool) -> list[str]:
    """Whose defaults hold for what a document does not say; `alone`: without a script."""
    if document.kind == "deepspeed":
        own = ["deepspeed"] if document.has("optimizer", "type") else []
        return own if "gradient_clipping" in document.values else [*own, "clipless"]
    if document.syntax != "python":
        known = {*TABLE["marks"]} & document.values.keys()
        if alone and Path(str(document.get("script"))).name == "sft.py":
            return ["sft_script", "sft_config", "trl_22", "trl"]
        if not alone or not (known or started(document)):
            return []
        if tool := started(document):
            return [tool]
        if "base_model" in known:
            return ["axolotl"]
        if {*names("of_llama_factory")} & document.values.keys():
            return ["factory", "trainer"]
        if _SFT & document.values.keys() and document.has("use_peft"):  # of TRL's ModelConfig
            return ["sft_yaml", "trl_22", "trl"]
        return ["sft_yaml"] * bool(_SFT & document.values.keys()) + ["trainer"]
    calls = {name.rpartition(".")[2] for name in document.uses}
    adapters = ["peft"] if document.has("LoraConfig") else []
    unsloth = ["unsloth"] if document.has("FastModel()") else []
    four = not unsloth and document.get("load_in_4bit") is True
    adapters += [one for one in _BITS if four and not document.has(one)]
    unsloth += ["unsloth_config"] if unsloth and "SFTConfig" in calls else []  # in place of TRL's
    if of_script(document) == "trainer":
        if calls & {"SFTTrainer", "SFTConfig"}:  # takes the Trainer's arguments too, with their defaults
            own = [] if "TrainingArguments" in calls and "SFTConfig" not in calls else ["sft_config"]
            own += ["trl_22"] if own and not _before_22(document) else []
            return [*unsloth, *adapters, *own, "trl"]
        return [*unsloth, *adapters, *([] if calls & {*names("trl_arguments")} else ["trainer"])]
    torch = ["torch"] if any(document.has(f"{name}()") for name in TABLE["adam"]) else []
    if "deepspeed.initialize" in document.uses:
        return [*adapters, *torch, "engine"]
    loop = ["loop"] if torch or document.has("DataLoader()") or _LOOP.search(document.text) else []
    return [*unsloth, *adapters, *torch, *loop]
