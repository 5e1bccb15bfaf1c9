"""PyTorch's FSDP2 (`fully_shard`): every block is a group, gathered while it runs."""

from typing import Any

from shardwise.engines.descriptor import EngineSpec, ScriptFiles, Shards
from shardwise.engines.facts import Rule
from shardwise.engines.fsdp2.memory import Fsdp2Memory
from shardwise.engines.fsdp2.time import Fsdp2Schedule
from shardwise.job import schema
from shardwise.job.strategies import Parts
from shardwise.strategy import Strategy

TORCH = "torch>=2.10,<2.14"  # Versions whose sources were read

FILE = "fsdp.json"


class Fsdp2(EngineSpec):
    """Shards parameters, gradients and optimizer over all ranks."""

    name = "fsdp2"
    memories, schedules = (Fsdp2Memory,), (Fsdp2Schedule,)
    of_torch = "FSDP2"
    runtime = "shardwise.engines.fsdp2.runtime:FsdpEngine"
    sets_checkpointing = True
    accelerate_type = "FSDP"
    rules = (
        Rule(
            name="fsdp-offloads-everything-to-the-host",
            broken=lambda f: f.strategy.offload_optimizer != f.strategy.offload_parameters or f.uses_nvme,
            reason="FSDP2 offloads parameters and optimizer together, and to host memory only",
            where="strategy.offload_parameters",
            fix="offload_parameters: cpu, with offload_optimizer left out",
            source="torch.distributed.fsdp.CPUOffloadPolicy",
            versions=TORCH,
        ),
    )

    def parts(self, spec: schema.StrategySpec) -> Parts:
        parts = super().parts(spec)
        if spec.offload_parameters == "cpu":
            parts["offload_optimizer"] = "cpu"  # FSDP2 steps the parameters where they are
        return parts

    def changed_settings(self, before: Strategy, after: Strategy) -> list[str]:
        settings = []
        if before.reshard != after.reshard:
            settings.append(f"fsdp_reshard_after_forward: {str(after.reshard).lower()}")
        if _places(before) != _places(after):
            settings.append(f"fsdp_offload_params: {str(after.offload_parameters == 'cpu').lower()}")
        return settings

    def shards(self, stage: int) -> Shards:
        return Shards(optimizer=True, gradients=True, parameters=True)

    def sums_in_bf16(self, strategy: Strategy, *, lora: bool) -> bool:
        """HSDP adds up what it has reduced within a group, in the format of that."""
        sums = strategy.accumulation > 1 and strategy.shard_group > 0
        return sums and strategy.reduced_in("fp32") == "bf16"

    def script_files(
        self, strategy: Strategy, optimizer: schema.Optimizer | None, trainable_parameters: int
    ) -> ScriptFiles:
        settings = _settings(strategy)
        if strategy.offload_parameters == "cpu":
            settings["cpu_offload"] = True
        return ScriptFiles(files={FILE: settings}, flags=(("fsdp", ""), ("fsdp_config", f"$here/{FILE}")))

    def accelerate_settings(self, strategy: Strategy, *, nodes: int, folder: str) -> dict[str, Any]:
        settings = _settings(strategy) | {"offload_params": strategy.offload_parameters == "cpu"}
        values: dict[str, Any] = {
            "fsdp_config": {f"fsdp_{name}": value for name, value in settings.items()},
            "mixed_precision": "no" if strategy.precision == "fp32" else strategy.precision,
        }
        if strategy.shard_group:
            sizes = {"replicate": strategy.data_parallel // strategy.sharers, "shard": strategy.sharers}
            mesh = {f"parallelism_config_dp_{name}_size": size for name, size in sizes.items()}
            values["parallelism_config"] = mesh
        return values

    def script_notes(self, strategy: Strategy, target: str, *, own_optimizer: bool) -> list[str]:
        notes = []
        if strategy.checkpoint_every > 1:
            every = f"not every {strategy.checkpoint_every}th"
            notes.append(f"every block is recomputed, {every}: FSDP's setting is all")
        if strategy.shard_group and target != "accelerate":
            mesh = f"({strategy.data_parallel // strategy.sharers}, {strategy.sharers})"
            notes.append(f"HSDP is a mesh of {mesh} ranks: parallelism_config of the Trainer's arguments")
        if strategy.reduce_dtype != "auto":
            notes.append(
                f"gradients in {strategy.reduce_dtype}: MixedPrecisionPolicy.reduce_dtype of the script"
            )
        if target != "accelerate":
            notes.append("the launch script only starts processes: an own script calls fully_shard itself")
        return notes


def _places(strategy: Strategy) -> tuple[str, str]:
    return strategy.offload_optimizer, strategy.offload_parameters


def _settings(strategy: Strategy) -> dict[str, Any]:
    """FSDP2 as the Trainer's `fsdp_config` names it; Accelerate's YAML puts `fsdp_` before each key."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": strategy.reshard,
        "activation_checkpointing": strategy.checkpoint_every > 0,
        # one file that loads as a model, instead of shards
        "state_dict_type": "FULL_STATE_DICT",
    }
