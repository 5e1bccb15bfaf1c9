"""What there is to know of an engine, in one value: its words, rules, simulated memory and time, and files.

A new engine is a folder with a `spec.py` that subclasses `EngineSpec`, and a line in the registry
(`engines/__init__.py`). Nothing outside compares the name of an engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from shardwise.engines.facts import Rule
from shardwise.errors import JobError, Problem
from shardwise.hardware.hardware import Hardware
from shardwise.job import schema
from shardwise.job.strategies import Parts
from shardwise.simulate.memory.engine import EngineMemory, WithFp32Parameters
from shardwise.simulate.memory.replay import Run, peak_of, replayed
from shardwise.simulate.prediction import Memory
from shardwise.simulate.step_trace import StepTrace, fp32_parameters, without
from shardwise.simulate.time.schedule import Schedule
from shardwise.simulate.time.step import Played, play_steps
from shardwise.strategy import Strategy

MIB = 1024**2

CONTEXT_BYTES = 1316 * MIB
"""CUDA's context and the kernels of torch, cuBLAS and cuDNN: every row on one GPU without DeepSpeed. Where no
attention runs in cuDNN (GPT-Neo, Gemma, Phi-3), it is 16 MiB less."""

NCCL_BYTES = 286 * MIB
"""NCCL's kernels, channels and buffers: what FSDP2 has on 4 GPUs and not on one; 284 MiB on 2."""


class Shards(NamedTuple):
    """Which model states the data-parallel ranks share; the rest is replicated."""

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptFiles:
    """Configuration files for a user's own training script, and the flags that name them."""

    files: Mapping[str, Mapping[str, Any]]  # JSON values by file name
    flags: tuple[tuple[str, str], ...] = ()  # Name and value; a value of `$here/NAME` is a file of these
    duty: str = ""  # Of a script that is no Trainer's


