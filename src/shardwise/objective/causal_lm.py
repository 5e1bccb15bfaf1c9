"""The one loss: summed cross entropy over the target tokens of a micro-batch.

The backbone gives hidden states and the output head turns them into the loss itself, without full logits.
Both are called as modules, so that what an engine hooks onto them (ZeRO-3 and FSDP2 gather weights there)
takes place; this module is therefore what an engine wraps, not the model inside it.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.errors import JobError
from shardwise.kernels import attention
from shardwise.kernels.linear_cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PLAIN_HEADS = (
    attention.VARLEN_TYPES
    | attention.STATE_TYPES
    | {
        "bloom",
        "codegen",
        "falcon",
        "gemma2",
        "gpt_neo",
        "gptj",
        "stablelm",
    }
)
"""Model types whose logits are the head applied to the backbone's output, then `_logits_after`."""


class CausalLMLoss(nn.Module):
    """A Hugging Face causal language model and its training loss."""

    def __init__(self, model: PreTrainedModel, *, packed: bool = True) -> None:
        """Prepares `model` in place: its attention over packed rows, and its output head.

        Args:
            model: on any device, meta included; PEFT layers may have been injected.
            packed: whether a row may hold several samples. Without, a row is one sample, then padding.

        Raises:
            JobError: rows are packed and this architecture is not known to keep samples apart.
        """
        super().__init__()
        self.model = model
        chosen = attention.choose(model.config)
        if packed and chosen.packing == "rows":
            raise JobError(
                f"packing would let samples of {model.config.model_type!r} models see each other",
                where="data.packing",
                fix="set data.packing: false",
            )
        self.packing = chosen.packing
        self.windowed = chosen.windowed
        if chosen.implementation is not None:
            model.set_attn_implementation(chosen.implementation)
        head = model.get_output_embeddings()
        # a head with an adapter, or one that is not a plain linear layer, gives its own logits
        self.fused = model.config.model_type in _PLAIN_HEADS and type(head) is nn.Linear
        if self.fused:
            _give_loss(head, *_logits_after(model.config))

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Cross entropy in nats, summed over the targets of `batch`; fp32 scalar."""
        inputs = self._inputs(batch)
        labels = batch.labels.reshape(-1)
        if self.fused:
            hidden = self.model.base_model(**inputs).last_hidden_state
            loss: torch.Tensor = self.model.get_output_embeddings()(hidden.flatten(0, 1), labels)
            return loss
        logits = self.model(**inputs).logits.flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if self.packing == "rows":
            return inputs
        inputs["position_ids"] = batch.position_ids
        if self.packing == "mask":
            inputs["attention_mask"] = attention.block_causal_mask(
                batch.input_ids.shape, batch.cu_seqlens, self._dtype()
            )
        if self.packing == "varlen":
            inputs["input_ids"] = batch.input_ids.reshape(1, -1)
            inputs["position_ids"] = batch.position_ids.reshape(1, -1)
            inputs |= self._segments(batch)
        return inputs

    def _segments(self, batch: MicroBatch) -> dict[str, Any]:
        """What `attention.varlen_attention` is told, in transformers' names."""
        borders, whole = batch.cu_seqlens, 0
        rows = batch.single_segment_rows
        if rows and not self.windowed and attention.whole_rows_are_faster(borders.device):
            whole = rows
            borders = borders[whole:] - whole * batch.max_seqlen
        lengths = {"max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
        return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "whole_rows": whole, **lengths}

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype


def _logits_after(config: PretrainedConfig) -> tuple[float, float | None]:
    """(factor, softcap) that the architecture applies to the head's output."""
    scale = 1.0
    if config.model_type in ("cohere", "cohere2"):
        scale = config.logit_scale
    elif config.model_type == "granite":
        scale = 1.0 / config.logits_scaling
    return scale, getattr(config, "final_logit_softcapping", None)


def _give_loss(head: nn.Linear, scale: float, softcap: float | None) -> None:
    """Lets `head(hidden, labels)` return the loss; `head(hidden)` still returns logits."""

    def forward(self: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return nn.Linear.forward(self, hidden)
        return linear_cross_entropy(
            hidden, self.weight, labels, bias=self.bias, softcap=softcap, scale=scale, ignore_index=IGNORED
        )

    head.forward = MethodType(forward, head)  # type: ignore[method-assign]
