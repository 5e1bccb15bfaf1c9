"""Frequent mistakes: values that are taken, and do something else than they say."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.lint.document import Document, line_at
from shardwise.lint.finding import Hit, Severity, loop_rule, training_rule
from shardwise.lint.rules.accelerate import given_twice
from shardwise.lint.rules.families import has_no_spare_rows
from shardwise.lint.rules.loop import SHARDED, around, made_by
from shardwise.lint.rules.program import calls, code_of, known_values, tree_of, values_of, walk, words_of
from shardwise.lint.rules.training import given_to_trainers, tool_of
from shardwise.lint.schema import as_number, names, pattern
from shardwise.lint.script_inputs import options
from shardwise.lint.script_run import own_parts
from shardwise.lint.setup import Setup

_BITS = ("load_in_4bit", "load_in_8bit", "quantization_bit")
_ADAPTERS = re.compile(r"(?i)peft|lora|adapter")
_BASE = re.compile("|".join(names("base_models")))  # of whose tokenizers none has a chat template
_AS_MODEL = partial(ast.keyword, "model")
_LEAST = {"min_lr", "min_lr_rate"}
_RATIO = 1e-4  # a smallest rate below that share of the highest is meant as a rate
_GIVES_ADAPTERS = re.compile("|".join(names("gives_adapters")))
_SHIFTED = pattern("shifted_labels")
_OWN_SHIFT = re.compile(r"(?i)cross_?entropy|logits|nll_loss")  # a loss of the script's own
_SWAPPED = pattern("swapped")
_PADS_LEFT, _FROM_LEFT = map(pattern, ("pads_left", "masked_from_left"))
_TRAINS_ROWS, _NO_NEW_TOKEN, _NEW = pattern("trains_rows"), pattern("no_new_token"), pattern("new")
_ANSWERED = re.compile(r"'role': 'assistant'[^{}]*\}\]$")
_NO_SHARD = re.compile(r"(?i)(\.|= ?)['\"]?no_shard\b")  # chosen, and not one of several
_GENERATES, _OF_OTHERS, _PASSES = *map(pattern, ("generates", "imports_of_others")), pattern("passes").pattern
_NAMED_CHECKPOINT = re.compile(r"(checkpoint[-_])?(last|latest|best|final|newest)")


def _quantized(document: Document) -> str:
    """The key that asks for a base of 4 or 8 bits."""
    return next((one for one in _BITS if document.on(one) or document.get(one) in (4, 8)), "")


def _passed_on(document: Document) -> bool:
    """Whether a function that is not of a known library makes or gets the model: it may add adapters."""
    text = code_of(document)
    brought = re.sub(r" as \w+", "", "|".join(_OF_OTHERS.findall(text)))
    theirs = brought.replace(", ", "|").replace("*", r"\w+")
    return bool(theirs and re.search(_PASSES.replace("NAMES", theirs), text))


@training_rule("error", "transformers/trainer_utils.py: validate_quantization_for_training; read in 5.23")
def quantised_without_adapter(document: Document, setup: Setup) -> Iterator[Hit]:
    """Weights of 4 or 8 bits cannot be trained: the Trainer stops, `on purely quantized models`."""
    key, tool = _quantized(document), tool_of(document)
    if not key:
        return
    full = document.get("finetuning_type") in ("full", "freeze") or document.get("use_peft") is False
    if document.syntax == "python":
        trains = any(ast.unparse(one.func) in document.uses for one in calls(document, *names("trainers")))
        given = any(_ADAPTERS.search(one.text) for one in setup.of("training")) or _passed_on(document)
        full = trains and not given
    elif tool == "Axolotl":
        full = not document.get("adapter")
    if full:
        words = {"Axolotl": "adapter: qlora", "LLaMA-Factory": "finetuning_type: lora"}
        yield Hit((key,), fix=f"{words.get(tool, 'LoRA adapters')}; or remove `{key}`")


@training_rule("error", "peft: LoraConfig alone changes no model")
def adapters_given_wrongly(document: Document, setup: Setup) -> Iterator[Hit]:
    """Nothing gets the LoraConfig and all weights are trained, or the model gets adapters twice."""
    by = made_by(document)
    for call in calls(document, *names("trl_trainers")):
        given = {one.arg: ast.unparse(one.value) for one in (*call.keywords, *map(_AS_MODEL, call.args[:1]))}
        twice = by.get(given.get("model", ""), "").endswith("get_peft_model")
        if twice and given.get("peft_config", "None") != "None":
            what = "the model has adapters already: ValueError `You passed a PeftModel instance together`"
            yield Hit(("peft_config",), what, "remove peft_config, or get_peft_model", line=call.lineno)
    for alone in walk(tree_of(document), ast.Expr):
        match alone.value:
            case ast.Call(args=[first, *_]) as lost if ast.unparse(lost.func).endswith("get_peft_model"):
                model = ast.unparse(first)
                what = f"nothing keeps what get_peft_model returns: `{model}` saves no adapter, "
                what += "and the Trainer refuses a quantized one"
                fix = f"{model} = {ast.unparse(lost)}"
                yield Hit((), what, fix, severity="warning", line=lost.lineno)
    trains = re.search(r"rainer\b.*\.train\(|\.backward\(", document.text)
    code = re.sub(r"(?m)^\s*#.*", "", setup.scripts)
    if "LoraConfig(" not in document.text or not trains or _GIVES_ADAPTERS.search(code):
        return
    read = {one.id for one in walk(tree_of(document), ast.Name) if isinstance(one.ctx, ast.Load)}
    for node in walk(tree_of(document), ast.Assign):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=made)) if name not in read:
                if ast.unparse(made).endswith("LoraConfig"):
                    fix = f"get_peft_model(model, {name}), or peft_config={name} of TRL's trainer"
                    yield Hit((), fix=fix, line=node.lineno)


@training_rule("error", "peft/utils/other.py: prepare_model_for_kbit_training; read in 0.21")
def adapters_are_frozen(document: Document, _: Setup) -> Iterator[Hit]:
    """`prepare_model_for_kbit_training` freezes all parameters: after get_peft_model also the adapters."""
    made = [*walk(tree_of(document), ast.Assign)]
    flow, later = values_of(document).flow, re.search(r"requires_grad(_\(|\s*= *True)", document.text)
    for call in calls(document, "prepare_model_for_kbit_training") if not later else ():
        model = ast.unparse(call.args[0]) if call.args else ""
        before = [one for one in made if ast.unparse(one.targets[0]) == model and one.lineno < call.lineno]
        last = max(before, key=lambda one: one.lineno, default=None)
        if last and re.search(r"get_peft_model\(", ast.unparse(last.value)) and not flow.apart(last, call):
            yield Hit((), fix="call it before get_peft_model", line=call.lineno)


@training_rule("error", "the language: UnboundLocalError")
def read_before_assignment(document: Document, _: Setup) -> Iterator[Hit]:
    """A function reads a name before it gives it a value."""
    flow, functions = values_of(document).flow, ast.walk(tree_of(document))
    for function in (one for one in functions if isinstance(one, ast.FunctionDef)):
        names_ = [one for one in own_parts(function) if isinstance(one, ast.Name)]
        first = dict[str, Any]()
        for one in sorted(names_, key=lambda one: -one.lineno):
            first |= {} if isinstance(one.ctx, ast.Load) else {one.id: flow.statement(one)}
        for part in ast.walk(function):  # what imports, arguments, handlers and `global` bind
            bound = [getattr(part, "name", None), getattr(part, "arg", None), *getattr(part, "names", [])]
            first = {name: by for name, by in first.items() if name not in bound}
        reads = dict[str, int]()  # of each name, its first line
        for one in (one for one in names_ if isinstance(one.ctx, ast.Load) and one.id in first):
            by: Any = flow.statement(one)
            early = one.lineno < first[one.id].lineno or by is first[one.id]
            maybe = any(isinstance(part, ast.IfExp | ast.BoolOp) for part in ast.walk(by))
            simple = isinstance(by, ast.Assign | ast.Expr | ast.Return) and flow.block(by) is function
            if early and simple and not maybe and "except" not in document.text:
                reads[one.id] = min(one.lineno, reads.get(one.id, one.lineno))
        if reads:
            said = ", ".join(f"`{name}` in line {document.at(first[name].lineno)}" for name in reads)
            what = f"`{function.name}` gives a first value to {said}, and reads it before: UnboundLocalError"
            yield Hit((), what, "give it a value above, or take it as an argument", line=min(reads.values()))


@training_rule("error", "PyYAML keeps the last key; LLaMA-Factory: OmegaConf.load")
def key_twice(document: Document, _: Setup) -> Iterator[Hit]:
    """Of two equal keys the last is used, and the first silently ignored; LLaMA-Factory stops."""
    stops = tool_of(document) == "LLaMA-Factory" and document.syntax == "yaml"
    happens = "this one is used, and the first silently ignored"
    happens = "LLaMA-Factory stops: `found duplicate key`" if stops else happens
    yield from given_twice(document, happens, stops=stops)


@training_rule("error", "transformers/trainer.py: train; trainer_utils.py: get_last_checkpoint; read in 5.23")
def no_such_checkpoint(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer numbers its checkpoints, and takes a path as it is: `checkpoint-last` is none."""
    key, python = "resume_from_checkpoint", document.syntax == "python"
    given = [] if python else [(document.get(key), document.line((key,)))]
    for call in calls(document, "train"):
        values = (one.value for one in call.keywords if one.arg == key)
        given += [(known_values(document, setup).value(one), call.lineno) for one in values]
    for path, line in given if setup.reader == "trainer" else ():
        last = str(path).rstrip("/").rpartition("/")[2]
        own = not python and re.search(rf"['\"]{re.escape(last)}['\"]", setup.scripts)
        if _NAMED_CHECKPOINT.fullmatch(last) and not own and not Path(str(path)).exists():
            what = f"{path}: the Trainer takes it as a folder, and its own are named by steps, checkpoint-500"
            fix = "true, which takes the last of output_dir; or the folder of a step"
            yield Hit((key,), what, fix, line=line)


