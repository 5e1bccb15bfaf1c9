"""Models and tokenizers: what suits another family of models, and end tokens that are not learned."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import Document, line_at
from shardwise.lint.edit import Put
from shardwise.lint.finding import Hit, Severity, job_rule, loop_rule, training_rule
from shardwise.lint.model import blocks_for
from shardwise.lint.rules.program import (
    all_code,
    calls,
    known_values,
    tree_of,
    values_of,
    walk,
    within,
    words_of,
)
from shardwise.lint.schema import closest, misspelt, names, pattern, table
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.setup import ModelFacts, Setup
from shardwise.models.catalog import lookup

_OF_TORCH = ("Linear", "Embedding", "LayerNorm", "Conv1d", "ModuleList")
_FAMILIES: dict[str, str] = table("named_families")
_KINDS, _OF_FAMILY = table("class_families"), pattern("of_family")
_HAS_TEMPLATES = "LLaMA-Factory: data/template.py until ff6d4d12"
_TEMPLATES: dict[str, list[str]] = table("chat_templates")
_MODEL = ("model_name_or_path", "base_model", "model_name", "model_id", "model", "pretrained_model")
_LOADS = re.compile(r"(Model\w*|For[A-Z]\w*)\.from_pretrained$")
_CLASSES = ("transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap")
_TARGETS = {"target_modules": 'target_modules="all-linear", which is no list'}  # and what means all modules
_TARGETS |= {"lora_target_modules": "lora_target_linear: true", "lora_target": "lora_target: all"}
_OF_ENDS = {"lm_head", "embed_tokens", "wte", "embed_out"}  # which models of several families have
_SPLIT = r"\bNAME(?:[\"']\])?\.split\(|--NAME[\"'][^()]*\bnargs="  # a script makes a list of the text
_PAD = re.compile(r"(?<!config)\.pad_token(_id)?$")
_MASKED = re.compile(r"\[(-100|(\w+\.)?IGNORE\w*)\] \* |labels\W{0,4}\[[^\n\]=]*\] = (-100|\w*IGNORE)")
_PACKED = re.compile(r"group_texts|concatenated_examples|packing\s*=\s*True|// *(\w+\.)?block")
_LABELS = pattern("labels")  # what holds the labels, and the input ids that they are
_ANSWERS = re.compile("(?i)label|target|output|answer|response|summar|decoder")
_ENDED = re.compile(r"(?i)^(?!.*pad_token).*(eos|<\||</|eot_|end_tok|end_of|chat_template\()")
_ENDS_IDS = re.compile(r"(?i)eos|eot_|end_tok|end_of")  # of a row that is made of ids
_ANSWERED = re.compile(r"(?i)(answer|response|output|completion|target)['\"]?\]?(\.strip\(\))?\}")
_MASKS = re.compile(r"(?i)-100|ignore_index|masked_fill|loss_mask")
_PADS_WITH = re.compile(r"(?i)(?!.*label).*pad")  # a `label_pad_token_id` is -100
_PADS = pattern("pads")
_OTHER_MLM = pattern("other_mlm")
LEARNED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "gptj")  # a position past the last has no row
_SAME_LENGTH = pattern("same_length")  # what makes rows as long as each other, or may
_TOKENIZES = re.compile(r"(?is)(def|lambda) .*\btok\w*\(")
_ENDS = re.compile(rf"^(?!\s*#|.*pad_token).*({'|'.join(names('end_tokens'))})")  # of a row to train on


def named_models(setup: Setup) -> set[str]:
    """The models that scripts load, and that commands and files of arguments name."""
    found = list[Any]()
    for document in setup.of("training"):
        if document.syntax != "python":
            found += map(document.get, _MODEL)
            continue
        known = known_values(document, setup)
        for call in within(tree_of(document)):
            called, given = ast.unparse(call.func), words_of(call)
            loads = called.endswith("Trainer") or _LOADS.search(called)
            of = given.get("pretrained_model_name_or_path", given.get("model", next(iter(call.args), None)))
            found += [known.value(of)] if loads and of is not None else []
    return {one for one in found if isinstance(one, str) and "." * 3 not in one} - {""}


def has_no_spare_rows(document: Document, setup: Setup) -> bool:
    """Whether the named model's embedding has the tokens of its tokenizer alone, and no chat markers."""
    named = {str(document.get("model_name_or_path")), *named_models(setup)}
    return any(part.startswith(names("no_spare_rows")) for one in named for part in one.lower().split("/"))


