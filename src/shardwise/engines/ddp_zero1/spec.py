"""Replicas whose optimizer's state is sharded: ZeRO-1 in plain PyTorch, with recorded passes."""

from shardwise.engines.ddp_zero1.memory import DdpZero1Memory
from shardwise.engines.ddp_zero1.time import DdpZero1Schedule
from shardwise.engines.descriptor import EngineSpec, Shards
from shardwise.engines.facts import no_offload, several_processes
from shardwise.errors import JobError
from shardwise.strategy import Strategy


class DdpZero1(EngineSpec):
    """Every rank has all weights and gradients, and steps its part of the fp32 weights."""

    name = "ddp-zero1"
    memories, schedules = (DdpZero1Memory,), (DdpZero1Schedule,)
    runtime = "shardwise.engines.ddp_zero1.runtime:DdpZero1Engine"
    only_for = "all weights"
    keeps_fp32 = True
    rules = (several_processes("ddp-zero1"), no_offload("ddp-zero1", "ddp-zero1"))

    def shards(self, stage: int) -> Shards:
        return Shards(optimizer=True)

    def check_launcher(self, target: str, strategy: Strategy) -> None:
        what = "ddp-zero1 is shardwise's own, and runs with `shardwise train`"
        fix = "--set strategy=zero1, which shards as much; or --run shardwise, on a cluster"
        raise JobError(what, where=f"--to {target}", fix=fix)
