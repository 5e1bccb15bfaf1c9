"""FSDP in Accelerate's file."""

from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit
from shardwise.lint.rules.accelerate import FSDP, accelerate_rule, kind_of
from shardwise.lint.rules.families import foreign_blocks, model_of
from shardwise.lint.schema import table
from shardwise.lint.setup import Setup

_ONLY_FSDP1: dict[str, str] = table("only_fsdp1")
_PLUGIN = "accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin.__post_init__"


@accelerate_rule("warning", _PLUGIN)
def fsdp_version(document: Document, _: Setup) -> Iterator[Hit]:
    """The default is FSDP1."""
    version = document.number(FSDP, "fsdp_version") or document.number(FSDP, "version")
    if version is None and document.section(FSDP) and kind_of(document) == "FSDP":
        what = "accelerate's default is still FSDP1, which transformers is about to drop"
        yield Hit((FSDP,), what, "fsdp_version: 2 (`accelerate to-fsdp2` converts the other keys)")


@accelerate_rule("warning", _PLUGIN)
def fsdp1_key_with_fsdp2(document: Document, _: Setup) -> Iterator[Hit]:
    """FSDP2 ignores settings of FSDP1 with a warning, or stops."""
    if document.number(FSDP, "fsdp_version") != 2:
        return
    for name, reason in _ONLY_FSDP1.items():
        if document.get(FSDP, name) is not None:
            yield Hit((FSDP, name), f"a key of FSDP1; {reason}", changes=(Drop((FSDP, name)),))
    prefetch, reshard = (FSDP, "fsdp_forward_prefetch"), (FSDP, "fsdp_reshard_after_forward")
    if document.on(*prefetch):
        what = "FSDP2 has no forward prefetch: accelerate stops with a ValueError"
        yield Hit(prefetch, what, changes=(Drop(prefetch),), severity="error")
    value = document.get(*reshard)
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        what = f"{value!r} is a value of FSDP1; FSDP2 needs true or false, and stops"
        yield Hit(reshard, what, "true", (Put(reshard, True),), "error")
    if document.get(FSDP, "fsdp_state_dict_type") == "LOCAL_STATE_DICT":
        key = (FSDP, "fsdp_state_dict_type")
        what = "FSDP2 has no local state dicts: accelerate stops"
        yield Hit(key, what, "SHARDED_STATE_DICT", (Put(key, "SHARDED_STATE_DICT"),), "error")


@accelerate_rule("error", "accelerate/utils/launch.py: prepare_multi_gpu_env")
def fsdp_efficient_loading(document: Document, _: Setup) -> Iterator[Hit]:
    """One rank loads the model and sends it to the others, which requires synchronised module states."""
    key, sync = (FSDP, "fsdp_cpu_ram_efficient_loading"), (FSDP, "fsdp_sync_module_states")
    if document.on(*key) and document.get(*sync) is False:
        what = "`accelerate launch` refuses it with fsdp_sync_module_states: false"
        yield Hit(key, what, "remove fsdp_sync_module_states", (Drop(sync),))


@accelerate_rule("error", "torch/distributed/fsdp/_flat_param.py; run with torch 2.13, PEFT 0.21")
def fsdp1_and_lora(document: Document, setup: Setup) -> Iterator[Hit]:
    """FSDP1 cannot flatten frozen weights and adapters together without the original parameters."""
    key, texts = (FSDP, "fsdp_use_orig_params"), " ".join(one.text for one in setup.of("training"))
    first = kind_of(document) == "FSDP" and document.number(FSDP, "fsdp_version") != 2
    wraps = "fsdp_auto_wrap_policy" in texts or setup.reader == "trainer"  # which wraps adapters apart
    if first and document.get(*key) is False and setup.lora and not wraps:
        what = "FSDP1 with LoRA stops: `Must flatten tensors with uniform requires_grad when "
        yield Hit(key, f"{what}use_orig_params=False`", changes=(Put(key, True),))


@accelerate_rule("error", "accelerate/utils/fsdp_utils.py: fsdp2_prepare_auto_wrap_policy")
def fsdp_block_class(document: Document, setup: Setup) -> Iterator[Hit]:
    """A class to wrap that the model does not have stops accelerate; `--model` or a file names the model."""
    key = (FSDP, "fsdp_transformer_layer_cls_to_wrap")
    value, policy = document.get(*key), document.get(FSDP, "fsdp_auto_wrap_policy")
    model = model_of(setup)
    if value is not None and model and policy == "TRANSFORMER_BASED_WRAP" and kind_of(document) == "FSDP":
        yield from foreign_blocks(key, value, model)


@accelerate_rule("warning", _PLUGIN)
def fsdp_wraps_nothing(document: Document, _: Setup) -> Iterator[Hit]:
    """One unit for the entire model saves memory only between steps."""
    key = (FSDP, "fsdp_auto_wrap_policy")
    if kind_of(document) == "FSDP" and document.section(FSDP) and document.get(*key) in (None, "NO_WRAP"):
        what = "without wrapping the model is one unit: each GPU gathers all of it"
        yield Hit(key, what, changes=(Put(key, "TRANSFORMER_BASED_WRAP"),))