def model_of(setup: Setup) -> ModelFacts | None:
    """The model of the setup; else the only one that the files name, if its family is certain."""
    if setup.model and setup.model.model_type:
        return setup.model
    named = {setup.model.name} if setup.model and _family(setup.model.name) else named_models(setup)
    found = {_family(name): name for name in named}
    if {*found} <= {""}:  # a folder of the user's own, loaded by the class of a family
        found = {_KINDS.get(name, ""): f"{name}{rest}" for name, rest in _OF_FAMILY.findall(all_code(setup))}
    kind = next(iter(found)) if len(found) == 1 else ""
    made = ModelFacts(name=found[kind], model_type=kind, model_types=(kind,)) if kind else None
    return made or setup.model


def _family(name: str) -> str:
    shape, last = lookup(name), name.rstrip("/").rpartition("/")[2].lower()
    if shape:
        return shape.model_type if shape.model_type in _FAMILIES else ""
    return next((kind for kind, sign in _FAMILIES.items() if re.search(sign, last)), "")


def foreign_blocks(key: Key, value: Any, model: ModelFacts) -> Iterator[Hit]:
    """Classes to wrap that are no blocks of the model."""
    known, guess = blocks_for(model)
    if known is None:
        return
    right = ",".join(known.blocks)
    fix = f"{right}, or remove it: this is the default" if right else "a class of the model's blocks"
    fix = f"a class of the model's blocks, such as {known.blocks[0]}" if guess and right else fix
    for name in value if isinstance(value, list) else str(value).split(","):
        what = f"no block of {model.name} is a {name!r}"
        if name in known.blocks or (guess and name.lower().startswith(guess.replace("_", ""))):
            continue
        if guess:
            what += f", which is {guess} by its name: accelerate does not find the class"
            yield Hit(key, what, fix, severity="warning")
        elif name not in known.classes and name not in _OF_TORCH:
            what += ": accelerate stops with `Could not find the transformer layer class`"
            yield Hit(key, what, fix, (Put(key, right),) if right and isinstance(value, str) else ())
        elif known.blocks:
            what += ": FSDP gathers by that class, so the blocks are not separate units"
            yield Hit(key, what, fix, severity="warning")


@training_rule("error", "accelerate/utils/dataclasses.py: set_auto_wrap_policy; fsdp_utils.py for FSDP2")
def fsdp_class_of_another_family(document: Document, setup: Setup) -> Iterator[Hit]:
    """A class to wrap that the model does not have stops accelerate."""
    places = [(*above, name) for above in ((), ("fsdp_config",)) for name in _CLASSES]
    texts = " ".join(one.text for one in setup.documents)
    wraps = re.search("auto_wrap|TRANSFORMER_BASED", texts) and not re.search("SIZE_BASED|NO_WRAP", texts)
    for key in places if wraps else ():
        value = document.get(*key)
        model = model_of(setup) if isinstance(value, str | list) else None
        if model and model.model_type and "$" not in str(value):  # blocks of experts are a choice here
            yield from (hit for hit in foreign_blocks(key, value, model) if hit.severity is None)


def targets_of(document: Document, setup: Setup) -> Iterator[tuple[Key, Any, int]]:
    """LoRA's targets, and where they are written."""
    if document.syntax != "python":
        for name in (one for one in _TARGETS if document.has(one)):
            value = document.get(name)
            split = name == "lora_target" or re.search(_SPLIT.replace("NAME", name), setup.scripts)
            listed = split and isinstance(value, str) and value != "all"  # LLaMA-Factory's word, and others'
            yield (name,), re.split(r"\s*,\s*", value) if listed else value, document.line((name,))
        return
    for call in calls(document, "LoraConfig", "get_peft_model"):
        known, given = known_values(document, setup), words_of(call)
        node = known.meant(given.get("target_modules", call))
        while isinstance(node, ast.Call) and ast.unparse(node.func) == "list" and node.args:
            node = known.meant(node.args[0])
        if "target_modules" in given and "target_parameters" not in given:
            yield ("target_modules",), known.value(node), getattr(node, "lineno", call.lineno)


