"""Files of weights are those of safetensors, and written without holding Python's lock."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.models.tensor_file import save_file

TENSORS = {
    "z": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "a": torch.tensor(1.5),
    "é": torch.arange(5, dtype=torch.float16),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "steps": torch.tensor([1, 2]),
    "flags": torch.tensor([True, False, True]),
    "codes": torch.arange(7, dtype=torch.uint8),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_is_that_of_safetensors_to_the_byte(tmp_path, metadata):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_file(TENSORS, ours, metadata)
    safetensors.torch.save_file({n: t.contiguous() for n, t in TENSORS.items()}, theirs, metadata)
    assert ours.read_bytes() == theirs.read_bytes()
    loaded = safetensors.torch.load_file(ours)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_model_is_saved_without_the_writer_that_holds_pythons_lock(tmp_path, monkeypatch):
    """A thread saves it while training goes on (`_save_model` puts ours in its place)."""
    from shardwise.models import export

    def refuse(*_, **__):
        raise AssertionError("safetensors' own writer was called")

    monkeypatch.setattr("safetensors.torch.serialize_file", refuse)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    with export.own_writer():
        model.save_pretrained(tmp_path)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
