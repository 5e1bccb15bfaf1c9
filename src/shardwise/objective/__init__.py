"""The objective of a job: the model together with the loss that training minimises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from shardwise.job.schema import Job
from shardwise.objective.causal_lm import CausalLM
from shardwise.objective.protocol import Objective

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeObjective = Callable[["PreTrainedModel"], Objective]
"""Prepares a model, in place, for its objective."""


def objective_of(job: Job) -> MakeObjective:
    """The one place that says which objective a job trains with."""
    return partial(CausalLM, packed=job.data.packing)
