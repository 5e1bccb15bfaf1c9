"""ZeRO-3 gives gathered parameters back in the order of the streams (decision 0017).

DeepSpeed 0.19.8 gathers on a stream of its own and, when it lets a parameter go, marks its memory as used by
the computation (`record_stream`). The allocator then keeps it until the GPU has come that far, while the host
is blocks ahead and gathers the next ones into new memory. Here the gathering stream waits for the computation
instead, and the host, which then needs to wait for neither, may reuse the memory at once.
"""

from __future__ import annotations

from typing import Any

import torch

NO_LIMIT = 10**9


def release_in_order(optimizer: Any) -> None:
    """Makes a ZeRO-3 optimizer on a CUDA device wait on the GPU for the memory of parameters it lets go."""
    from deepspeed.runtime.zero import partition_parameters

    offload = optimizer.parameter_offload
    released = _Released(offload._DeepSpeedZeRoOffload__allgather_stream)
    coordinator = offload.get_param_coordinator()
    fetch = coordinator.fetch_sub_module
    release = coordinator.release_sub_module
    release_all = coordinator.release_and_reset_all

    def free_param(param: Any) -> None:
        if param.ds_active_sub_modules:
            raise RuntimeError(f"a parameter that is still in use would be freed: {param.ds_summary()}")
        released.add(param.data)
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        param.ds_status = partition_parameters.ZeroParamStatus.NOT_AVAILABLE

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

    partition_parameters.free_param = free_param
    coordinator.fetch_sub_module = fetch_sub_module
    coordinator.release_sub_module = release_sub_module
    coordinator.release_and_reset_all = release_and_reset_all
    coordinator._PartitionedParameterCoordinator__max_ongoing_fetch_events = NO_LIMIT


class _Released:
    """Memory of parameters that were let go, until `gathering` may use it again.

    That is when the next but one module begins: by then the GPU has, as a rule, done what is waited for, and
    has the module between to go on with.
    """

    def __init__(self, gathering: torch.cuda.Stream) -> None:
        self.holds = False
        """Whether what is added is let go by a module; if not, by somebody who gathered it for a moment."""
        self._gathering = gathering
        self._latest: list[torch.Tensor] = []
        self._earlier: list[torch.Tensor] = []
        self._began = torch.cuda.Event()

    def add(self, memory: torch.Tensor) -> None:
        if self.holds:
            self._latest.append(memory)
        else:
            self._gathering.wait_stream(torch.cuda.current_stream())

    def advance(self) -> None:
        """A module begins."""
        self._gathering.wait_event(self._began)
        self._earlier, self._latest = self._latest, []
        self._began.record()

    def clear(self) -> None:
        self._gathering.wait_stream(torch.cuda.current_stream())
        self._earlier, self._latest = [], []