@training_rule("error", "peft/tuners/tuners_utils.py: inject_adapter; run with PEFT 0.21")
def lora_targets(document: Document, setup: Setup) -> Iterator[Hit]:
    """PEFT stops where no target is a module of the model, and ignores single ones that are none."""
    for key, value, line in targets_of(document, setup):
        fix = _TARGETS[key[0]]
        if isinstance(value, str) and re.fullmatch(r"\w+", value) and value not in ("all", UNKNOWN):
            right = fix if closest(value, ["all-linear"]) else f'["{value}"]'
            what = f"{value!r} is text, a pattern that no full name of a module fits: PEFT stops"
            yield Hit(key, what, right, line=line)
        lasts = {str(one): str(one).rpartition(".")[2] for one in value} if isinstance(value, list) else {}
        model = model_of(setup) if lasts else None
        known, guess = blocks_for(model) if model else (None, None)
        parts = known.parts if known and known.parts else {*lasts.values()} - {"all-linear", "all_linear"}
        absent = [one for one, last in lasts.items() if last not in parts and not last.isdigit()]
        sure = setup.model is model and not guess  # else a name may mislead
        if absent and (sure or {*absent} >= lasts.keys() - _OF_ENDS):
            where = f"{model.name if model else 'a model'}{f' ({guess} by its name)' * bool(guess)}"
            what = f"no module of {where} is named {', '.join(absent)}: "
            some = "PEFT silently trains the others only" if len(absent) < len(lasts) else ""
            what += some or "PEFT stops, `not found in the base model`"
            ways = ", or ".join([fix, *(one for one in names("lora_modules") if one in parts)][:2])
            by_class = model and _OF_FAMILY.match(f"{model.name}(")
            maybe = some or guess or (setup.model and not setup.model.model_type and not by_class)
            yield Hit(key, what, ways, severity="warning" if maybe else None, line=line)


@training_rule("warning", "LLaMA-Factory: extras/constants.py, register_model_group(template=...)")
def template_of_another_family(document: Document, setup: Setup) -> Iterator[Hit]:
    """The tool has no such template, or the model does not know its tokens, and never sees its own end."""
    template, named = str(document.get("template")), str(document.get("model_name_or_path"))
    mine, other = _of_another(template, named)
    chats = document.has("finetuning_type") and (document.get("stage") != "pt" or template == "llama3")
    if other and chats:
        what = f"template {template} is another family's: {named} learns another end token than its own"
        yield Hit(("template",), what, f"template: {mine}, or the one of this model in LLaMA-Factory's list")
    own = template in names("templates") or "register_template" in setup.scripts
    near = None if own or not document.has("finetuning_type") else closest(template, names("templates"))
    if near and document.has("template"):
        what, sure = f"ValueError `Template {template} does not exist`", misspelt(template, near)
        what = f"LLaMA-Factory has no such template: {what}{'' if sure else ', unless yours is newer'}"
        severity: Severity = "error" if sure else "warning"
        yield Hit(("template",), what, f"did you mean `{mine or near}`?", (), severity, source=_HAS_TEMPLATES)