@training_rule("warning", "the language: bool('False') is True")
def bool_of_a_text(document: Document, setup: Setup) -> Iterator[Hit]:
    """`type=bool` makes True of every text but the empty one: the flag cannot be turned off."""
    for call in calls(document, "add_argument"):
        kinds = {one.arg: ast.unparse(one.value) for one in call.keywords}
        flags, name, _ = options(call)
        dashed = any(isinstance(one, ast.Constant) and str(one.value).startswith("-") for one in call.args)
        if kinds.get("type") != "bool" or not flags or not dashed:
            continue
        off = any(one.get(flag) is False for one in setup.of("training") for flag in one.flags & {*flags})
        what = f"`type=bool` makes True of `--{name} False`" + ", which the command gives" * off
        fix = "action=argparse.BooleanOptionalAction"
        yield Hit((), what, fix, severity="error" if off else None, line=call.lineno)


@training_rule("warning", "transformers/optimization.py: get_constant_schedule, get_cosine_with_min_lr_...")
def schedule_and_its_arguments(document: Document, setup: Setup) -> Iterator[Hit]:
    """The schedule has no such part, or takes the number as something else."""
    decided = any(one.section("scheduler") for one in setup.of("deepspeed"))  # by DeepSpeed, with a warm-up
    for given, line in given_to_trainers(document, setup, every=True):
        named = "lr_scheduler" if document.has("base_model") else "lr_scheduler_type"  # Axolotl's
        rate, kind = given.get("learning_rate"), str(given.get(named)).lower()
        for name in ("warmup_ratio", "warmup_steps"):
            asked = isinstance(given.get(name), int | float) and given[name] > 0
            if asked and not decided and re.fullmatch(r"(\w+\.)?constant", kind):
                at = document.line((name,)) if document.get(name) == given[name] else line
                what = f"the schedule `constant` has no warm-up: `{name}` {given[name]} is ignored"
                yield Hit((name,), what, "constant_with_warmup", line=at)
        more = given.get("lr_scheduler_kwargs")
        least: Mapping[str, Any] = more if isinstance(more, Mapping) else {}
        silent = "**" not in given and not (line is None and "lr_scheduler_kwargs" in setup.scripts)
        if silent and kind.endswith("with_min_lr") and (more is None or least) and not _LEAST & {*least}:
            what = "ValueError `One of min_lr or min_lr_rate should be set through the `lr_scheduler_kwargs``"
            at = line or document.line(("lr_scheduler_type",))
            fix = '"min_lr_rate": 0.1 in lr_scheduler_kwargs'
            yield Hit(("lr_scheduler_type",), what, fix, severity="error", line=at)
        share, lowest = as_number(least.get("min_lr_rate")), as_number(least.get("min_lr"))
        if share is not None and 0 < share < _RATIO:
            what = f"`min_lr_rate` is a share of the highest rate: {share:g} of it is nearly 0"
            yield Hit(("lr_scheduler_kwargs",), what, f'"min_lr": {share:g}', line=line)
        if lowest is not None and isinstance(rate, int | float) and lowest >= rate:
            what = f"`min_lr` {lowest:g} is no less than the learning rate {rate:g}"
            yield Hit(("lr_scheduler_kwargs",), what, "a lower rate; min_lr_rate takes a share", line=line)


