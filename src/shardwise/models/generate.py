"""Text from a trained model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models.build import attention_for
from shardwise.models.export import ADAPTER_CONFIG, load_with_adapter
from shardwise.models.quiet import quiet


@torch.no_grad()
def generate(
    model_dir: Path,
    base: Model,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    system: str | None = None,
    trained_on: Mapping[str, Any] | None = None,
) -> str:
    """What the model answers to `prompt`; greedy at temperature 0. Runs on the GPU if there is one.

    A model whose tokenizer has a chat template is asked through it, any other continues the text.

    Args:
        model_dir: a checkpoint's `model` folder.
        base: the job's `model` section, which an adapter needs.
        prompt: text, without special tokens.
        max_new_tokens: the answer ends there at the latest.
        temperature: of sampling.
        seed: of sampling.
        system: system message of the conversation.
        trained_on: the fingerprint of the adapter's base, where it is known; CheckpointError if it is
            another now.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python hands on bytes as text
        raise JobError("the prompt is not UTF-8", where="--prompt", fix="see the terminal's locale")
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    ids = _encode(tokenizer, prompt, system)
    if ids.shape[1] == 0:
        raise JobError("the prompt is empty", where="--prompt", fix="give the model a text to continue")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _load(model_dir, base, device, trained_on)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > COLDEST else _GREEDY
    output = model.generate(
        input_ids=ids.to(device),
        attention_mask=torch.ones_like(ids, device=device),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    if not answer.strip():
        print(_said_nothing(output.shape[1] - ids.shape[1], max_new_tokens), file=sys.stderr)
    return answer


def _said_nothing(tokens: int, most: int) -> str:
    """For people: why there is nothing to read, and what to try."""
    if tokens == 1 < most:
        what = "the model ended the text at once"
    else:
        what = f"what the model wrote shows as nothing (tokens: {tokens})"
    return (
        f"note: {what}\n"
        "  fix: try a prompt like those it was trained on, or --temperature 0.8; where that says no more, "
        "train longer"
    )


COLDEST = 1e-4
"""Temperature below which sampling is greedy: logits divided by less would leave fp32."""

_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""The unset ones would otherwise come from the model's generation config, with a warning."""


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None) -> torch.Tensor:
    """The prompt's tokens, int64 [1, tokens]."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")["input_ids"].long()
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return encoded["input_ids"]


def _load(
    model_dir: Path, base: Model, device: torch.device, trained_on: Mapping[str, Any] | None
) -> PreTrainedModel:
    if (model_dir / ADAPTER_CONFIG).is_file():
        return load_with_adapter(model_dir, base, device, trained_on).model
    config = AutoConfig.from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=base.trust_remote_code
    )
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype="auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=base.trust_remote_code,
            attn_implementation=attention_for(config),
        )
    return model.to(device).eval()