def _of_another(template: str, model: str) -> tuple[str, bool]:
    """The template of the model's family, as its name shows it, and whether this one is another family's."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    mine = next((one for one, (models, _) in _TEMPLATES.items() if re.match(models, last)), "")
    known = any(re.match(templates, template) for _, templates in _TEMPLATES.values())
    return mine, bool(mine and known and not re.match(_TEMPLATES[mine][1], template))


@job_rule("warning", "the model's tokenizer_config.json: chat_template, eos_token")
def job_template_of_another_family(document: Document, _: Setup) -> Iterator[Hit]:
    """The chat template of a job ends answers with a token that the model does not know."""
    template, model = document.get("data", "chat_template"), str(document.get("model", "source"))
    if template == "llama-3" and _of_another("llama3", model)[1]:
        what = f"chat_template {template} is another family's: {model} learns another end token than its own"
        yield Hit(("data", "chat_template"), what, "remove it: the model's own template is taken then")


@job_rule("error", "the model's config.json: max_position_embeddings")
def job_rows_longer_than_positions(document: Document, _: Setup) -> Iterator[Hit]:
    """Rows of a job are longer than the model was trained for; with learned positions the run stops."""
    length, model = document.number("data", "sequence_length") or 0, document.section("model")
    shape = lookup(str(model.get("source")))
    learned = shape is not None and shape.model_type in LEARNED
    most = shape.positions if shape and (learned or model.get("weights") != "random") else None
    if shape and most and length > most and not model.get("config"):
        stops = ", and the run stops" * learned
        what = f"sequence_length is {length:g}: {model['source']} has {most} positions{stops}"
        yield Hit(("data", "sequence_length"), what, f"{most}", severity=None if learned else "warning")


def _padded_with_end(program: ast.Module, model: str) -> int | None:
    """The line that makes the end token the pad token, if no other line makes another."""
    without = any(part.startswith(names("no_pad_token")) for part in model.lower().split("/"))
    tests = [one for one in walk(program, ast.If) if "pad" in ast.unparse(one.test)]
    maybe = {node for one in tests for node in ast.walk(one)}  # `if tokenizer.pad_token is None`
    found = [one for one in walk(program, ast.Assign) if _PAD.search(ast.unparse(one.targets[0]))]
    ends = [one for one in found if re.search(r"\.eos_token(_id)?$", ast.unparse(one.value))]
    sure = ends and len(ends) == len(found) and (without or not {*ends} <= maybe)
    return ends[0].lineno if sure else None


@training_rule("warning", "transformers/data/data_collator.py: DataCollatorForLanguageModeling, -100")
def end_token_is_not_learned(document: Document, setup: Setup) -> Iterator[Hit]:
    """The collator masks every pad token, so a pad token that is the end token hides the end of each row."""
    made = [call for call in calls(document, "DataCollatorForLanguageModeling") if _mlm(call) is False]
    trains = any(one.rpartition(".")[2] in names("trainers") for one in document.uses)
    if not made or not trains or _PACKED.search(document.text):
        return
    line = _padded_with_end(tree_of(document), next(iter(named_models(setup)), ""))
    others = [n for n, row in enumerate(document.text.splitlines(), 1) if _ENDS.search(row)]
    if line and others:
        what = "the pad token is the end token, and DataCollatorForLanguageModeling masks both in labels: "
        at = document.at(others[0])
        what += f"the end of each row (line {at}) is not learned, and the model does not stop"
        fix = "another pad token, such as unk_token; or labels of your own and DataCollatorForSeq2Seq"
        yield Hit((), what, fix, line=line)


def _answer(document: Document, node: ast.AST) -> str:
    """The field, in braces, with which the text of a row ends, or its hand-made labels; else empty."""
    known = values_of(document)
    match node:
        case ast.JoinedStr(values=[_, _, *_, ast.FormattedValue(value=last)]):
            return f"{{{ast.unparse(_zipped(known.flow.statement(node), last))}}}"
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            text = str(known.value(template))
            return text[text.rfind("{") :].rstrip() if text.count("{") > 1 else ""
        case ast.Assign(
            targets=[to],
            value=ast.BinOp(left, ast.Add(), ast.Subscript(part, ast.Constant("input_ids")))
            | ast.BinOp(left, ast.Add(), ast.Attribute(part, "input_ids")),
        ):
            made = known.meant(part) if "label" in ast.unparse(to) and "-100" in ast.unparse(left) else None
            field_or_text: Any = made.args[0] if isinstance(made, ast.Call) and made.args else None
            match field_or_text:
                case ast.JoinedStr(values=[ast.FormattedValue(value=field)]) | (ast.Subscript() as field):
                    return f"{{{ast.unparse(field)}}}"
    return ""


def _zipped(statement: ast.AST, last: ast.expr) -> ast.expr:
    """`rows['answer']` for the `y` of `for x, y in zip(rows['question'], rows['answer'])`."""
    name = re.split(r"\W", ast.unparse(last))[0]
    for one in (one for one in ast.walk(statement) if isinstance(one, ast.comprehension)):
        match one:
            case ast.comprehension(target=ast.Tuple(elts=to), iter=ast.Call(ast.Name("zip"), args=of)):
                return dict(zip(map(ast.unparse, to), of, strict=False)).get(name, last)
    return last


@training_rule("warning", "tokenizers of these models add no end token; generate() waits for one")
def answers_have_no_end(document: Document, setup: Setup) -> Iterator[Hit]:
    """A Trainer or a loop learns rows as they are: without an end token after the answer none is learned."""
    code, models = all_code(setup), named_models(setup)
    plain = any({"Trainer", "transformers.Trainer"} & one.uses for one in setup.of("training"))
    plain |= ".backward(" in code and "CausalLM" in code and "SFTTrainer" not in code
    lasts = [one.lower().rstrip("/").rpartition("/")[2] for one in models]
    if not (plain and lasts and all(last.startswith(names("adds_no_end")) for last in lasts)):
        return
    rows, flow = [row for row in code.split("\n") if "pad_token" not in row], values_of(document).flow
    ends = any(map(_ENDED.search, rows)) or _PACKED.search(code)
    tokenizes = re.search(r"(?i)(?<![\w.])(self\.)?tok\w*\(([^()]*(text|prompt|full|\))|\[f')", code)
    tokenizes = None if ends else tokenizes
    by_hand = not any(map(_ENDS_IDS.search, rows))
    nodes = (one for one in ast.walk(tree_of(document)) if isinstance(one, ast.expr | ast.Assign))
    for one in nodes:
        labels = isinstance(one, ast.Assign)
        row = by_hand if labels else tokenizes and isinstance(flow.statement(one), ast.Assign | ast.Return)
        if not row or not _ANSWERED.search(_answer(document, one)):
            continue
        if ".generate(" not in "".join(map(ast.unparse, [*flow.scopes(one)][:1])):
            what = "the row ends with its answer, and no line adds an end token: the model does not stop"
            fix = "+ tokenizer.eos_token at the end of the row"
            fix = "+ [tokenizer.eos_token_id] at the end of input ids and labels" if labels else fix
            yield Hit((), what, fix, line=one.lineno)
            return


@loop_rule("error", "transformers/data/data_collator.py: DataCollatorForLanguageModeling; run with 5.23")
def collator_replaces_labels(document: Document, _: Setup) -> Iterator[Hit]:
    """The collator makes labels of the input ids: the script's own, with -100 for prompts, are lost."""
    others = re.search(r"DataCollator(?!ForLanguageModeling)\w+\(", document.text)
    causal = "ForCausalLM" in document.text and not _OTHER_MLM.search(document.text)
    for call in calls(document, "DataCollatorForLanguageModeling"):
        if causal and _mlm(call) is True:
            given = call.args[1:] or "mlm=" in ast.unparse(call)
            what = f"`mlm` is True{'' if given else ' by default'}: some words are masked, and "
            what += "only they are labels, which a causal model is to predict from the words before"
            yield Hit((), what, "mlm=False", severity="warning", line=call.lineno)
        if _mlm(call) is False and _MASKED.search(document.text) and not others:
            what = "this collator makes labels of the input ids: those with -100 for prompts are lost, or "
            what += "the run stops at rows of different lengths: ValueError `Unable to create tensor`"
            yield Hit((), what, "DataCollatorForSeq2Seq(tokenizer, padding=True)", line=call.lineno)


