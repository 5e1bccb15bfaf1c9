"""Change DeepSpeed in every process that finds this folder on PYTHONPATH, for comparisons.

THROUGHPUT_TIMER=on: turn DeepSpeed's throughput timer on, ignoring its configuration.
DEEPSPEED_SECONDS=FILE: write a JSON line per step, how long functions of ZeRO-1 and 2 occupied the process:
`{name: [calls, seconds, seconds without the other functions of the line]}`.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINE, OPTIMIZER = "deepspeed.runtime.engine", "deepspeed.runtime.zero.stage_1_and_2"
TIMED = [
    "process_gradients",
    "reduce_independent_p_g_buckets_and_remove_grads",
    "reduce_ipg_grads",
    "average_tensor",
    "copy_grads_in_partition",
    "independent_gradient_partition_epilogue",
    "get_all_grad_tensors",
    "get_flat_partition",
    "scaled_global_norm",
    "_optimizer_step",
    "free_grad_in_param_list",
    "_update_model_bit16_weights",
    "step",
    "flatten_dense_tensors_aligned",
    "unscale_and_clip_grads",
    "_clear_param_grad_only",
    "clear_backward_seen_flag",
    "setup_buckets",
    "zero_grad",
    "allreduce_and_scatter",
]
HOOKS = [
    "reenter_backward_if_needed",
    "should_refresh_expected_hook_count",
    "update_hook_state_and_maybe_run_epilogue",
]

seconds: dict[str, list[float]] = {}
within = threading.local()


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **named: Any) -> Any:
        stack = within.__dict__.setdefault("stack", [])
        since = time.perf_counter()
        stack.append(0.0)
        try:
            return function(*arguments, **named)
        finally:
            lasted, inner = time.perf_counter() - since, stack.pop()
            if stack:
                stack[-1] += lasted
            sums = seconds.setdefault(name, [0, 0.0, 0.0])
            sums[:] = [sums[0] + 1, sums[1] + lasted, sums[2] + lasted - inner]

    return wrapper


def time_methods(owner: type, names: list[str]) -> None:
    for name in names:
        if name in owner.__dict__:
            setattr(owner, name, timed(name, owner.__dict__[name]))


def time_optimizer(module: Any) -> None:
    time_methods(module.DeepSpeedZeroOptimizer, TIMED)
    for owner in module.DeepSpeedZeroOptimizer.__mro__:
        time_methods(owner, HOOKS)
    name = "count_used_parameters_in_backward"
    setattr(module, name, timed(name, getattr(module, name)))


def time_engine(module: Any) -> None:
    owner = module.DeepSpeedEngine
    time_methods(owner, ["forward", "backward"])
    time_methods(type(module.get_accelerator()), ["synchronize"])
    step = timed("engine.step", owner.step)
    last = [time.perf_counter()]

    def written(*arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        now = time.perf_counter()
        with Path(os.environ["DEEPSPEED_SECONDS"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seconds": now - last[0], **seconds}) + "\n")
        seconds.clear()
        last[0] = now
        return result

    owner.step = written


def timer_on(module: Any) -> None:
    class On(module.ThroughputTimer):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(type(config)(enabled=True, synchronized=True), *arguments, **named)

    module.ThroughputTimer = On


class Changed(importlib.abc.MetaPathFinder):
    """Finds the modules to change in the usual way, and changes them after they have run."""

    def __init__(self, changes: dict[str, list[Callable[[Any], None]]]) -> None:
        self.changes = changes

    def find_spec(self, name: str, *_: Any) -> Any:
        if name not in self.changes:
            return None
        changes = self.changes.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


changes: dict[str, list[Callable[[Any], None]]] = {}
if os.environ.get("THROUGHPUT_TIMER") == "on":
    changes.setdefault(ENGINE, []).append(timer_on)
if os.environ.get("DEEPSPEED_SECONDS"):
    changes.setdefault(ENGINE, []).append(time_engine)
    changes.setdefault(OPTIMIZER, []).append(time_optimizer)
sys.meta_path.insert(0, Changed(changes))
