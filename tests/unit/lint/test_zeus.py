"""Zeus in scripts: which forms are right in several processes, and what the wrong ones do."""

from __future__ import annotations

import pytest

from shardwise.lint.check import check
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.setup import Setup


def found(code: str, world_size: int | None = 4) -> dict[str, Finding]:
    setup = Setup(documents=(read(f"import zeus\n{code}\n", "train.py"),), asked_world_size=world_size)
    return {one.rule: one for one in check(setup).findings}


@pytest.mark.parametrize(
    ("indices", "wrong"),
    [
        ("", True),
        ("[0, 1]", True),
        ("gpu_indices=(0, 1, 2, 3)", True),
        ("[0]", False),
        ("gpu_indices=[torch.cuda.current_device()]", False),
        ("gpu_indices=mine(rank)", False),
    ],
)
def test_a_monitor_of_several_gpus_counts_them_once_a_process(indices: str, wrong: bool) -> None:
    findings = found(f"monitor = zeus.monitor.ZeusMonitor({indices})", 8)
    assert ("zeus-monitor-of-all-gpus" in findings) == wrong
    if wrong:
        assert "counted 8 times" in findings["zeus-monitor-of-all-gpus"].what
        assert findings["zeus-monitor-of-all-gpus"].line == 2


def test_where_one_process_may_be_meant_it_is_a_note() -> None:
    one = found("monitor = ZeusMonitor([0, 1])", None)["zeus-monitor-of-all-gpus"]
    assert one.severity == "note"
    assert one.what.startswith("where several processes are started, ")


@pytest.mark.parametrize(
    ("code", "processes", "weight"),
    [
        ("tuner = GlobalPowerLimitOptimizer(monitor)", 4, "0.80"),
        ("tuner = HFGlobalPowerLimitOptimizer(monitor)", 8, "0.89"),
        ("tuner = GlobalPowerLimitOptimizer(monitor, ZeusCost(eta_knob=0.5))", 64, "0.98"),
    ],
)
def test_zeus_cost_weighs_energy_by_the_number_of_processes(code: str, processes: int, weight: str) -> None:
    what = found(code, processes)["zeus-cost-of-one-process"].what
    assert f"eta 0.5 becomes {weight} with {processes} processes" in what


@pytest.mark.parametrize(
    "selector", ["Energy()", "optimum_selector=MaxSlowdownConstraint(1.1)", "ZeusCost(0.5, world_size=n)"]
)
def test_other_selectors_and_the_true_number_are_right(selector: str) -> None:
    assert "zeus-cost-of-one-process" not in found(f"GlobalPowerLimitOptimizer(monitor, {selector})")


def test_one_process_has_no_wrong_weight_but_leaves_limits_changed() -> None:
    rules = set(found("GlobalPowerLimitOptimizer(ZeusMonitor([0]))", 1))
    assert rules - {"undefined-name"} == {"zeus-leaves-limits-changed"}
