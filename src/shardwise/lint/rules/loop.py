"""Training loops of one's own."""

import re
from collections.abc import Iterator

from shardwise.lint.document import Document, line_at
from shardwise.lint.finding import DEEPSPEED, Hit
from shardwise.lint.rules.training import distributed, training_rule
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.schema import names
from shardwise.lint.script_text import STEPPED, UNDEFINED
from shardwise.lint.setup import Setup

_NO_PAD_TOKEN = names("no_pad_token")
_DIVIDED = re.compile(r"[Ss]ampler|split_dataset_by_node|\.shard\(|rank\s*::|num_replicas|\.prepare\(")
_LABELS = re.compile(r"labels[\"']?\]?\s*=\s*[\w.]*(input_ids|\[[\"']input_ids[\"']\])(\.(clone|copy)\(\))?")
_PADS = re.compile(r"padding\s*=\s*(True|[\"'](max_length|longest)[\"'])")


@training_rule("error", "run with 0.19.8 at stages 0, 2 and 3", versions=DEEPSPEED)
def optimizer_outside_engine(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed's engine steps its own optimizer and schedule, at the end of an accumulation."""
    stepped = document.get(STEPPED)
    if stepped is not None and stepped.given:
        what = f"`{stepped.optimizer}` was given to DeepSpeed: under ZeRO its parameters have no gradients, "
        what += "and nothing is trained, without an error"
        fix = f"{stepped.engine}.step(), which steps the optimizer that DeepSpeed made from it"
        yield Hit((STEPPED,), what, fix)
    elif stepped is not None:
        what = f"`{stepped.optimizer}.step()` bypasses the engine: it steps at every micro-batch, without a "
        what += "learning-rate schedule, or stops if ZeRO-2 accumulates gradients"
        yield Hit((STEPPED,), what, f"{stepped.engine}.step()", severity="warning")


@training_rule("error", "engine.py: _configure_zero_optimizer; run with 0.19.8", versions=DEEPSPEED)
def no_optimizer(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed trains only with an optimizer of the file or of the script."""
    trains = "deepspeed.initialize" in document.uses and ".backward(" in document.text
    passed = {"deepspeed.initialize(optimizer)", "deepspeed.initialize(**)"} & document.uses
    for config in setup.of("deepspeed") if trains and not passed else ():
        stage = stage_of(config)
        when = f"`zero stage {stage} requires an optimizer`" if stage in (1, 2) else "the first backward"
        what = f"neither {config.name} nor deepspeed.initialize gives an optimizer: DeepSpeed stops at {when}"
        fix = f'"optimizer": {{"type": "AdamW", "params": {{"lr": 2e-5}}}} in {config.name}, or in the call'
        if not config.section("optimizer"):
            yield Hit(("initialize",), what, fix)


@training_rule("warning", "the language: NameError")
def undefined_name(document: Document, _: Setup) -> Iterator[Hit]:
    """A name is used that the script neither defines nor imports."""
    if document.has(UNDEFINED):
        said = ", ".join(f"`{name}`" for name in document.get(UNDEFINED))
        fix = "define it" + "; in several processes with a DistributedSampler" * ("loader" in said)
        yield Hit((UNDEFINED,), f"no line defines {said}: NameError where it is used", fix)


@training_rule("error", "transformers/tokenization_utils_base.py: Asking to pad but the tokenizer does not")
def no_pad_token(document: Document, _: Setup) -> Iterator[Hit]:
    """A tokenizer without a pad token stops where it is asked to pad."""
    model, pads = str(document.get("model_name_or_path")).lower(), _PADS.search(document.text)
    without = any(part.startswith(_NO_PAD_TOKEN) for part in model.split("/"))
    if document.syntax == "python" and pads and without and "pad_token" not in document.text:
        what = "this model's tokenizer has no pad token: ValueError `Asking to pad but the tokenizer does "
        what += "not have a padding token`"
        yield Hit(
            (), what, "tokenizer.pad_token = tokenizer.eos_token", line=line_at(document.text, pads.start())
        )


@training_rule("warning", "transformers/loss/loss_utils.py: ForCausalLMLoss ignores -100 only")
def labels_include_padding(document: Document, _: Setup) -> Iterator[Hit]:
    """The loss counts every label but -100, so also those of pad tokens."""
    given, masked = _LABELS.search(document.text), re.search("-100|DataCollator", document.text)
    if document.syntax == "python" and given and _PADS.search(document.text) and not masked:
        what = "the labels are the padded input ids: the loss also trains on pad tokens"
        yield Hit(
            (),
            what,
            "labels.masked_fill(attention_mask == 0, -100)",
            line=line_at(document.text, given.start()),
        )


@training_rule("warning", "torch/utils/data: a DataLoader knows nothing of other processes")
def no_sampler(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without a DistributedSampler all processes train on the same rows."""
    own = {"deepspeed.initialize", "deepspeed.initialize(training_data)"} & document.uses
    loads = re.search(r"\bDataLoader\(", document.text)
    undivided = own == {"deepspeed.initialize"} and not _DIVIDED.search(document.text)
    if loads and undivided and distributed(setup):
        what = "nothing here divides the rows: every process trains on all of them"
        fix = "DataLoader(..., sampler=DistributedSampler(rows)), or training_data= in deepspeed.initialize"
        yield Hit((), what, fix, line=line_at(document.text, loads.start()))
