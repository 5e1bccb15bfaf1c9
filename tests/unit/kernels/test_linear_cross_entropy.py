"""The chunked loss equals float64 cross entropy of the full logits, in value and in every gradient."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels import linear_cross_entropy as module
from shardwise.kernels.linear_cross_entropy import linear_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 37, 16, 50
DTYPES = [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
"""Dtype and largest relative error."""


def reference(hidden, weight, labels, bias=None, softcap=None, scale=1.0):
    """Full logits in float64, torch's own cross entropy."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def inputs(dtype, *, bias, ignored):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < ignored] = -100
    tensors = [hidden, weight] + ([torch.randn(VOCABULARY, generator=generator).to(dtype)] if bias else [])
    return [t.requires_grad_() for t in tensors], labels


def error(measured, expected):
    """Norm of the difference over the norm of the expected."""
    measured, expected = measured.detach().double(), expected.detach()
    return float((measured - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.fixture(params=[1, 5, 1000], ids=["row-by-row", "uneven-chunks", "one-chunk"])
def chunking(request, monkeypatch):
    """CHUNK_BYTES for so many fp32 rows (twice as many in bf16)."""
    monkeypatch.setattr(module, "CHUNK_BYTES", request.param * VOCABULARY * 4)


@pytest.mark.usefixtures("chunking")
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 1.0), (None, 0.25), (3.0, 0.5)])
def test_loss_and_gradients_are_those_of_full_float64_logits(dtype, bound, bias, softcap, scale):
    tensors, labels = inputs(dtype, bias=bias, ignored=0.3)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    loss = linear_cross_entropy(
        *tensors[:2], labels, bias=tensors[2] if bias else None, softcap=softcap, scale=scale
    )
    expected = reference(*exact[:2], labels, exact[2] if bias else None, softcap, scale)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert error(loss, expected) <= bound
    (loss * 0.125).backward()  # the incoming gradient is not 1
    (expected * 0.125).backward()
    for tensor, right in zip(tensors, exact, strict=True):
        assert tensor.grad.dtype == dtype
        assert error(tensor.grad, right.grad) <= bound


def test_all_labels_ignored_is_zero_with_zero_gradients():
    tensors, labels = inputs(torch.float32, bias=True, ignored=1.1)
    loss = linear_cross_entropy(*tensors[:2], labels, bias=tensors[2])
    loss.backward()
    assert loss.item() == 0.0
    assert all(t.grad.abs().max() == 0.0 for t in tensors)


def test_an_ignored_row_cannot_poison_the_sum():
    """Padding may hold anything, but what is ignored must not reach the loss."""
    (hidden, weight), labels = inputs(torch.float32, bias=False, ignored=0.3)
    with torch.no_grad():
        expected = linear_cross_entropy(hidden, weight, labels)
        hidden[labels == -100] = 1e30
        assert torch.equal(linear_cross_entropy(hidden, weight, labels), expected)


def test_a_frozen_weight_gets_no_gradient_and_hidden_gets_the_same():
    (hidden, weight), labels = inputs(torch.float32, bias=False, ignored=0.3)
    linear_cross_entropy(hidden, weight, labels).backward()
    both, hidden.grad = hidden.grad, None
    frozen = weight.detach()
    linear_cross_entropy(hidden, frozen, labels).backward()
    assert frozen.grad is None
    assert torch.equal(hidden.grad, both)


def test_many_small_chunks_add_up_in_fp32(monkeypatch):
    """Each of 1024 rows adds 0.5: a bf16 sum would stand still at 128."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(1024, dtype=torch.int64), bias=bias).backward()
    assert weight.grad.flatten().tolist() == [-512.0, 512.0]
    assert bias.grad.tolist() == [-512.0, 512.0]


def test_a_tied_weight_adds_up_both_its_uses():
    """The embedding and the head share one tensor: its gradient is the sum of the two."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    exact = weight.detach().double().requires_grad_()
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    linear_cross_entropy(torch.tanh(weight[tokens]), weight, labels).backward()
    reference(torch.tanh(exact[tokens]), exact, labels).backward()
    assert error(weight.grad, exact.grad) <= 1e-6


def test_evaluation_gives_the_training_loss_and_keeps_the_inputs():
    (hidden, weight), labels = inputs(torch.float32, bias=False, ignored=0.3)
    before = hidden.detach().clone()
    training = linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        evaluation = linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(training, evaluation)
    assert not evaluation.requires_grad
    assert torch.equal(hidden, before)


def test_a_second_backward_is_refused():
    (hidden, weight), labels = inputs(torch.float32, bias=False, ignored=0.3)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


@pytest.mark.parametrize(("tokens", "expected"), [(4096, 2048), (2048, 2048), (2049, 1025), (0, 1)])
def test_chunks_stay_under_the_byte_limit_and_are_even(monkeypatch, tokens, expected):
    monkeypatch.setattr(module, "CHUNK_BYTES", 2048 * 256)
    assert module.chunk_rows(tokens, 256) == expected


def test_a_vocabulary_is_aligned_for_tensor_cores_and_its_gradients_keep_their_shape():
    assert module.aligned_width(50257, 2) == 50304
    assert [module.aligned_width(entries, 2) for entries in (32000, 50280, 151936)] == [32000, 50280, 151936]
    hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((7, 8), (61, 8), (61,)))
    linear_cross_entropy(hidden, weight, torch.arange(7), bias=bias).backward()
    assert weight.grad.shape == (61, 8)
    assert bias.grad.shape == (61,)