class EngineSpec:
    """An engine's descriptor; methods that a subclass leaves out stand for an engine without that feature."""

    name: str  # Its key in `job.strategies.ENGINES`
    memories: ClassVar[tuple[Callable[[StepTrace, Strategy], EngineMemory], ...]]
    """By ZeRO stage, a single one without stages: the engine's allocations, before anything is built."""
    schedules: tuple[type[Schedule], ...]  # By ZeRO stage: the engine's work on the streams of one GPU
    runtime: str  # `module:class` that trains, which imports torch
    rules: tuple[Rule, ...] = ()  # What it cannot combine
    plain = False  # Whether it is PyTorch alone, in one process: where nothing is gained, the simplest choice
    of_torch = ""  # What PyTorch calls it, where the launcher of DeepSpeed cannot start it
    only_for: Literal["adapters", "all weights"] | None = None  # What `auto` takes it for, on several GPUs
    default_stage: int | None = None  # ZeRO stage of a job that names none; None for an engine without stages
    tensor_parallel = False  # Whether it can split layers over GPUs
    pipeline = False  # Whether it can put blocks on different GPUs
    compresses_gradients = False  # Whether PowerSGD can be asked for
    quantizes_collectives = False  # Whether weights and gradients can be sent in fewer bits
    copies_weights = False
    """Whether the groups of `shard_group` hold second copies of the weights; if not, of all states."""
    keeps_fp32 = False  # Whether it trains fp32 parameters among others; if not, they are kept apart from it
    sets_checkpointing = False
    """Whether its own settings turn activation checkpointing on, in a script of Hugging Face's Trainer."""
    accelerate_type: str | None = None  # `distributed_type` of Accelerate's YAML; None: it does not run there

    # From a job and back

    def parts(self, spec: schema.StrategySpec) -> Parts:
        """Fields of the `Strategy` for what a job names."""
        stage = self.default_stage if spec.stage is None else spec.stage
        return {**spec.model_dump(), "stage": stage if self.default_stage is not None else 0}

    def problems(self, spec: schema.StrategySpec) -> list[Problem]:
        """What is wrong with a job's parts and would not show in the strategy."""
        if spec.stage is None or self.default_stage is not None:
            return []
        fix = "strategy.engine: deepspeed, or leave stage out"
        what = f"stage is DeepSpeed's ZeRO stage; {self.name} has none"
        return [Problem(what=what, where="strategy.stage", fix=fix)]

    def settings(self, strategy: Strategy) -> schema.StrategySpec:
        """The job's `strategy` section for a strategy: the inverse of `parts`."""
        values = {k: v for k, v in asdict(strategy).items() if k in schema.StrategySpec.model_fields}
        if self.default_stage is None:
            values["stage"] = None
        return schema.StrategySpec.model_validate(values)

    def changed_settings(self, before: Strategy, after: Strategy) -> list[str]:
        """How the engine's own configuration files say what differs: offloading, sharding, resharding."""
        return []

    # What it does

    def shards(self, stage: int) -> Shards:
        return Shards()

    def has_buckets(self, stage: int) -> bool:
        """Whether gradients are reduced in buckets of `Strategy.bucket` elements."""
        return False

    def sums_in_bf16(self, strategy: Strategy, *, lora: bool) -> bool:
        """Whether a step's micro-batches are added up in bf16, and not in fp32."""
        return False

    def memory(self, trace: StepTrace, strategy: Strategy) -> EngineMemory:
        make, apart = self.memories[strategy.stage], fp32_parameters(trace, strategy.precision)
        if self.keeps_fp32 or not apart:
            return make(trace, strategy)
        return WithFp32Parameters(make(without(trace, apart), strategy), trace, apart, strategy.optimizer)

    def schedule(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Schedule:
        return self.schedules[strategy.stage](trace, strategy, hardware)

    def peak_memory(
        self, trace: StepTrace, strategy: Strategy, hardware: Hardware, *, capacity_bytes: int
    ) -> Memory:
        """Memory of the fullest GPU. `capacity_bytes`: what the process may use of it, context included."""
        outside = self.outside_allocator_bytes(strategy)
        sizes = {"outside_allocator_bytes": outside, "capacity_bytes": capacity_bytes}
        found = [peak_of(run, hardware, **sizes) for run in self.runs(trace, strategy, hardware)]
        return max(found, key=lambda memory: memory.needed_bytes)

    def runs(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> list[Run]:
        """A replay for each GPU of which one is the fullest."""
        return [lambda size: replayed(trace, strategy, hardware, self.memory(trace, strategy), size)]

    def play(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Played:
        """One GPU's step in the steady state."""
        return play_steps(strategy, lambda one: self.schedule(trace, one, hardware))

    def outside_allocator_bytes(self, strategy: Strategy) -> int:
        """GPU memory of a training process that torch's allocator does not know: context, kernels, NCCL.

        Measured by NVML, less what torch had reserved (`outside_allocator_bytes` in the accuracy ledger,
        benchmarks/accuracy/results/measured.jsonl: H200, driver 580, torch 2.11, DeepSpeed 0.19.8; one node
        of 1, 2 and 4 GPUs). It hardly depends on the model, and not on the batch. Other GPUs and several
        nodes are assumed to be alike until they are measured.
        """
        return CONTEXT_BYTES + (NCCL_BYTES if strategy.world_size > 1 else 0)

    # Files for a user's own script

    def check_launcher(self, target: str, strategy: Strategy) -> None:
        """Raise JobError where a launcher cannot start the strategy."""
        if self.of_torch and target == "deepspeed":
            what = f"the strategy is {self.of_torch}, which is no part of DeepSpeed"
            raise JobError(what, where="--to deepspeed", fix="--to accelerate or --to torchrun")

    def script_files(
        self, strategy: Strategy, optimizer: schema.Optimizer | None, trainable_parameters: int
    ) -> ScriptFiles:
        """For scripts that call the engine, or Hugging Face's Trainer; flags are the Trainer's."""
        return ScriptFiles(files={})

    def accelerate_files(self, strategy: Strategy, trainable_parameters: int) -> ScriptFiles:
        """For scripts that call Accelerator; flags are those of `accelerate launch`."""
        return ScriptFiles(files={})

    def accelerate_settings(self, strategy: Strategy, *, nodes: int, folder: str) -> dict[str, Any]:
        """The engine's keys in Accelerate's YAML; `folder`: where the files will lie."""
        return {}

    def script_notes(self, strategy: Strategy, target: str, *, own_optimizer: bool) -> list[str]:
        """What the files cannot say; `own_optimizer`: the script brings its own."""
        return []

    def slurm_exports(self) -> list[str]:
        """Lines for a batch script on several nodes."""
        return []
