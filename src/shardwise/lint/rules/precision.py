"""Number formats: bf16, fp16, autocast, and the format in which gradients are accumulated and sent."""

import ast
import re
from collections.abc import Iterator

from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, Severity, rule, training_rule
from shardwise.lint.rules.accelerate import DS, FSDP
from shardwise.lint.rules.devices import gpu_without_bf16
from shardwise.lint.rules.program import calls, code_of, known_values, tree_of, values_of
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.schema import pattern
from shardwise.lint.setup import Setup

BF16, FP16, AUTOCAST = ("bf16", "enabled"), ("fp16", "enabled"), ("torch_autocast", "enabled")
_HALF = ("torch.float16", "torch.half", "'float16'")
_MASTERS = re.compile(r"(?i)lora|peft|bitsandbytes|load_in_|\.float\(\)|float32|deepspeed|fsdp|fully_shard")
_ADAPTERS = re.compile("(?i)lora|peft")
_STEPS_ITSELF = re.compile(r"\.backward\(\)(?:.*\n)*? *[\w.]+\.step\(")
_EXACT, _IN_BF16 = pattern("exact_steps"), re.compile(r"torch\.bfloat16\b|'bfloat16'|\.bfloat16\(\)")
_OR_FP32 = re.compile(r"torch\.bfloat16 if [^,()\n]+ else torch\.float32")
_OF_OTHERS = re.compile(r"(reduce|buffer)_dtype=torch\.float32|\bref\w*\.requires_grad_\(False\)")
_FINE = 1e-4  # learning rates up to it are those of fine-tuning: bf16 keeps no such step of most weights
_TORCH = {"torch.bfloat16": "bf16", "bfloat16": "bf16", "torch.float16": "fp16", "float16": "fp16"}


@rule("error", "deepspeed/runtime/config.py: bfloat16 and fp16 modes cannot be simultaneously enabled")
def bf16_and_fp16(document: Document, _: Setup) -> Iterator[Hit]:
    """bf16 and fp16 are both on: DeepSpeed stops with an AssertionError."""
    if document.on(*BF16) and document.on(*FP16):
        fix = "keep bf16 (Ampere and later), which needs no loss scaling"
        yield Hit(FP16, fix=fix, changes=(Put(FP16, False),))


def _model_precision(setup: Setup) -> tuple[str, str] | None:
    """(precision, evidence) of the model, if a file or the catalog gives it."""
    if setup.model is not None and setup.model.precision is not None:
        return setup.model.precision, f"{setup.model.name} is published in {setup.model.precision}"
    loaded = _TORCH.get(str(setup.training("torch_dtype", "dtype")))
    return (loaded, f"the script loads the model in {loaded}") if loaded else None


