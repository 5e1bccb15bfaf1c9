"""PyTorch's DistributedDataParallel behind the engine protocol.

Every rank steps all fp32 weights. Gradients are averaged in buckets, in the computation's format, in
`reduce_dtype`, or as PowerSGD's factors (Vogels et al. 2019, https://arxiv.org/abs/1905.13727).

Those of adapters are small, and need no buckets: a rank's passes are those of a single process, recorded
where these are (decision 0083), and one all-reduce follows a step's last micro-batch.
"""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.parameters import Fill, trainable
from shardwise.engines.single.runtime import SingleEngine
from shardwise.models.structure import DTYPES

START = 10  # Steps before PowerSGD compresses: the first gradients are sent complete, as torch advises


class DdpEngine(SingleEngine):
    """A replica on each rank."""

    sharded = True  # Norms and losses are summed over ranks, each of which has a copy

    def _prepare(
        self, blocks: Sequence[nn.Module], fill: Fill
    ) -> tuple[dict[str, torch.Tensor], Collection[str]]:
        strategy, self.copies = self._strategy, self.world.size
        self._once = self._adapters() and not strategy.powersgd
        if self._once:
            return super()._prepare(blocks, fill)
        for part in (*blocks, self.module):
            fill(part, self.world.device)
        self._weights = trainable(self.module)
        self._masters = {
            name: weight if weight.dtype == torch.float32 else weight.detach().float()
            for name, weight in self._weights.items()
        }
        low_rank = strategy.powersgd > 0
        with warnings.catch_warnings():  # torch 2.13 has another name for it, which 2.11 does not know
            warnings.simplefilter("ignore", FutureWarning)
            self._ddp = DistributedDataParallel(
                self.module,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                # PowerSGD keeps tensors by bucket. With this search DDP never changes its buckets: a resumed
                # run has the same (reducer.hpp: should_rebuild_buckets).
                find_unused_parameters=low_rank,
            )
        if low_rank:
            own = dist.new_group()  # not between the sums of the search
            self._powersgd = PowerSGDState(own, strategy.powersgd, start_powerSGD_iter=START)
            on_cpu = self.world.device.type == "cpu"
            self._ddp.register_comm_hook(self._powersgd, _in_order if on_cpu else powerSGD_hook)
        elif strategy.reduce_dtype not in ("auto", strategy.precision):
            self._ddp.register_comm_hook(DTYPES[strategy.reduce_dtype], _average_in)
        return self._masters, ()

    def _that_stay(self, *, recorded: bool) -> list[torch.Tensor]:
        """Parts of one buffer."""
        masters = [*self._masters.values()]
        numel = sum(master.numel() for master in masters)
        self._buffer = torch.zeros(numel, dtype=torch.float32, device=self.world.device)
        parts = self._buffer.split([master.numel() for master in masters])
        return [part.view_as(master) for part, master in zip(parts, masters, strict=True)]

    def _begin(self, *, last: bool) -> None:
        if not self._once:
            self._ddp.require_backward_grad_sync = last  # as `no_sync` does

    def _loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        loss: torch.Tensor = self.module(micro_batch) if self._once else self._ddp(micro_batch)
        return loss

    def _sum_buffer(self) -> None:
        dtype = DTYPES[self._strategy.reduced_in(self._strategy.precision)]
        if dtype == torch.float32:
            dist.all_reduce(self._buffer)
            return
        sent = self._buffer.to(dtype).div_(self.world.size)  # as DDP, so that a sum in fp16 does not overflow
        dist.all_reduce(sent)
        self._buffer.copy_(sent).mul_(self.world.size)

    def _collect_gradients(self) -> None:
        if self._once:
            self._sum_buffer()
            return
        for name, weight in self._weights.items():
            master, average = self._masters[name], weight.grad
            assert average is not None
            if master is weight:
                average.mul_(self.world.size)
            else:
                master.grad = average.float().mul_(self.world.size)
                average.zero_()  # it is a part of a bucket

    def _private(self) -> dict[str, torch.Tensor]:
        """What PowerSGD keeps between steps."""
        if not self._strategy.powersgd:
            return {}
        state, kinds = self._powersgd, ("error_dict", "p_memory_dict", "q_memory_dict")
        kept = {f"powersgd/{kind}/{index}": t for kind in kinds for index, t in getattr(state, kind).items()}
        return {"powersgd/iter/0": torch.tensor(state.iter), **kept}

    def _load_private(self, saved: dict[str, torch.Tensor]) -> None:
        for name in saved if self._strategy.powersgd else ():
            _, kind, index = name.split("/")
            if kind == "iter":
                self._powersgd.iter = int(saved[name])
            else:
                getattr(self._powersgd, kind)[int(index)] = saved[name].to(self.world.device)

    def config(self) -> dict[str, Any]:
        strategy = self._strategy
        compressed = {"reduce_dtype": strategy.reduce_dtype, "powersgd": strategy.powersgd, "start": START}
        return {**super().config(), **compressed}


def _average_in(dtype: torch.dtype, bucket):  # type: ignore[no-untyped-def]  # DDP wants another or none
    """A hook that averages in another format; torch's own for bf16 does not run on CPUs."""
    full = bucket.buffer()
    sent = full.to(dtype).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: full.copy_(done.value()[0]))


def _in_order(state: PowerSGDState, bucket):  # type: ignore[no-untyped-def]
    """PowerSGD's hook on gloo, which would run the sums of several buckets in another order on each rank."""
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future
