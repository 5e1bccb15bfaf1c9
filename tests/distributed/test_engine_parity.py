"""Every engine trains what a plain float64 loop trains."""

from __future__ import annotations

import pytest
from engine_worker import run_in_processes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("processes", "count"), [(1, 77), (2, 84), (4, 21)])
def test_losses_norms_and_weights_are_those_of_float64(tmp_path, processes: int, count: int) -> None:
    results = run_in_processes("parity", processes=processes, folder=tmp_path, timeout=590)
    assert len(results) == count
    for name, found in results.items():
        exact = "/fp32/" in name
        # fp32: rounding. bf16: 8 bits of mantissa, through two blocks and three AdamW steps.
        assert found["loss_error"] < (1e-5 if exact else 1e-2), name
        assert found["norm_error"] < (1e-5 if exact else 5e-2), name
        # AdamW turns the noise of a vanishing gradient into a step of the learning rate (0.01) at most;
        # a weight decay that should not be there moves the norms' weights by 0.003.
        assert found["weight_error"] < (1e-3 if exact else 6e-2), name
        assert found["skipped"] == [0.0] * 3, name


@pytest.mark.parametrize(("processes", "in_bf16"), [(1, 2), (2, 3), (4, 1)])
def test_a_descriptor_says_what_adds_micro_batches_up_in_bf16(tmp_path, processes: int, in_bf16: int) -> None:
    results = run_in_processes("sums", processes=processes, folder=tmp_path)
    for name, found in results.items():
        # sums over ranks may round to bf16, which has 8 bits
        assert found["total"] == pytest.approx(512 if found["said"] else 575, rel=2**-8), name
    assert sum(found["said"] for found in results.values()) == in_bf16


def test_a_mask_that_one_rank_alone_needs_is_made_without_weights(tmp_path) -> None:
    results = run_in_processes("masks", processes=2, folder=tmp_path)
    assert results.pop("packing") == "mask"
    assert len(results) == 4
    for name, steps in results.items():
        assert all(error < 1e-5 for errors in steps for error in errors), name


def test_gradients_in_fewer_bits_change_the_loss_by_a_known_amount(tmp_path) -> None:
    """20 steps of a tiny Llama in fp32 on four processes (docs/sharding.md has these numbers)."""
    results = run_in_processes("lossy", processes=4, folder=tmp_path, timeout=590)
    print({name: (found["last"], found["error"]) for name, found in results.items()})
    assert len(results) == 7
    for name, found in results.items():
        # sums in fp32 are within 1e-6
        assert 1e-5 < found["error"] < (5e-3 if "-reduce-" in name else 5e-2), name
        assert found["resumed"], name