@training_rule("warning", "transformers/trainer.py: _determine_best_metric")
def keeps_the_worst(document: Document, setup: Setup) -> Iterator[Hit]:
    """`greater_is_better` with a loss as the metric: the checkpoint with the highest loss is the best."""
    for given, line in given_to_trainers(document, setup, every=True):
        metric = str(given.get("metric_for_best_model"))
        if metric.endswith("loss") and given.get("greater_is_better") is True:
            at = document.line(("greater_is_better",)) if document.has("greater_is_better") else line
            yield Hit(("greater_is_better",), fix="remove it: a loss is better when it is smaller", line=at)


@training_rule("warning", "the language: a trailing comma makes a tuple")
def comma_makes_a_tuple(document: Document, _: Setup) -> Iterator[Hit]:
    """A comma at the end of the line makes a tuple of the value."""
    rows = document.text.split("\n")
    for node in ast.walk(tree_of(document)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple(elts=[ast.Constant() as one])):
                row = rows[node.lineno - 1] if node.lineno == node.end_lineno else ""
                if re.search(r"=\s*[^(\s].*,\s*(#.*)?$", row):
                    what = f"the comma makes a tuple of `{name}`: ({one.value!r},)"
                    yield Hit((), what, f"{name} = {one.value!r}", line=node.lineno)