def _mlm(call: ast.Call) -> Any:
    """Whether a collator masks words, as it does by default; neither True nor False if a run decides."""
    given = [one.value for one in call.keywords if one.arg in ("mlm", None)] + call.args[1:2]
    return next((getattr(one, "value", None) for one in given), True)


@loop_rule("warning", "transformers/loss/loss_utils.py: ForCausalLMLoss ignores -100 only")
def labels_include_padding(document: Document, setup: Setup) -> Iterator[Hit]:
    """The loss counts every label but -100, so also those of pad tokens."""
    for call in calls(document, "pad_sequence") if not _MASKS.search(document.text) else ():
        filled = [one.value for one in call.keywords if one.arg == "padding_value"] + call.args[2:]
        if "label" in ast.unparse(call.args[:1][0]) and any(map(_PADS_WITH.match, map(ast.unparse, filled))):
            what = "the labels are padded with the pad token: the loss also trains on it"
            yield Hit((), what, "padding_value=-100", line=call.lineno)
    masked = re.search("(?m)^[^#\n]*(-100|DataCollator)", document.text) is not None
    made = (call for one in setup.of("training") for call in calls(one, "DataCollatorForLanguageModeling"))
    masked = masked or False in map(_mlm, made)  # which makes labels of its own, without pad tokens
    if (
        document.syntax == "python"
        and (given := _LABELS.search(document.text))
        and _PADS.search(document.text)
        and not masked
    ):
        holder, ids = given[1], given[2] or ""
        apart = (holder and ids and holder != ids) or _ANSWERS.search(ids)  # tokenised on their own
        what = "the labels are padded with the pad token" if apart else "the labels are the padded input ids"
        fix = "-100 in the labels for each pad token"
        fix = fix if apart else "labels.masked_fill(attention_mask == 0, -100)"
        what += ": the loss also trains on pad tokens"
        yield Hit((), what, fix, line=line_at(document.text, given.start()))


