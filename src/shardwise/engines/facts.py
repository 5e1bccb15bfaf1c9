"""What is known of a strategy's use, and the rules that refuse one because of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwise.strategy import Strategy

Devices = Literal["cpu", "cuda"]

PLAN_STYLES = frozenset(
    {
        "colwise",
        "colwise_rep",
        "colwise_gather_output",
        "rowwise",
        "replicated_with_grad_allreduce",
        "embedding_rowwise",
    }
)
"""What AutoTP can do of a plan in transformers (deepspeed/module_inject/tp_plan_converter.py)."""

_UNPLANNED_TYPES = frozenset({"apertus", "doge"})
"""Their activation's and their attention's own weights are in no plan (transformers 5.23)."""
_UNPLANNED_FLAGS = ("use_qk_norm", "qk_layernorm")
"""Cohere's and Phi's: norms of query and key that are off unless asked for, and in no plan."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What of a model's shape decides what may be done with it."""

    blocks: int
    """Transformer blocks."""
    key_value_heads: int
    """As many as attention heads, or fewer under grouped-query attention; 0 of a state space model."""
    flash_attention: bool
    """Whether half precision attends through torch's flash attention (`kernels.attention`: `varlen`)."""
    plan_styles: frozenset[str] = frozenset()
    """The ways in which transformers' plan for tensor parallelism cuts layers; empty without a plan."""
    unplanned_weights: bool = False
    """Whether weights that the plan leaves out act between layers that it cuts, on a rank's own part."""

    @classmethod
    def of(cls, config: object, *, flash_attention: bool) -> Architecture:
        """From a Hugging Face config of a decoder; AttributeError where it is none."""
        attends = getattr(config, "model_type", None) != "mamba"
        heads: int = config.num_attention_heads if attends else 0  # type: ignore[attr-defined]
        blocks: int = config.num_hidden_layers  # type: ignore[attr-defined]
        plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        return cls(
            blocks=blocks,
            key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            flash_attention=flash_attention,
            plan_styles=frozenset(plan.values()),
            unplanned_weights=getattr(config, "model_type", None) in _UNPLANNED_TYPES
            or any(getattr(config, flag, False) for flag in _UNPLANNED_FLAGS),
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A strategy and what it would be used for. A rule that needs what is None lets it pass."""

    strategy: Strategy
    devices: Devices
    world_size: int
    global_batch: int
    lora: bool
    micro_batch: int | None = None
    """As the job names it; None where it was chosen for the user."""
    architecture: Architecture | None = None
    capability: tuple[int, int] | None = None
    """CUDA compute capability of the GPUs; None on CPUs and on other makers' GPUs."""

    @property
    def offloads(self) -> bool:
        return {self.strategy.offload_optimizer, self.strategy.offload_parameters} != {"none"}

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.strategy.offload_optimizer, self.strategy.offload_parameters)

    @property
    def attends(self) -> bool:
        """Whether the model has attention heads; True where its architecture is not known."""
        return self.architecture is None or self.architecture.key_value_heads > 0


Words = str | Callable[[Facts], str]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A combination that is refused."""

    name: str
    broken: Callable[[Facts], bool]
    reason: Words
    where: str
    fix: Words
    source: str
    """Where it says so: a package's source, its documentation, or arithmetic."""
    versions: str = ""
    """The library and the range of its versions that the rule holds for (PEP 440); empty where it depends on
    none."""