@training_rule("error", "transformers/tokenization_utils_base.py: tokenizer.chat_template is not set")
def no_chat_template(document: Document, setup: Setup) -> Iterator[Hit]:
    """The tokenizer of a base model has no chat template: apply_chat_template stops with a ValueError."""
    used = re.search(r"\.apply_chat_template\(", document.text) if document.syntax == "python" else None
    texts = " ".join(one.text for one in setup.of("training"))
    if not used or re.search(r"chat_template\s*=|get_chat_template|setup_chat_format|template_path", texts):
        return
    known, found = known_values(document, setup), calls(document, "from_pretrained")
    made = [one for one in found if re.search(r"Tokenizer\w*\.from_pre", ast.unparse(one.func))]
    models = [str(known.value(one.args[0])) for one in made if one.args]
    if models and all(_BASE.search(name.lower().rpartition("/")[2]) for name in models):
        what = f"the tokenizer of {models[0]} has no chat template: ValueError"
        fix = "tokenizer.chat_template = ..., or the instruct model's tokenizer"
        sure = not re.search(r"(?<!apply_)chat_template|\bexcept\b", texts)  # else it may not be called
        severity: Severity = "error" if sure else "warning"
        yield Hit((), what, fix, severity=severity, line=line_at(document.text, used.start()))


@training_rule("error", "torch/utils/data/dataloader.py: sampler option is mutually exclusive with shuffle")
def sampler_and_shuffle(document: Document, _: Setup) -> Iterator[Hit]:
    """A DataLoader takes `sampler` or `shuffle=True`: with both it stops with a ValueError."""
    known = values_of(document)
    for call in calls(document, "DataLoader"):
        said = {name: ast.unparse(known.meant(value)) for name, value in words_of(call).items()}
        if said.get("shuffle") == "True" and said.get("sampler", "None") not in ("None", ""):
            sure = "Sampler(" in said["sampler"] and " if " not in said["sampler"]  # a name may be None
            yield Hit((), fix="remove shuffle=True", severity=None if sure else "warning", line=call.lineno)


@training_rule("warning", "torch/amp/grad_scaler.py; fp16's smallest number is 6e-8")
def fp16_without_scaler(document: Document, _: Setup) -> Iterator[Hit]:
    """Gradients of fp16 autocast need a loss scale: small ones become 0."""
    others = r"Scaler|Accelerator\(|deepspeed|[Ll]ightning|Fabric|Trainer\(|bfloat16"
    own = ".backward(" in document.text and not re.search(others, document.text)
    for call in calls(document, "autocast") if own else ():
        if re.search(r"torch\.(float16|half)\b", ast.unparse(call)):
            yield Hit((), fix="torch.amp.GradScaler, or dtype=torch.bfloat16", line=call.lineno)


