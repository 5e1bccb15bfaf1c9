"""A mixture's router loss: transformers' own load-balancing loss of a micro-batch (decision 0051)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.errors import JobError

_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")


@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """What `output_router_logits: true` adds to a model's mean cross entropy."""

    balance: Callable[..., Tensor]
    """transformers' function of the model: 1 where all experts get the same, times `top_k`."""
    coefficient: float
    experts: int
    top_k: int

    def mean(self, logits: tuple[Tensor, ...], kept: Tensor) -> Tensor:
        """The loss that is added; fp32 scalar.

        `logits` are [B*S, experts] of each router; of the tokens only those count where `kept`, [B, S] or
        [1, B*S], is true.
        """
        return self.coefficient * self.balance(logits, self.experts, self.top_k, kept.to(torch.int64)).float()


def router_loss_of(model: PreTrainedModel) -> RouterLoss | None:
    """The router loss that the config asks for; None where transformers adds none.

    Raises JobError where transformers adds one that is not computed here.
    """
    if not getattr(model.config, "output_router_logits", False):
        return None
    balance = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    experts = getattr(model, "num_experts", None)
    if balance is None or not experts:
        return None
    coefficient = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
    if coefficient is None or tuple(inspect.signature(balance).parameters) != _ARGUMENTS:
        what = f"the router loss of {model.config.model_type!r} models is not computed here"
        raise JobError(what, where="model.config.output_router_logits", fix="false: train without it")
    return RouterLoss(
        balance=balance, coefficient=coefficient, experts=experts, top_k=model.num_experts_per_tok
    )


def router_note(model: PreTrainedModel) -> list[str]:
    """For people: what `output_router_logits: true` of a config does to the loss."""
    if not getattr(model.config, "output_router_logits", False):
        return []
    loss = router_loss_of(model)
    if loss is None:
        return [f"output_router_logits adds nothing: {model.config.model_type!r} models have no router loss"]
    return [f"the loss includes the routers' load-balancing loss, times {loss.coefficient:g}"]