@training_rule("error", "transformers/tokenization_utils_base.py: Asking to pad but the tokenizer does not")
def no_pad_token(document: Document, setup: Setup) -> Iterator[Hit]:
    """A tokenizer without a pad token stops where it is asked to pad."""
    made_here = re.search(r"Tokenizer(Fast)?\.from_pretrained\(", setup.scripts)  # else elsewhere, with one
    pads = _PADS.search(document.text) if made_here else None
    models = (named_models(setup) or {str(document.get("model_name_or_path"))}) if pads else set()
    parts = [one.lower().split("/") for one in models if document.syntax == "python"]
    without = parts and all(any(one.startswith(names("no_pad_token")) for one in each) for each in parts)
    if pads and without and "pad_token" not in setup.scripts:
        what = "this model's tokenizer has no pad token: "
        what += "ValueError `Asking to pad but the tokenizer does not have a padding token`"
        fix = "tokenizer.pad_token = tokenizer.eos_token"
        yield Hit((), what, fix, line=line_at(document.text, pads.start()))


@training_rule("error", "transformers/data/data_collator.py: default_data_collator; run with 5.23")
def rows_are_not_padded(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without a collator the Trainer stacks rows as they are: those of different lengths stop it."""
    code = all_code(setup)
    alone = setup.training("per_device_train_batch_size") == 1
    if document.syntax != "python" or alone or _SAME_LENGTH.search(code):
        return
    maps = (values_of(document).meant(one) for call in calls(document, "map") for one in call.args[:1])
    tokenizes = any(_TOKENIZES.match(ast.unparse(one)) for one in maps)
    for call in calls(document, "Trainer", "Seq2SeqTrainer") if tokenizes else ():
        given = {one.arg for one in call.keywords}
        pads = {"tokenizer", "processing_class"} & given and not _LABELS.search(code)
        own = ast.unparse(call.func) not in document.uses or len(call.args) > 2
        if "train_dataset" in given and not (own or pads or {"data_collator", None} & given):
            what = "no collator pads these rows: ValueError `expected sequence` or `Unable to create tensor`"
            fix = "data_collator=DataCollatorForSeq2Seq(tokenizer); or padding='max_length' in the tokenizer"
            yield Hit((), what, fix, line=call.lineno)