@training_rule("error", "torch/nn/parallel/distributed.py: device_ids")
def one_device_for_all_ranks(document: Document, setup: Setup) -> Iterator[Hit]:
    """`device_ids=[0]` is GPU 0 in every process, and the model of the others is on another."""
    local = re.search(r"LOCAL_RANK|local_rank|get_rank\(", document.text)
    for call in calls(document, "DistributedDataParallel") if local and setup.world_size != 1 else ():
        if any(one.arg == "device_ids" and ast.unparse(one.value) == "[0]" for one in call.keywords):
            yield Hit((), fix="device_ids=[local_rank]", line=call.lineno)


@loop_rule("error", "torch/amp/grad_scaler.py: unscale_")
def clips_wrong_gradients(document: Document, _: Setup) -> Iterator[Hit]:
    """Clipping before `scaler.unscale_` sees gradients times the loss scale: almost nothing is left."""
    scaled = re.search(r"\bscale\(\w*loss\w*\)\.backward\(", document.text)
    clips = [*calls(document, "clip_grad_norm_", "clip_grad_value_")]
    for call in clips if scaled and "unscale_(" not in document.text else ():
        if not all(values_of(document).flow.apart(one, call) for one in calls(document, "scale")):
            yield Hit((), fix="scaler.unscale_(optimizer) before it", line=call.lineno)
    wraps = [*calls(document, "FullyShardedDataParallel")]
    parts = {name for row in SHARDED.findall(code_of(document)) for name in row if wraps}
    for call in clips if not _NO_SHARD.search(code_of(document)) else ():
        held = [name for name in parts if call.args and ast.unparse(call.args[0]) == f"{name}.parameters()"]
        apart = any(values_of(document).flow.apart(one, call) for one in wraps)
        if held and not apart and "_norm_" in ast.unparse(call.func):
            what = "each process clips by the norm of its own shards: the shards get different factors"
            fix, source = f"{held[0]}.clip_grad_norm_(...)", "torch/distributed/fsdp: clip_grad_norm_"
            yield Hit((), what, fix, severity="warning", line=call.lineno, source=source)


@training_rule("error", "transformers/loss/loss_utils.py: ForCausalLMLoss: -100 is not learned")
def labels_do_not_fit(document: Document, _: Setup) -> Iterator[Hit]:
    """Labels hide the answer and keep the prompt, have the pad id, or stay longer than a row that is cut."""
    program = tree_of(document)
    for call in calls(document, "DataCollatorForSeq2Seq"):
        pads = [one for one in call.keywords if one.arg == "label_pad_token_id"]
        said = [ast.unparse(values_of(document).meant(one.value)) for one in pads]
        if said and re.fullmatch(r"[\w.]*tok\w*\.(pad|eos)_token_id", said[0]):
            what = f"labels are padded with `{said[0]}`, and not with -100: the loss counts the padding, too"
            fix = "remove it: -100 is the default"
            yield Hit(("label_pad_token_id",), what, fix, severity="warning", line=pads[0].value.lineno)
    left = _PADS_LEFT.search(text := ast.unparse(program)) and "side='right'" not in text
    for function in (one for one in ast.walk(program) if left and isinstance(one, ast.FunctionDef)):
        padded = "padding='max_length'" in ast.unparse(function)
        for one in (one for one in ast.walk(function) if padded and isinstance(one, ast.Assign)):
            if _FROM_LEFT.match(ast.unparse(one)):
                what = "the rows are padded on the left, and -100 hides as many tokens from the left: "
                what += "of the padding, and not the prompt"
                yield Hit((), what, "padding_side='right'; or mask before padding", line=one.lineno)
    given = [*walk(program, ast.Assign)]
    texts = {one: ast.unparse(one) for one in given}
    shifts = "ForCausalLM" in document.text and not _OWN_SHIFT.search(document.text)
    for node, text in texts.items():
        shifted = _SHIFTED.match(text) if shifts else None
        if shifted and not any(one.startswith(f"{shifted[1]}['input_ids'] = ") for one in texts.values()):
            what = "the model shifts the labels itself: these are a token shorter than its rows, ValueError"
            yield Hit((), what, f"{shifted[1]}['input_ids'].clone()", line=node.lineno)
        name, _sign, value = text.partition(" = ")
        if _SWAPPED.search(text):
            fix = "-100 for the prompt's tokens, and the answer's own tokens"
            yield Hit((), "-100 hides the answer, and the prompt is what is learned", fix, line=node.lineno)
        labels = name.replace("input_ids", "labels")
        if labels != name and re.match(rf"{re.escape(name)}\[:[^\]\[,:]+\]$", value):
            inside = {*ast.walk(place := around(program, node))}
            made = [one for one in given if one in inside and texts[one].startswith(f"{labels} = ")]
            uncut = made and not any("[:" in texts[one] for one in made)
            if uncut and made[-1].lineno < node.lineno and f"{labels}[:" not in ast.unparse(place):
                what = f"`{name}` is cut here, and `{labels}` is not: longer rows stop the loss, ValueError"
                yield Hit((), what, f"{labels} = {labels}{value.removeprefix(name)}", line=node.lineno)


