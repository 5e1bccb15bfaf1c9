"""What is replaced in DeepSpeed takes effect in its real optimizers, without a GPU."""

from __future__ import annotations

import json

import pytest
from forks import run_set

pytestmark = pytest.mark.slow


def test_optimizers_use_what_replaces_their_functions(tmp_path) -> None:
    run_set("patches_worker:main", str(tmp_path), processes=1, folder=tmp_path, timeout=300)
    results = json.loads((tmp_path / "result.json").read_text())
    for name in ("zero1", "zero2", "zero3"):
        assert results["norms"][name] == {"asked": ["norm"], "replaced": True}, name
    assert results["norms"]["zero2-offload"] == {"searched": 0}

    releases = results["releases"]
    before, after_first, after_second = releases["counts"]
    assert before == [0, 0], "an engine that is not changed frees its parameters as DeepSpeed does"
    assert after_first[0] > 0
    assert after_first[1] == 0, "a second engine does not take over the first one's"
    assert after_second == [after_first[0], after_first[0]]
    assert releases["kinds"] == ["record", "wait_event", "wait_stream"]
    assert releases["kept"] == 1, "all three keep the same number of gathered elements"
    assert releases["unlimited"]
    assert releases["same"] == [True, True]


def test_views_that_autograd_keeps_of_released_weights_keep_no_memory_and_have_their_values(tmp_path) -> None:
    run_set("patches_worker:kept_views", str(tmp_path), processes=2, folder=tmp_path, timeout=300)
    found = json.loads((tmp_path / "kept_views.json").read_text())
    assert found["views"] > 0
    assert found["waits"]
    weights, *_ = found["gathered"]
    assert found["gathered"] == [weights] * 4
    assert found["empty"] == [weights - 2, 0, 0, 0], "the first pass releases; memory of the last two waits"
    assert found["same"]


def test_parameters_that_are_gathered_in_place_train_to_the_same_bits(tmp_path) -> None:
    run_set("patches_worker:gathers", str(tmp_path), processes=2, folder=tmp_path, timeout=300)
    assert json.loads((tmp_path / "gathers.json").read_text()) == {"same": True}


def test_what_an_evaluation_leaves_gathered_is_released(tmp_path) -> None:
    run_set("patches_worker:leaves_nothing", str(tmp_path), processes=2, folder=tmp_path, timeout=300)
    found = json.loads((tmp_path / "leaves_nothing.json").read_text())
    expected = {"left": True, "after": ["NOT_AVAILABLE"], "empty": True, "same": True}
    assert found == {"zero3": expected, "zero3-noreshard": expected}


def test_offloaded_gradients_in_order_train_alike(tmp_path) -> None:
    """Sent to the host once, in fp32, a step with one micro-batch has a norm in fp32, not fp64."""
    run_set("patches_worker:gradients_in_order", str(tmp_path), processes=2, folder=tmp_path, timeout=300)
    found = json.loads((tmp_path / "gradients_in_order.json").read_text())
    assert len(found) == 8
    for name, one in found.items():
        assert one["once"] == name.startswith("1"), name
        assert one["difference"] <= (1e-6 if one["once"] else 0.0), name
        assert one["waits"] == ["record", "wait_event", "wait_stream"], name
        assert one["held"] == 0, name
        assert one["refused"], f"{name}: a step that is not finite changes no weight"


def test_gradients_that_stay_train_to_the_same_bits(tmp_path) -> None:
    run_set("patches_worker:keeps_sums", str(tmp_path), processes=2, folder=tmp_path, timeout=300)
    found = json.loads((tmp_path / "keeps_sums.json").read_text())
    assert len(found) == 12
    assert all(found.values()), found
