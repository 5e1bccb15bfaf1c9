"""What is known of a strategy's use, and the rules that refuse one because of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.models.families import attention_of, family_of, has_unplanned_weights
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


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Properties of a model's shape that decide which strategies are possible."""

    blocks: int  # Transformer blocks
    key_value_heads: int
    """As many as attention heads, or fewer under grouped-query attention; 0 where nothing attends."""
    flash_attention: bool  # Whether half precision attends through torch's flash attention (packing `varlen`)
    attends: bool = True  # Whether the model has attention heads
    fp32_parameters: bool = False  # Whether it holds some parameters in fp32 under every precision
    plan_styles: frozenset[str] = frozenset()
    """How transformers' tensor-parallel plan splits layers; empty without a plan."""
    unplanned_weights: bool = False
    """Whether weights outside the plan act between layers that it splits, on a rank's own part."""
    stages: bool = True  # Whether it can be cut between its blocks

    @classmethod
    def of(cls, config: Any) -> Architecture | None:
        """Read a Hugging Face config; None where it is no decoder's that the rules know."""
        try:
            flash = attention_of(config).packing == "varlen"
            config = config.get_text_config()
            family = family_of(config)
            heads: int = config.num_attention_heads if family.attends else 0
            blocks: int = config.num_hidden_layers
        except AttributeError:
            return None
        plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        return cls(
            blocks=blocks,
            key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            flash_attention=flash,
            attends=family.attends,
            fp32_parameters=family.fp32_parameters,
            plan_styles=frozenset(plan.values()),
            unplanned_weights=has_unplanned_weights(config),
            # a router loss is added up over all blocks
            stages=family.stages and not getattr(config, "output_router_logits", False),
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A strategy and what it would be used for. A rule that needs what is None lets it pass."""

    strategy: Strategy
    devices: Devices
    world_size: int
    global_batch: int
    lora: bool
    micro_batch: int | None = None  # As the job names it; None where it was chosen for the user
    resuming: bool = False  # Whether a run goes on, whose train.global_batch stays
    architecture: Architecture | None = None
    capability: tuple[int, int] | None = None
    """CUDA compute capability of the GPUs; None on CPUs and on other makers' GPUs."""

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.strategy.offload_optimizer, self.strategy.offload_parameters)

    @property
    def attends(self) -> bool:
        """Whether the model has attention heads; True where its architecture is not known."""
        return self.architecture is None or self.architecture.attends


Words = str | Callable[[Facts], str]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A combination that is refused."""

    name: str
    broken: Callable[[Facts], bool]
    reason: Words
    where: str
    fix: Words
    source: str  # Where it says so: a package's source, its documentation, or arithmetic
    versions: str = ""
    """The library and the range of its versions that the rule holds for (PEP 440); empty where it depends on
    none."""


def several_processes(engine: str) -> Rule:
    """The rule of an engine whose ranks are replicas."""
    return Rule(
        name=f"{engine}-is-several-processes",
        broken=lambda f: f.world_size == 1,
        reason="with one process there are no replicas",
        where="strategy.engine",
        fix="strategy: single",
        source=_runtime(engine),
    )


def _runtime(engine: str) -> str:
    return f"shardwise.engines.{engine.replace('-', '_')}.runtime"


OFFLOADS = "strategy: zero2-offload, or zero3-offload for the weights, too"


def no_offload(engine: str, title: str, *, fix: str = OFFLOADS) -> Rule:
    """The rule of an engine that keeps everything on the GPU."""
    return Rule(
        name=f"{engine}-does-not-offload",
        broken=lambda f: f.strategy.offloads,
        reason=f"{title} cannot offload",
        where="strategy.offload_optimizer, strategy.offload_parameters",
        fix=fix,
        source=_runtime(engine),
    )
