"""Which norms Liger's kernels replace: the traced step takes it that all of them are.

A model that is built later has none of its classes. A run that ends out of memory predicts others in the same
process, on the meta device, where kernels of Triton would read addresses that do not exist.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

import pytest

from shardwise.kernels.fused import _apply_liger
from shardwise.models.families import FAMILIES
from tiny_models import tiny_model

pytest.importorskip("liger_kernel")


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.liger])
def test_every_norm_of_a_block_is_replaced_as_it_is_traced(name: str) -> None:
    model = tiny_model(name)
    with patch.dict(vars(sys.modules[type(model).__module__])):  # Liger replaces functions there, too
        assert _apply_liger(model, {"rms_norm"}) == ["liger_rms_norm"]
        assert not [one for one in tiny_model(name).modules() if "Liger" in type(one).__name__]
    norms = {key: one for key, one in model.named_modules() if type(one).__name__.endswith("RMSNorm")}
    assert len(norms) >= 5
    assert [key for key, one in norms.items() if "Liger" not in one.forward.__func__.__qualname__] == []
    of_blocks = [one.in_place for key, one in norms.items() if "layers." in key]
    assert set(of_blocks) == {FAMILIES[name].norm_in_place}
