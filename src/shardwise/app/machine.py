"""This machine: whether it can train, and what it is capable of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.diagnosis.child import Say
    from shardwise.diagnosis.doctor import Report


def doctor(*, calibrate: bool = False, runs: str | Path = "runs", say: Say = lambda *_: None) -> Report:
    """Check drivers, GPUs, links, kernels, collectives, DeepSpeed, disks and ports; changes no setting.

    Args:
        calibrate: also measure this machine (minutes) and keep the rates for the planner.
        runs: where runs will be written; its disk is checked.
        say: called with the number of answers, of probes, and the probes being asked, after each answer.
    """
    from shardwise.diagnosis.doctor import examine
    from shardwise.folders import cache_root

    return examine(runs=Path(runs), cache=cache_root(), calibrate=calibrate, say=say)