@training_rule("warning", "https://huggingface.co/docs/transformers/chat_templating: add_generation_prompt")
def another_answer_begins(document: Document, _: Setup) -> Iterator[Hit]:
    """A row that ends with its answer gets the beginning of one more, which the model learns to write."""
    rows = [*walk(tree_of(document), ast.Assign)]
    ended = {ast.unparse(one.targets[0]) for one in rows if _ANSWERED.search(ast.unparse(one.value))}
    plain = "SFTTrainer" in document.uses and not _GENERATES.search(document.text)
    for call in calls(document, "apply_chat_template") if "rain(" in document.text else ():
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        said = [ast.unparse(call), *(ast.unparse(one.targets[0]) for one in rows if one.value is call)]
        texts = "|".join(map(re.escape, said)) if plain else "^"
        row = re.search(rf"'text': ({texts})[,}}]", code_of(document))
        ends = row or (call.args and ast.unparse(call.args[0]) in ended)
        if ends and given.get("add_generation_prompt") == "True":
            yield Hit(("add_generation_prompt",), fix="add_generation_prompt=False", line=call.lineno)


@training_rule("warning", "transformers/trainer.py 5.23: _load_optimizer_and_scheduler")
def resume_without_optimizer(document: Document, _: Setup) -> Iterator[Hit]:
    """Checkpoints of `save_only_model` have no optimizer: a resumed run begins AdamW again."""
    kept = [one for call in calls(document, "train") for one in call.keywords]
    given = [one.value for one in kept if one.arg == "resume_from_checkpoint"]
    asked = [document.get("resume_from_checkpoint"), *map(values_of(document).value, given)]
    if document.on("save_only_model") and any(one not in (None, False) for one in asked):
        yield Hit(("save_only_model",), fix="save_only_model: false")


@training_rule("warning", "peft/tuners/lora/config.py 0.21: modules_to_save, trainable_token_indices")
def new_tokens_are_not_trained(document: Document, setup: Setup) -> Iterator[Hit]:
    """The rows of new tokens stay as `resize_token_embeddings` makes them: adapters train no embedding."""
    adapters, program = [*calls(document, "LoraConfig")], code_of(document)
    rows = document.get("tokens") if document.get("adapter") in ("lora", "qlora") else None  # of Axolotl
    for word in rows if isinstance(rows, list) and not document.get("lora_modules_to_save") else ():
        if _NEW.fullmatch(str(word)) or has_no_spare_rows(document, setup):
            what = f"{word!r} gets a row that no adapter trains: the model neither learns nor writes it"
            yield Hit(("tokens",), what, "lora_modules_to_save: [embed_tokens, lm_head]")
            return
    if not adapters or "resize_token_embeddings(" not in program or _TRAINS_ROWS.search(program):
        return
    for call in calls(document, "add_tokens", "add_special_tokens"):
        given = ast.walk(values_of(document).meant(call.args[0])) if call.args else ()
        words = [str(one.value) for one in given if isinstance(one, ast.Constant)]
        new = [one for one in words if not _NO_NEW_TOKEN.search(one)]
        if new and (_NEW.fullmatch(new[0]) or has_no_spare_rows(document, setup)):
            what = f"{new[0]!r} gets a row that no adapter trains: the model neither learns nor writes it"
            fix = 'modules_to_save=["embed_tokens", "lm_head"], or trainable_token_indices, in LoraConfig'
            yield Hit((), what, fix, line=call.lineno)
