"""Text from a trained model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models.export import ADAPTER_CONFIG, load_with_adapter
from shardwise.models.families import attention_for
from shardwise.models.file_weights import quiet


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
    """Generate an answer to `prompt`, on the GPU if there is one; greedy at temperature 0.

    A chat template of the tokenizer is used; without one the model continues the text.

    Args:
        model_dir: a checkpoint's `model` folder.
        base: the job's `model` section, for an adapter.
        prompt: text, without special tokens.
        max_new_tokens: largest length of the answer.
        temperature: of sampling.
        seed: of sampling.
        system: system message of the conversation.
        trained_on: the fingerprint of the adapter's base, if known; CheckpointError if it differs now.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # undecodable bytes in Python
        raise JobError("the prompt is not UTF-8", where="--prompt", fix="see the terminal's locale")
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    ids = _encode(tokenizer, prompt, system)
    if ids.shape[1] == 0:
        raise JobError("the prompt is empty", where="--prompt", fix="give the model a text to continue")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (model_dir / ADAPTER_CONFIG).is_file():
        model = load_with_adapter(model_dir, base, device, trained_on).model
    else:
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": base.trust_remote_code}
        config = AutoConfig.from_pretrained(model_dir, **options)
        attention = attention_for(config)
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                model_dir,
                config=config,
                dtype="auto",
                use_safetensors=True,
                attn_implementation=attention,
                **options,
            )
        model = model.to(device).eval()
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
        print(_no_text(output.shape[1] - ids.shape[1], max_new_tokens), file=sys.stderr)
    return answer


def _no_text(tokens: int, most: int) -> str:
    """Explain to people why there is nothing to read, and what to try."""
    ended = "the model ended the text at once"
    what = ended if tokens == 1 < most else f"the output contains no visible text (tokens: {tokens})"
    return (
        f"note: {what}\n"
        "  fix: try a prompt like the training data, or --temperature 0.8; if neither helps, train longer"
    )


COLDEST = 1e-4
"""Temperature below which sampling is greedy: logits divided by less would overflow fp32."""

_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""None overrides the model's generation config, which would warn."""


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
