"""PyTorch's DistributedDataParallel: every rank has everything, and gradients may be sent compressed."""

from shardwise.engines.ddp.memory import AdapterMemory, DdpMemory, sums_once
from shardwise.engines.ddp.time import AdapterSchedule, DdpSchedule
from shardwise.engines.descriptor import EngineSpec
from shardwise.engines.facts import Rule, no_offload, several_processes
from shardwise.engines.fsdp2.spec import TORCH
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.engine import EngineMemory
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.schedule import Schedule
from shardwise.strategy import Strategy


class Ddp(EngineSpec):
    """Replicas; `memories` and `schedules` are those of all weights. `auto` takes it for adapters only."""

    name = "ddp"
    memories, schedules = (DdpMemory,), (DdpSchedule,)
    of_torch = "PyTorch's DDP"
    runtime = "shardwise.engines.ddp.runtime:DdpEngine"
    only_for = "adapters"
    keeps_fp32 = compresses_gradients = True
    accelerate_type = "MULTI_GPU"
    rules = (
        several_processes("ddp"),
        no_offload("ddp", "DistributedDataParallel"),
        Rule(
            name="powersgd-and-fp16",
            broken=lambda f: f.strategy.powersgd > 0 and f.strategy.precision == "fp16",
            reason="fp16 gradients overflow now and then, and PowerSGD would keep infinity as not sent",
            where="strategy.powersgd",
            fix="train.precision: bf16, or leave powersgd out",
            source="torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook: error_dict",
            versions=TORCH,
        ),
    )

    def sums_in_bf16(self, strategy: Strategy, *, lora: bool) -> bool:
        """DDP does, in its buckets. For adapters its buckets are used with PowerSGD alone."""
        in_buckets = not lora or strategy.powersgd > 0
        return in_buckets and strategy.precision == "bf16" and strategy.accumulation > 1

    def memory(self, trace: StepTrace, strategy: Strategy) -> EngineMemory:
        once = sums_once(trace, strategy)
        return AdapterMemory(trace, strategy) if once else super().memory(trace, strategy)

    def schedule(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Schedule:
        make = AdapterSchedule if sums_once(trace, strategy) else DdpSchedule
        return make(trace, strategy, hardware)

    def script_notes(self, strategy: Strategy, target: str, *, own_optimizer: bool) -> list[str]:
        if not strategy.powersgd and strategy.reduce_dtype == "auto":
            return []
        return ["compression is a hook: register_comm_hook, or Accelerate's DistributedDataParallelKwargs"]
