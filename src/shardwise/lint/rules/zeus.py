"""Zeus: energy and power limits in a script of which several processes run."""

import ast
from collections.abc import Iterator
from functools import partial

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, rule
from shardwise.lint.rules.program import calls
from shardwise.lint.rules.training import distributed
from shardwise.lint.setup import Setup

OPTIMIZERS = ("HFGlobalPowerLimitOptimizer", "GlobalPowerLimitOptimizer")
ETA = 0.5  # of ZeusCost, Zeus' default
RUN = "run with 0.16.0 in four processes"

zeus_rule = partial(rule, versions="zeus>=0.11", kind="training")


def _argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    named = (keyword.value for keyword in call.keywords if keyword.arg == name)
    return next(named, call.args[place] if len(call.args) > place else None)


@zeus_rule("error", f"zeus/monitor/energy.py; {RUN}")
def zeus_monitor_of_all_gpus(document: Document, setup: Setup) -> Iterator[Hit]:
    """Each process measures and waits for the GPUs of all: energy is counted once a process."""
    for call in calls(document, "ZeusMonitor"):
        asked = _argument(call, "gpu_indices", 0)
        count = len(asked.elts) if isinstance(asked, ast.List | ast.Tuple) else None
        if asked is not None and (count is None or count < 2):
            continue
        count, sure = setup.world_size or count, distributed(setup)
        times = f"{count} times" if count and count > 1 else "once a process"
        what = "" if sure else "where several processes are started, "
        what += f"every process measures the same GPUs: their energy is counted {times}, and each process "
        what += "synchronises, and so takes memory on, all of them; with an optimizer, each sets all limits"
        fix = "in each process: ZeusMonitor(gpu_indices=[torch.cuda.current_device()], cpu_indices=[])"
        yield Hit((), what, fix, severity=None if sure else "note", line=call.lineno)


@zeus_rule("error", f"zeus/optimizer/power_limit.py; {RUN}")
def zeus_cost_of_one_process(document: Document, setup: Setup) -> Iterator[Hit]:
    """ZeusCost multiplies the time by one GPU's power, and the energy is that of all."""
    costs = [call for call in calls(document, "ZeusCost") if _argument(call, "world_size", 1) is None]
    tuned = [call for call in calls(document, *OPTIMIZERS) if not _argument(call, "optimum_selector", 1)]
    gpus = setup.world_size or 4
    weight = gpus * ETA / (gpus * ETA + 1 - ETA)
    for call in costs + tuned if distributed(setup) else ():
        what = "energy weighs too much, because it is summed over processes and the power limit is not: "
        what += f"eta {ETA} becomes {weight:.2f} with {gpus} processes"
        what += "; ZeusCost is the default" if call in tuned else ""
        fix = f"optimum_selector=ZeusCost({ETA}, world_size=dist.get_world_size())"
        yield Hit((), what, fix, line=call.lineno)


@zeus_rule("warning", f"zeus/optimizer/power_limit.py: atexit; {RUN}")
def zeus_leaves_limits_changed(document: Document, _: Setup) -> Iterator[Hit]:
    """Limits are not put back: the highest one stays, after SIGTERM the one that is being tried."""
    for call in calls(document, *OPTIMIZERS):
        what = "at its end all GPUs get their highest limit, not the one from before; SIGTERM, which "
        what += "launchers send when a process fails, leaves the limit that is being tried"
        fix = "`shardwise train` with energy.objective puts limits back; `shardwise emit` measures only"
        yield Hit((), what, fix, line=call.lineno)
