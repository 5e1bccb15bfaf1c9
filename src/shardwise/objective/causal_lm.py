"""Causal language modelling: cross entropy summed over the target tokens of a micro-batch.

Where the config asks for a mixture's router loss, its mean over the micro-batch's tokens counts once for each
target, as the mean of the cross entropy does (decision 0051).

The backbone returns hidden states, and the output head turns them into the loss without full logits. Both are
called as modules, because ZeRO-3 and FSDP2 gather weights in hooks on those calls.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.errors import JobError
from shardwise.kernels import attention
from shardwise.kernels.linear_cross_entropy import linear_cross_entropy
from shardwise.models.families import CAUSAL, VARLEN, attention_of, family_of, logits_after
from shardwise.models.own_attention import route
from shardwise.models.router_loss import router_loss_of
from shardwise.objective import Objective

# Deliberately without mask functions of these names: transformers then makes no mask at all, and does not
# read the position ids back from the GPU to look for packed samples.
AttentionInterface.register(VARLEN, attention.varlen_attention)
AttentionInterface.register(CAUSAL, sdpa_attention_forward)


class CausalLM(Objective):
    """A Hugging Face causal language model and its training loss."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, *, packed: bool = True) -> None:
        """Prepare `model` in place: its attention over packed rows, and its output head.

        It may be on any device, meta included, with or without PEFT's layers. A `packed` row may hold several
        samples, otherwise one, then padding. Raises JobError where rows are packed and this architecture is
        not known to keep samples apart.
        """
        super().__init__()
        self.model, self.one_shape = model, packed
        chosen = attention_of(model.config)
        if packed and chosen.packing == "rows":
            what = f"packing would let samples of {model.config.model_type!r} models attend to each other"
            raise JobError(what, where="data.packing", fix="set data.packing: false")
        self.packing = chosen.packing
        self._attention = chosen
        # Read in a pass, ZeRO-3 would gather the weight for this module: on ranks that need a mask alone.
        self._dtype = model.get_input_embeddings().weight.dtype
        if chosen.packing == "varlen":
            route(model)
        if chosen.implementation not in (None, model.config._attn_implementation):
            model.set_attn_implementation(chosen.implementation)
        causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
        self.causal = self.packing == "mask" and causal and model.config._attn_implementation == "sdpa"
        if self.causal:
            model.config._attn_implementation = CAUSAL
        self.router_loss = router_loss_of(model)
        head = model.get_output_embeddings()
        # a head with an adapter, or one that is not a plain linear layer, computes its own logits
        self.fused = family_of(model.config).plain_head and type(head) is nn.Linear
        if self.fused:
            _fuse_loss(head, *logits_after(model.config))

    def forward(self, batch: MicroBatch, at: torch.Tensor | None = None) -> torch.Tensor:
        """Loss in nats, summed over the targets of `batch`, fp32 scalar; or the logits `at` some tokens."""
        inputs = self.inputs(batch)
        if at is not None:
            logits: torch.Tensor = self.model(**inputs).logits
            return logits.flatten(0, 1)[at]
        labels = batch.labels.reshape(-1)
        loss: torch.Tensor
        if self.fused:
            out = self.model.base_model(**inputs)
            loss = self.model.get_output_embeddings()(out.last_hidden_state.flatten(0, 1), labels)
        else:
            out = self.model(**inputs)
            logits = out.logits.flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if self.router_loss is not None:
            kept = _in_samples(batch).view_as(inputs["input_ids"])
            loss = loss + (labels != IGNORED).sum() * self.router_loss.mean(out.router_logits, kept)
        return loss

    def separates(self, device: torch.device) -> bool:
        if self.packing == "varlen":
            head, windowed = self._attention.head, self._attention.windowed
            return not windowed and attention.single_segments_are_faster(device, head)
        return self.packing == "mask"

    def tokens_shape(self, batch: MicroBatch) -> torch.Size:
        shape = batch.input_ids.shape
        return torch.Size((1, shape.numel())) if self.packing == "varlen" else shape

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """Arguments of the model's forward that keep the samples of a row apart; `varlen` joins the rows."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if self.packing == "rows":
            return inputs
        inputs["position_ids"] = batch.position_ids
        if self.packing == "mask" and self._needs_mask(batch):
            inputs["attention_mask"] = self._masks(batch)
        if self.packing == "varlen":
            inputs["input_ids"] = batch.input_ids.reshape(1, -1)
            inputs["position_ids"] = batch.position_ids.reshape(1, -1)
            inputs |= self._segments(batch)
        return inputs

    def _needs_mask(self, batch: MicroBatch) -> bool:
        """Whether a row has several segments, or a layer a window; a mask slows attention down."""
        several = batch.single_segment_rows < len(batch.input_ids)
        return several or not self.causal or self._windows() != {"": 0}

    def _windows(self) -> dict[str, int]:
        """Tokens that a layer sees, 0 for all: by kind of layer where some have a window, else of `""`."""
        kinds = {*(getattr(self.model.config, "layer_types", None) or ())}
        window = getattr(self.model.config, "sliding_window", None) or 0
        if "sliding_attention" not in kinds:
            return {"": 0 if kinds else window}
        return {kind: window if kind == "sliding_attention" else 0 for kind in sorted(kinds)}

    def _masks(self, batch: MicroBatch) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask, or where some layers see a window only one for each kind of layer."""
        mask = partial(attention.block_causal_mask, batch.input_ids.shape, batch.cu_seqlens, self._dtype)
        masks = {kind: mask(window) for kind, window in self._windows().items()}
        return masks.get("", masks)

    def _segments(self, batch: MicroBatch) -> dict[str, Any]:
        """Borders of the segments for `attention.varlen_attention`, under transformers' names."""
        borders, single = batch.cu_seqlens, 0
        if batch.single_segment_rows and self.separates(borders.device):
            single = batch.single_segment_rows
            borders = borders[single:] - single * batch.max_seqlen
        lengths = {"max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
        return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "single_segment_rows": single, **lengths}


def _in_samples(batch: MicroBatch) -> torch.Tensor:
    """Bool [B*S]: tokens of segments with a target, which padding has not; all, where nothing has one."""
    tokens = torch.arange(batch.labels.numel(), device=batch.labels.device, dtype=batch.cu_seqlens.dtype)
    segment = torch.bucketize(tokens, batch.cu_seqlens[1:], right=True)
    targets = torch.zeros(len(batch.cu_seqlens), device=tokens.device, dtype=torch.int64)
    targets = targets.index_add(0, segment, (batch.labels != IGNORED).flatten().long())
    return (targets[segment] > 0) | (targets.sum() == 0)


def _fuse_loss(head: nn.Linear, scale: float, softcap: float | None) -> None:
    """Let `head(hidden, labels)` return the loss; `head(hidden)` still returns logits."""

    def forward(self: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return nn.Linear.forward(self, hidden)
        return linear_cross_entropy(
            hidden, self.weight, labels, bias=self.bias, softcap=softcap, scale=scale, ignore_index=IGNORED
        )

    head.forward = MethodType(forward, head)  # type: ignore[method-assign]
