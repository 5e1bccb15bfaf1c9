"""Recording relies on private parts of torch, and says so where one is missing."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.target import HOPPER
from shardwise.trace import recorder


def test_a_missing_private_name_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_PRIVATE", [*recorder._PRIVATE, (torch._C, "_renamed_since")])
    with pytest.raises(RuntimeError, match=r"lacks torch\._C\._renamed_since.*recorder\.py"):
        recorder.Recorder(HOPPER)


def test_an_autograd_that_adds_gradients_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_ADD", torch.ops.aten.mul.Tensor)
    recorder._references_of_an_unshared_total.cache_clear()
    with pytest.raises(RuntimeError, match="lacks an addition of gradients called by _engine_run_backward"):
        recorder.Recorder(HOPPER)


def test_the_installed_torch_has_everything() -> None:
    recorder._references_of_an_unshared_total.cache_clear()
    recorder.Recorder(HOPPER)
