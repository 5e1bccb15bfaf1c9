"""ZeRO-3 reuses the memory of released parameters in stream order (decision 0017).

DeepSpeed 0.19.8 gathers on a stream of its own. When it releases a parameter, it marks the memory as used by
the computation (`record_stream`), and the allocator keeps it until the GPU has come that far. The host is
blocks ahead by then and gathers the next ones into new memory. Here the gathering stream waits for the
computation instead, so the memory can be reused at once and the host waits for neither.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from shardwise.engines.deepspeed.runtime.patches import DEEPSPEED, rely_on, replace
from shardwise.patch import check, patch, supported

NO_LIMIT = 10**9
_STREAM = "_DeepSpeedZeRoOffload__allgather_stream"
_LIMIT = "_PartitionedParameterCoordinator__max_ongoing_fetch_events"
"""Of gathers; read by fetch_sub_module."""

_RELEASED = "_shardwise_released"
"""Attribute of a parameter: the `_Released` of its engine."""


def release_in_order(optimizer: Any, parameters: Iterable[Any], streams: Any = torch.cuda) -> None:
    """Make a ZeRO-3 optimizer wait on the GPU, not on the host, for the memory of released parameters.

    Only `parameters` are affected, so that several engines can live in one process. `streams` provides
    `current_stream` and `Event`.
    """
    if not supported(DEEPSPEED):
        return
    offload = optimizer.parameter_offload
    check(offload, _STREAM, library=DEEPSPEED, source_hash=None)
    released = _Released(getattr(offload, _STREAM), streams)
    coordinator = offload.get_param_coordinator()
    fetch = rely_on(coordinator, "fetch_sub_module")
    release = rely_on(coordinator, "release_sub_module")
    release_all = rely_on(coordinator, "release_and_reset_all")

    def fetch_sub_module(*args: Any, **kwargs: Any) -> None:
        released.advance()
        fetch(*args, **kwargs)

    def release_sub_module(*args: Any, **kwargs: Any) -> None:
        released.holds = True
        try:
            release(*args, **kwargs)
        finally:
            released.holds = False

    def release_and_reset_all(*args: Any, **kwargs: Any) -> None:
        release_all(*args, **kwargs)
        released.clear()

    _free_by_engine()
    for parameter in parameters:
        setattr(parameter, _RELEASED, released)
    replace(coordinator, "fetch_sub_module", fetch_sub_module)
    replace(coordinator, "release_sub_module", release_sub_module)
    replace(coordinator, "release_and_reset_all", release_and_reset_all)
    patch(coordinator, _LIMIT, NO_LIMIT, library=DEEPSPEED, source_hash=None)


@functools.cache
def _free_by_engine() -> None:
    """Replace `free_param` once per process; parameters that no engine has marked are freed as before."""
    from deepspeed.runtime.zero import partition_parameters

    original = rely_on(partition_parameters, "free_param")

    def free_param(param: Any) -> None:
        released = getattr(param, _RELEASED, None)
        if released is None:
            original(param)
            return
        if param.ds_active_sub_modules:
            raise RuntimeError(f"DeepSpeed would free a parameter that is still in use: {param.ds_summary()}")
        released.add(param.data)
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        param.ds_status = partition_parameters.ZeroParamStatus.NOT_AVAILABLE

    replace(partition_parameters, "free_param", free_param)


class _Released:
    """Memory of released parameters, kept until the stream `gathering` may use it again.

    That is when the next module but one begins. By then the GPU has usually finished what is waited for, and
    still has the module in between to compute.
    """

    def __init__(self, gathering: Any, streams: Any) -> None:
        self.holds = False
        """Whether a module releases the parameters. If not, they were gathered for a moment only."""
        self._gathering = gathering
        self._current_stream = streams.current_stream
        self._latest: list[torch.Tensor] = []
        self._earlier: list[torch.Tensor] = []
        self._began = streams.Event()

    def add(self, memory: torch.Tensor) -> None:
        if self.holds:
            self._latest.append(memory)
        else:
            self._gathering.wait_stream(self._current_stream())

    def advance(self) -> None:
        """Reuse what was released before the latest module began: the next one begins now."""
        self._gathering.wait_event(self._began)
        self._earlier, self._latest = self._latest, []
        self._began.record()

    def clear(self) -> None:
        self._gathering.wait_stream(self._current_stream())
        self._earlier, self._latest = [], []