@rule("warning", "deepspeed/runtime/engine.py: get_data_types, communication_data_type; run with 0.19.8")
def no_mixed_precision(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed's default is fp32: it sends half-precision gradients so; stage 0 has no fp32 masters."""
    named = [document.get(name, "enabled") for name in ("bf16", "fp16", "torch_autocast", "bfloat16")]
    launched = {doc.get("mixed_precision") for doc in setup.of("accelerate")}
    asked = any(setup.training(name) in (True, AUTO) or name in launched for name in ("bf16", "fp16"))
    if any(value in (True, AUTO) for value in named) or (setup.hugging_face and asked) or document.bare:
        return  # on, or Accelerate adds the section
    kept = "gradients are accumulated and sent in fp32, twice the bytes, without a check for overflow"
    if stage_of(document) == 0:
        kept = "AdamW updates the half-precision weights without fp32 masters: small updates are lost"
    known = _model_precision(setup)
    precision, evidence = known or ("bf16", "")
    if known:
        what = f"{evidence}, and neither `bf16` nor `fp16` is on: {kept}"
    else:
        what = f"neither `bf16` nor `fp16` is on: fp32 needs twice the memory; for a model in bf16, {kept}"
    changes = (Put((precision, "enabled"), True),) if known else ()
    severe = known and not setup.hugging_face
    old = not known and any(map(gpu_without_bf16, setup.of("training")))
    fix = f'"{"fp16" if old else precision}": {{"enabled": true}}'
    fix += ", at ZeRO-1, since the job's GPUs have no bf16" * bool(old)
    yield Hit((), what, fix, changes, "error" if severe else "warning")


@rule("warning", "largest fp16 number: IEEE 754", versions="")
def fp16_for_a_bf16_model(document: Document, setup: Setup) -> Iterator[Hit]:
    """A model trained in bf16 has activations that fp16 cannot hold."""
    known = _model_precision(setup) or _by_name(setup)
    auto = document.get(*FP16) == AUTO and setup.training("fp16") is True
    asked = document.on(*FP16) or (auto and setup.training("bf16") is not True)  # else the Trainer stops
    if known and known[0] == "bf16" and asked:
        what = f"{known[1]}; its values can exceed fp16's largest number, 65,504: skipped steps, then NaN"
        fix = "bf16 in the Trainer's arguments" if auto else '"bf16": {"enabled": true}'
        yield Hit(FP16, what, f"{fix} instead", () if auto else (Put(FP16, False), Put(BF16, True)))


def _by_name(setup: Setup) -> tuple[str, str] | None:
    """The same of a model whose id begins like a family that is published in bf16."""
    name = setup.model.name if setup.model else ""
    known = pattern("published_in_bf16").match(name.lower().rpartition("/")[2])
    return ("bf16", f"{name} is published in bf16 (by its name)") if known else None


@rule("error", "deepspeed/runtime/engine.py 0.19.8: backward scales the loss for ZeRO's optimizers only")
def fp16_needs_zero(document: Document, _: Setup) -> Iterator[Hit]:
    """At stage 0 gradients are divided by a loss scale that the loss was never multiplied with."""
    if document.on(*FP16) and stage_of(document) == 0:
        yield Hit(FP16, fix="`stage`: 1, or bf16")


@rule("error", "deepspeed/runtime/precision_config.py: _validate_dynamic_loss_scale_params")
def loss_scale(document: Document, _: Setup) -> Iterator[Hit]:
    """A fixed loss scale does not adapt; a window or a minimum of 0 stops DeepSpeed."""
    key = ("fp16", "loss_scale")
    scale = document.number(*key)
    if not document.on(*FP16):
        return
    if scale:
        what = f"the loss scale stays at {scale:g}: it does not adapt when gradients overflow or vanish"
        yield Hit(key, what, "0 adapts it", (Put(key, 0),), "warning")
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        value = document.number("fp16", name)
        if value is not None and value <= 0:
            what = f"{value:g} stops DeepSpeed: it must be above 0"
            yield Hit(("fp16", name), what, changes=(Drop(("fp16", name)),))


@rule("note", "deepspeed/runtime/engine.py: get_data_types")
def accumulates_in_bf16(document: Document, _: Setup) -> Iterator[Hit]:
    """Gradients of several micro-batches are accumulated in the model's format by default."""
    steps, dtype = document.number("gradient_accumulation_steps") or 1, ("data_types", "grad_accum_dtype")
    sharded = document.on(*BF16) and stage_of(document) in (2, 3)
    if sharded and steps > 1 and document.get(*dtype) is None:
        what = f"{steps:g} micro-batches are accumulated in bf16, which has 8 bits of mantissa"
        fix = '"data_types": {"grad_accum_dtype": "fp32"}: the same traffic, 2 bytes more per parameter'
        yield Hit(("gradient_accumulation_steps",), what, fix, (Put(dtype, "fp32"),))


@rule("warning", "deepspeed/runtime/engine.py: communication_data_type")
def bf16_sent_as_fp16(document: Document, _: Setup) -> Iterator[Hit]:
    """bf16 gradients are converted to fp16 for sending: above 65,504 they become infinite."""
    key = ("communication_data_type",)
    if document.on(*BF16) and document.get(*key) == "fp16":
        yield Hit(key, fix="remove it: bf16 is sent as bf16", changes=(Drop(key),))


@rule("error", "deepspeed/ops/csrc/quantization/pt_binding.cpp: ds_swizzle_quant casts to __half*")
def quantized_gradients_are_fp16(document: Document, _: Setup) -> Iterator[Hit]:
    """ZeRO++'s kernel takes the bits of bf16 and fp32 gradients for fp16: training goes wrong silently."""
    key, sent = ("zero_optimization", "zero_quantized_gradients"), document.get("communication_data_type")
    if document.on(*key) and (sent or document.get(*FP16)) not in ("fp16", True, AUTO):
        yield Hit(key, fix='remove it, or train with "fp16": {"enabled": true}', changes=(Drop(key),))


@training_rule("error", "accelerate/utils/dataclasses.py: set_mixed_precision", versions="accelerate<2")
def precision_of_the_script(document: Document, setup: Setup) -> Iterator[Hit]:
    """The script's precision wins over Accelerate's file, silently, and stops at another in DeepSpeed's."""
    asked, loaded = document.get("mixed_precision"), document.get("torch_dtype") or document.get("dtype")
    key = "mixed_precision" if asked else next((one for one in ("bf16", "fp16") if document.on(one)), "")
    asked = asked or key or ("bf16" if str(loaded).endswith("bfloat16") else None)
    other = {"bf16": "fp16", "fp16": "bf16"}.get(asked or "", "")
    known = _by_name(setup)
    if asked == "fp16" and known and document.syntax == "python" and not setup.of("deepspeed"):
        what = f"{known[1]}; its values can exceed fp16's largest number, 65,504: skipped steps, then NaN"
        yield Hit((key or "mixed_precision",), what, "bf16, on Ampere and later", severity="warning")
    for config in setup.documents if document.syntax == "python" and other else ():
        what, fix = f"{asked} here, and {other} in {config.name}: ", "the same in both"
        if config.get("mixed_precision") == other and config is not document:
            used = "the model's values can exceed fp16's largest number, 65,504"
            severity: Severity | None = None if key else "warning"
            what += f"{asked} is used, and the file's silently is not" if key else used
            where = (key or ("torch_dtype" if document.has("torch_dtype") else "dtype"),)
            yield Hit(where, what, fix, severity=severity)
        elif config.kind == "deepspeed" and config.on(other, "enabled") and key == "mixed_precision":
            yield Hit((key,), f"{what}Accelerator stops with a ValueError", fix)


@training_rule("error", "torch/amp/grad_scaler.py: unscale_; accelerate/accelerator.py: clip_grad_norm_")
def fp16_needs_fp32_weights(document: Document, setup: Setup) -> Iterator[Hit]:
    """fp16's gradients have a loss scale: it is not taken from those of fp16 weights, nor before clipping."""
    text, known, files = document.text, values_of(document), setup.of("accelerate")
    said = [document, *(() if document.has("mixed_precision") or document.has("bf16") else files)]
    asked = document.on("fp16") or any(one.get("mixed_precision") == "fp16" for one in said)
    others = setup.of("deepspeed") or any("_config" in one.text for one in files)
    scaler = re.search(r"^(?!\s*(from|import)).*\bGradScaler\(", text, re.MULTILINE)
    program = "" if others else code_of(document)
    trains = "" if _MASTERS.search(text) else program
    for call in calls(document, "from_pretrained") if trains else ():
        named = re.search(rf"(?m)^ *([\w.]+) = {re.escape(ast.unparse(call))}(.*)$", trains)
        name, after = (named[1], named[2]) if named else ("", "")
        given = [one for one in call.keywords if "dtype" in str(one.arg)]
        half = any(ast.unparse(known.meant(one.value)) in _HALF for one in given) or ".half()" in after
        used = name and re.search(rf"\b{name}\.parameters\(|Trainer\((.*\bmodel=)?{name}[,)]", trains)
        if half and used and (asked or scaler):
            what = "the weights are fp16: the first step stops with `Attempting to unscale FP16 gradients`"
            fix = (
                f"remove {given[0].arg if given else '.half()'}: fp16 mixed precision needs fp32 weights; or "
            )
            yield Hit((), what, f"{fix}bf16 for both", line=given[0].value.lineno if given else call.lineno)
        elif half and used and _STEPS_ITSELF.search(trains):
            what = "the optimizer updates fp16 weights: small gradients become 0, "
            what += "and Adam's eps 1e-8 does, too"
            yield Hit((), what, "fp32 weights and autocast, or bf16", severity="warning", line=call.lineno)
    kept, text = re.search(r"modules_to_save=(?!None)", program), _ADAPTERS.sub("", text)
    on = asked or (scaler and "enabled=" not in text)  # an adapter is kept in fp32, and such a module is not
    for name, line, _ in _models_in_bf16(document, setup) if on and (kept or trains) else ():
        used = re.search(rf"\b{name}\.parameters\(|Trainer\((.*\bmodel=)?{name}[,)]", program)
        if used and not _MASTERS.search(text):
            what = "the weights are bf16, and fp16 scales the gradients: on a GPU the first step stops with "
            what += "NotImplementedError, `_amp_foreach_non_finite_check_and_unscale_cuda`"
            source = "aten/src/ATen/native/cuda/AmpKernels.cu; pytorch issue 127176"
            yield Hit((), what, "bf16=True instead of fp16; or fp32 weights", line=line, source=source)
    program = program if asked and not scaler else ""
    scaled = "Accelerator(" in program and "unscale" not in program
    for call in calls(document, "clip_grad_norm_", "clip_grad_value_") if scaled else ():
        if re.fullmatch(r"((torch\.)?nn\.)?(utils\.)?\w+", by := ast.unparse(call.func)):
            what = f"`{by}` clips gradients times fp16's loss scale, 65,536 at first: almost nothing is left"
            yield Hit((), what, f"accelerator.{by.rpartition('.')[2]}", line=call.lineno)


def _holds(test: ast.expr, document: Document, setup: Setup) -> bool:
    """Whether a condition holds on a GPU, or with the file's value: `config["precision"] == "bf16"`."""
    match held := known_values(document, setup).meant(test):
        case ast.Compare(left=ast.Subscript(slice=ast.Constant(value=str(key))), ops=[ast.Eq()]):
            return bool(setup.training(key) == getattr(held.comparators[0], "value", held))
        case ast.Constant(value=True):
            return True
    return "cuda" in ast.unparse(test)


def _constant(node: ast.expr, document: Document, setup: Setup) -> ast.AST:
    """What an expression stands for, also where another file of the setup defines its name; on a GPU."""
    made = known_values(document, setup).meant(node)
    if isinstance(made, ast.Name):
        others = (part for one in setup.of("training") for part in tree_of(one).body)
        given = [one.value for one in others if isinstance(one, ast.Assign) and _to(one) == made.id]
        made = given[0] if len(given) == 1 else made
    if isinstance(made, ast.IfExp) and _holds(made.test, document, setup):
        return _constant(made.body, document, setup)
    return made


def _to(node: ast.Assign) -> str:
    return ast.unparse(node.targets[0])


def _models_in_bf16(document: Document, setup: Setup) -> Iterator[tuple[str, int, bool]]:
    """The names of models with bf16 weights: the line, and whether they are pretrained."""
    loads = {*calls(document, "from_pretrained")}
    for one in ast.walk(tree_of(document)):
        if not isinstance(one, ast.Assign | ast.Expr) or not isinstance(one.value, ast.Call):
            continue
        inner = [part for part in ast.walk(one.value) if part in loads and isinstance(part, ast.Call)]
        given = [word.value for call in inner for word in call.keywords if "dtype" in str(word.arg)]
        said = " ".join(ast.unparse(_constant(word, document, setup)) for word in given)
        said = _OR_FP32.sub("", said)  # a condition that is not known
        moved = re.search(r"\.(to|bfloat16)\([^()]*\)$", ast.unparse(one.value))
        name = _to(one) if isinstance(one, ast.Assign) else ast.unparse(one.value).partition(".")[0]
        if _IN_BF16.search(said + (moved[0] if moved else "")):
            yield name, one.lineno, bool(inner)


def _steps_plainly(setup: Setup) -> bool:
    """Whether what launches a Trainer or an Accelerator is known, and gives no engine with fp32 weights."""
    texts = "\n".join(one.text for one in setup.of("training"))
    files, plain = setup.of("accelerate"), re.search(r"\btorchrun\b|--multi_gpu|\bpython3? \S+\.py", texts)
    sharded = setup.of("deepspeed") or any(one.section(DS) or one.section(FSDP) for one in files)
    return not (sharded or re.search("(?i)fsdp|config_file|zero_stage", texts)) and bool(files or plain)


@training_rule("warning", "torch/optim/adamw.py: addcdiv_ on the weights; bf16 has 8 bits of mantissa")
def bf16_rounds_updates_away(document: Document, setup: Setup) -> Iterator[Hit]:
    """A step of Adam is about the learning rate: bf16 rounds it away at weights 512 times as large."""
    program = _OF_OTHERS.sub("", _OR_FP32.sub("torch.bfloat16", code_of(document)))
    models = [] if _EXACT.search(program) else [*_models_in_bf16(document, setup)]
    known = known_values(document, setup)
    managed = re.search(r"Trainer\(|Accelerator\(", program)
    for name, line, pretrained in models if not managed or _steps_plainly(setup) else ():
        optimizers = calls(document, "Adam", "AdamW")
        words = {one: {word.arg: word.value for word in one.keywords} for one in optimizers}
        firsts = {one: one.args[0] if one.args else given.get("params") for one, given in words.items()}
        own = [one for one, first in firsts.items() if first and ast.unparse(first) == f"{name}.parameters()"]
        rates = [words[one]["lr"] for one in own[:1] if "lr" in words[one]]
        rate = known.value(_constant(rates[0], document, setup)) if rates else 0.001
        if not own and re.search(rf"Trainer\((.*\bmodel=)?{name}[,)](?!.*optimizers=)", program):
            asked = document.has("learning_rate") or setup.training("learning_rate") is not None
            rate = setup.training("learning_rate") if asked else 5e-5
            if not re.fullmatch("adamw_torch(_fused)?", str(setup.training("optim") or "adamw_torch")):
                continue
        elif not own:
            continue
        known_rate = isinstance(rate, int | float)
        if rate <= _FINE if known_rate else pretrained:
            step, say = (rate, "") if known_rate else (2e-5, ", say,")
            what = f"AdamW updates bf16 weights: a step of{say} {step:g} is rounded away at weights above "
            what += f"{512 * step:.2g}"
            yield Hit((), what, "fp32 weights, with bf16 for autocast or MixedPrecision", line=line)
            return
