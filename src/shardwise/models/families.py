"""The model families of families.toml: everything that depends on an architecture's name. Imports no torch.

A family without a row is planned and trained, too: unpacked, without fused parts, its head as transformers
has it.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol, cast

from shardwise.folders import packaged

Config = Any
"""A Hugging Face config; transformers is not imported, not even for its types."""

VARLEN, CAUSAL = "shardwise_varlen", "shardwise_causal"
"""Names of `kernels.attention.varlen_attention` and of SDPA without transformers' masks, in its registry."""

Packing = Literal["varlen", "mask", "state", "rows"]
"""How samples that share a row are kept apart:

- `varlen`: rows are joined to [1, B*S], and the kernel gets the borders of the segments. There is no mask,
  and nothing is computed across segments. Rows of one segment go to a faster kernel on Hopper (decision
  0011).
- `mask`: our own [B, 1, S, S] masks, made once for all layers. transformers makes such masks from positions
  that restart, too, but reads them back from the GPU, and its boolean ones are converted in every layer.
- `state`: a state space model, whose mixers reset their state where the position ids restart.
- `rows`: plain causal rows, correct only for one sample a row, then padding.
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: the models that share a `model_type` of transformers."""

    packing: tuple[Packing, ...] = ()
    """Ways that are exact for it, fastest first; `attention_of` picks one."""
    plain_head: bool = False
    """Logits are the head applied to the backbone's output, then `logits_after`: the loss can be fused."""
    logits_multiplier: str = ""
    """The config's name of a factor on the logits."""
    logits_divisor: str = ""
    """The config's name of a divisor of the logits."""
    liger: Literal["", "swiglu", "geglu"] = ""
    """Liger's kernel for its MLP, where tests/gpu compare Liger with the plain model; empty: no Liger."""
    norm_in_place: bool = True
    """Liger's norm writes the gradient of its input over the incoming one, which nothing else needs."""
    position_table: bool = False
    """Positions end where a table of sines in the model's code ends."""
    unplanned_weights: bool = False
    """Some weights act between layers of the tensor-parallel plan and are not in it (transformers 5.23)."""
    attends: bool = True
    """Has attention heads."""
    sinks: bool = False
    """Every softmax of its attention has one more term, which its head learns (`kernels.sinks`)."""
    fp32_parameters: bool = False
    """Holds some parameters in fp32 whatever the job's precision (decision 0019)."""
    kernel_reads: tuple[str, ...] = ()
    """Layers whose weights a kernel reads without calling them: they cannot have an adapter."""
    not_multiplied: tuple[str, ...] = ()
    """Matrices that are in no matrix product; `FamilyCode.mixer_flops_per_token` counts their work."""
    stages: bool = False
    """Blocks take and return hidden states alone, and embeddings stand before them: it can be cut there."""
    mixes_tokens: str = ""
    """The config's name of what lets a token's result depend on other rows of its micro-batch: refused."""
    package: str = ""
    """A package of ours with other modules for training: `FamilyCode`."""


class FamilyCode(Protocol):
    """What the package of a family with modules of its own provides."""

    def check_config(self, config: Config, changed: dict[str, object]) -> None:
        """Raise JobError for values that the modules do not compute; `changed` are those the job sets."""

    def prepare(self, model: Any) -> None:
        """Replace modules and initialisation of a model on the meta device, in place."""

    def mixer_flops_per_token(self, config: Config) -> float:
        """FLOPs of forward and backward pass outside matrix products, in all layers."""


def _families() -> dict[str, Family]:
    table, found = packaged("models/families.toml"), dict[str, Family]()
    for name, row in table["families"].items():
        pairs = {**table["like"].get(row.get("like"), {}), **row}.items()
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in pairs if k != "like"}
        found[name] = Family(**values)
    return found


FAMILIES = _families()
"""By `model_type`."""

REFUSED = dict.fromkeys(
    ("mamba2", "falcon_mamba", "bamba", "zamba", "zamba2", "jamba"),
    "use a Mamba-1, such as 130m_mamba or 1b_mamba, or a transformer",
)
"""Architectures with mixers that no kernel here computes, and what to use instead."""

_UNPLANNED_FLAGS = ("use_qk_norm", "qk_layernorm")
"""Cohere's and Phi's: norms of query and key that are off by default, and in no plan."""


def family_of(config: Config) -> Family:
    """The row of a config's `model_type`; the defaults where there is none."""
    return FAMILIES.get(str(getattr(config, "model_type", "")), Family())


def family_code(family: Family) -> FamilyCode | None:
    """The family's own package, imported."""
    return cast(FamilyCode, import_module(family.package)) if family.package else None


@dataclass(frozen=True, kw_only=True)
class Attention:
    """How a model attends over rows."""

    packing: Packing
    implementation: str | None
    """Name for `set_attn_implementation`; None leaves what transformers picks for the model."""
    windowed: bool = False
    """Some layers see no further back than a sliding window, or have sinks."""
    head: int = 0
    """Size of a head, where packing is `varlen`."""


def attention_of(config: Config) -> Attention:
    """The fastest exact way for a model; `rows` if nothing is known about it."""
    dropout = max(getattr(config, name, None) or 0.0 for name in ("attention_dropout", "attn_pdrop"))
    plain, alibi = attention_for(config), bool(getattr(config, "alibi", False))
    for packing in family_of(config).packing:
        if packing == "varlen":
            # flash attention has a kernel for these sizes of a head
            fits = _head(config) % 8 == 0 and _head(config) <= 256
            if dropout == 0.0 and plain is None and not alibi and fits:
                # Mistral and others look at nothing else, whatever their layers are called
                local = "local" in (getattr(config, "attention_layers", None) or ())
                windowed = bool(getattr(config, "sliding_window", None)) or local or family_of(config).sinks
                head = _head(config)
                return Attention(packing="varlen", implementation=VARLEN, windowed=windowed, head=head)
        elif packing != "mask" or not alibi:
            return Attention(packing=packing, implementation=plain)
    return Attention(packing="rows", implementation=plain)


def attention_for(config: Config) -> str | None:
    """The attention to request from transformers; None leaves the choice to it: SDPA where supported.

    SDPA would silently leave out the softcap of attention logits (transformers 5.17).
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) is not None else None


def _head(config: Config) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def logits_after(config: Config) -> tuple[float, float | None]:
    """(factor, softcap) that the architecture applies to the head's output."""
    family, scale = family_of(config), 1.0
    if family.logits_multiplier:
        scale = getattr(config, family.logits_multiplier)
    if family.logits_divisor:
        scale = 1.0 / getattr(config, family.logits_divisor)
    return scale, getattr(config, "final_logit_softcapping", None)


def liger_kernels(config: Config) -> frozenset[str]:
    """Which of Liger's kernels a model takes: `rope`, `rms_norm`, and `swiglu` or `geglu`.

    The MLP's kernel computes one activation, whatever the config says.
    """
    gated = family_of(config).liger
    if not gated:
        return frozenset()
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    fits = activation in {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}[gated]
    return frozenset({"rope", "rms_norm", *([gated] if fits else [])})


def has_unplanned_weights(config: Config) -> bool:
    """Whether weights that transformers' tensor-parallel plan leaves out act between layers that it cuts."""
    flagged = any(getattr(config, flag, False) for flag in _UNPLANNED_FLAGS)
    return flagged or family_of(config).unplanned_weights
