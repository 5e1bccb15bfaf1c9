"""DeepSpeed: ZeRO-0 to 3, offloading to host memory and NVMe, and AutoTP. Read in 0.19.8."""

import posixpath
from typing import Any

from shardwise.engines.deepspeed import policy
from shardwise.engines.deepspeed.config import (
    NEVER_RELEASE,
    RELEASE_AT,
    accelerate_config,
    own_config,
    sums_in_fp32,
    trainer_config,
)
from shardwise.engines.deepspeed.memory.zero012 import Zero0Memory, Zero12Memory
from shardwise.engines.deepspeed.memory.zero3 import Zero3Memory
from shardwise.engines.deepspeed.rules import RULES
from shardwise.engines.deepspeed.time import Zero0, Zero3, Zero12
from shardwise.engines.descriptor import MIB, NCCL_BYTES, EngineSpec, ScriptFiles, Shards
from shardwise.job import schema
from shardwise.strategy import Strategy

OWN, FOR_TRAINER = "deepspeed.json", "deepspeed.auto.json"

TIMEOUT_MINUTES = 60  # How long ranks wait for those of a node that loads later; DeepSpeed's default is 10

PROCESS_BYTES = 104 * MIB
"""What every row with DeepSpeed on one GPU has, at any stage and with any offload, in addition to NCCL, which
it starts there too."""

GROUP_BYTES = 98 * MIB
"""What DeepSpeed adds on 2 and 4 GPUs, and FSDP2 does not, unless all of them share each layer (AutoTP)."""

TENSOR_AND_DATA_BYTES = 486 * MIB
"""What two tensor-parallel groups of two GPUs each add, Llama and Qwen3: there are three groups, of all, of
the same rows, of the same part of the model."""


GATHERS_BYTES = 56 * MIB
"""What CUDA graphs with ZeRO-3's gathers take in the row where they take most (TinyLlama on 2 GPUs). Other
rows take up to 106 MiB less than is predicted so; why is not known (decision 0105)."""


class DeepSpeed(EngineSpec):
    """ZeRO shards the optimizer from stage 1 on, gradients from 2 on, parameters at 3."""

    name = "deepspeed"
    memories = (Zero0Memory, Zero12Memory, Zero12Memory, Zero3Memory)
    schedules = (Zero0, Zero12, Zero12, Zero3)
    runtime = "shardwise.engines.deepspeed.runtime.engine:DeepSpeedEngine"
    rules = RULES
    default_stage = 2
    tensor_parallel = True
    copies_weights = quantizes_collectives = True
    accelerate_type = "DEEPSPEED"

    def changed_settings(self, before: Strategy, after: Strategy) -> list[str]:
        settings = []
        if before.stage != after.stage:
            settings.append(f"ZeRO stage {after.stage}")
        if before.reshard != after.reshard:
            limit = RELEASE_AT if after.reshard else NEVER_RELEASE
            settings.append(f"stage3_max_live_parameters and stage3_max_reuse_distance: {limit:.0e}")
        if before.offload_optimizer != after.offload_optimizer:
            settings.append(f"offload_optimizer to {after.offload_optimizer}")
        if before.offload_parameters != after.offload_parameters:
            settings.append(f"offload_param to {after.offload_parameters}")
        return settings

    def shards(self, stage: int) -> Shards:
        return Shards(optimizer=stage >= 1, gradients=stage >= 2, parameters=stage >= 3)

    def has_buckets(self, stage: int) -> bool:
        return stage > 0

    def sums_in_bf16(self, strategy: Strategy, *, lora: bool) -> bool:
        return strategy.precision == "bf16" and strategy.accumulation > 1 and not sums_in_fp32(strategy)

    def outside_allocator_bytes(self, strategy: Strategy) -> int:
        """There is as much as NCCL takes on top with several GPUs, but not under ZeRO-3 with offloading.

        Why is not known. That offloading the optimizer alone is enough for that was seen in a held-out row,
        after everything else was fixed.
        """
        together = strategy.world_size > 1
        total = super().outside_allocator_bytes(strategy) + PROCESS_BYTES
        total += 0 if together else NCCL_BYTES  # it starts NCCL on one GPU, too
        if strategy.data_parallel > 1:
            total += GROUP_BYTES
        offloads = strategy.offloads
        if together and not (strategy.stage == 3 and offloads):
            total += NCCL_BYTES
        if together and strategy.stage == 3 and policy.records(strategy):
            total += GATHERS_BYTES
        if strategy.tensor_parallel > 1 and strategy.data_parallel > 1:
            total += TENSOR_AND_DATA_BYTES
        return total

    def script_files(
        self, strategy: Strategy, optimizer: schema.Optimizer | None, trainable_parameters: int
    ) -> ScriptFiles:
        files = {
            OWN: own_config(strategy, optimizer, trainable_parameters=trainable_parameters),
            FOR_TRAINER: trainer_config(strategy, trainable_parameters=trainable_parameters),
        }
        duty = f"train.py has to read {OWN} itself: deepspeed.initialize(config=...)"
        return ScriptFiles(files=files, flags=(("deepspeed", f"$here/{FOR_TRAINER}"),), duty=duty)

    def accelerate_files(self, strategy: Strategy, trainable_parameters: int) -> ScriptFiles:
        config = accelerate_config(strategy, trainable_parameters=trainable_parameters)
        return ScriptFiles(files={OWN: config}, flags=(("deepspeed_config_file", f"$here/{OWN}"),))

    def accelerate_settings(self, strategy: Strategy, *, nodes: int, folder: str) -> dict[str, Any]:
        """What the DeepSpeed file says must not be repeated here, the precision included."""
        config: dict[str, Any] = {
            "deepspeed_config_file": posixpath.join(folder, OWN),
            "zero3_init_flag": strategy.stage == 3,
        }
        if nodes > 1:  # the same command on every node; the default needs ssh between them
            config["deepspeed_multinode_launcher"] = "standard"
        return {"deepspeed_config": config}

    def script_notes(self, strategy: Strategy, target: str, *, own_optimizer: bool) -> list[str]:
        if target == "accelerate" or (own_optimizer and strategy.offload_optimizer == "none"):
            return []
        if not own_optimizer:
            return [f"{OWN} has the peak learning rate: an own script sets warm-up and schedule"]
        return ["an own deepspeed.initialize needs deepspeed.ops.adam.DeepSpeedCPUAdam as its optimizer"]

    def slurm_exports(self) -> list[str]:
        return [f"export DEEPSPEED_TIMEOUT={TIMEOUT_MINUTES}  # minutes, where the script sets none"]
