"""The seam between a training step and what it minimises: a model together with its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.job.schema import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Objective(nn.Module):
    """A model together with its loss; engines wrap it, and the tracer records it.

    The loss of a step is the sum over all ranks and micro-batches, divided by the number of its targets.
    Every rank knows that number before the step, without communication: the dataset counts the targets of
    each sample (`targets`), and the loader adds them up (`StepBatch.target_tokens`). Here a target is a
    predicted token; an objective on pairs counts each pair as one.
    """

    batch_kind: ClassVar[type[MicroBatch]] = MicroBatch
    """What `forward` takes; its `on_meta` makes the tracer's input."""
    model: nn.Module
    """The trained model; engines name its weights without the prefix `model.`."""
    one_shape = False
    """Whether all its micro-batches have one shape."""

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss summed over the targets of one micro-batch, an fp32 scalar.

        Call modules that own weights as modules: engines gather weights in hooks on those calls.
        """
        raise NotImplementedError

    def separates(self, device: torch.device) -> bool:  # noqa: ARG002 - for objectives that know better
        """Whether rows of a single segment are computed otherwise than packed rows on `device`."""
        return True

    def tokens_shape(self, batch: Any) -> torch.Size:
        """Shape of the token ids as the model gets them; its hidden states have one dimension more."""
        shape: torch.Size = batch.input_ids.shape
        return shape


MakeObjective = Callable[["PreTrainedModel"], Objective]
"""Prepares a model, in place, for its objective."""


def objective_of(job: Job) -> MakeObjective:
    """The one place that says which objective a job trains with."""
    from shardwise.objective.causal_lm import CausalLM  # which needs this module

    return partial(CausalLM, packed=job.data.packing)
