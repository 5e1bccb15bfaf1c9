"""Pipeline parallelism: stages of blocks on one GPU after the other, in plain PyTorch."""

from functools import partial

from shardwise.engines.descriptor import MIB, EngineSpec, Shards
from shardwise.engines.facts import Architecture, Facts, Rule, no_offload
from shardwise.engines.fsdp2.spec import TORCH
from shardwise.engines.pipeline.memory import runs
from shardwise.engines.pipeline.stages import rounds, stage_count
from shardwise.engines.pipeline.time import play_pipeline
from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.replay import Run
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.step import Played
from shardwise.strategy import Strategy

PEER_BYTES = 1420 * MIB
"""What NCCL takes to exchange activations with another stage over NVLink, measured on two stages. A stage in
the middle is assumed to take as much for each of its two neighbours."""

_of_torch = partial(Rule, versions=TORCH)


def _stages_reason(facts: Facts) -> str:
    assert facts.architecture is not None
    return f"{facts.architecture.blocks} blocks cannot be cut into {stage_count(facts.strategy)} stages"


def _uneven_rounds(facts: Facts) -> bool:
    strategy = facts.strategy
    turns = rounds(strategy.pipeline, strategy.accumulation)
    return strategy.pipeline_schedule == "interleaved" and strategy.accumulation % turns > 0


STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"})
"""What the runtime does of a plan; embeddings stay complete."""


def _split(facts: Facts) -> Architecture | None:
    """The model where its layers are split and it is known; Mamba is no pipeline's."""
    return facts.architecture if facts.strategy.tensor_parallel > 1 else None


class Pipeline(EngineSpec):
    """torch.distributed.pipelining over stages of blocks; ZeRO-1 over the ranks of a stage."""

    name = "pipeline"
    runtime = "shardwise.engines.pipeline.runtime.engine:PipelineEngine"
    pipeline = tensor_parallel = True
    rules = (
        Rule(
            name="pipeline-needs-two-stages",
            broken=lambda f: f.strategy.pipeline == 1,
            reason="a pipeline has at least two stages",
            where="strategy.pipeline",
            fix="strategy.pipeline: 2, or another engine",
            source="arithmetic",
        ),
        Rule(
            name="pipeline-needs-a-block-a-stage",
            broken=lambda f: f.architecture is not None and f.architecture.blocks < stage_count(f.strategy),
            reason=_stages_reason,
            where="strategy.pipeline",
            fix="fewer stages: a smaller strategy.pipeline, or pipeline_schedule: 1f1b",
            source="arithmetic",
        ),
        Rule(
            name="pipeline-needs-a-known-model",
            broken=lambda f: f.architecture is not None and not f.architecture.stages,
            reason="this architecture is not known to pass only hidden states from block to block, or it has "
            "a router loss over all blocks",
            where="strategy.pipeline",
            fix="strategy: fsdp2 or zero3, which need no cut",
            source="shardwise.models.families: stages; compared with the uncut model in tests",
        ),
        _of_torch(
            name="1f1b-needs-a-micro-batch-a-stage",
            broken=lambda f: (
                f.strategy.pipeline_schedule == "1f1b" and f.strategy.accumulation < f.strategy.pipeline
            ),
            reason=lambda f: (
                f"{f.strategy.accumulation} micro-batches a step do not fill {f.strategy.pipeline} stages"
            ),
            where="train.micro_batch, train.global_batch",
            fix="a smaller train.micro_batch, a larger train.global_batch, or pipeline_schedule: gpipe",
            source="torch.distributed.pipelining: Schedule1F1B",
        ),
        _of_torch(
            name="interleaved-rounds-are-even",
            broken=_uneven_rounds,
            reason=lambda f: (
                f"the interleaved schedule cannot take {f.strategy.accumulation} micro-batches in "
                f"{rounds(f.strategy.pipeline, f.strategy.accumulation)} equal rounds"
            ),
            where="train.micro_batch, train.global_batch",
            fix="as many micro-batches as a multiple of strategy.pipeline",
            source="torch.distributed.pipelining: ScheduleInterleaved1F1B",
        ),
        Rule(
            name="stages-divide-key-value-heads",
            broken=lambda f: (
                (shape := _split(f)) is not None and shape.key_value_heads % f.strategy.tensor_parallel > 0
            ),
            reason="the GPUs of a stage cannot share the key-value heads equally",
            where="strategy.tensor_parallel",
            fix="a divisor of the number of key-value heads",
            source="arithmetic",
        ),
        Rule(
            name="stages-need-a-plan",
            broken=lambda f: (
                (shape := _split(f)) is not None
                and (not shape.plan_styles or bool(shape.plan_styles - STYLES) or shape.unplanned_weights)
            ),
            reason="transformers has no plan for it that splits layers by columns or rows only",
            where="strategy.tensor_parallel",
            fix="tensor_parallel: 1; more stages save memory, too",
            source="transformers: base_model_tp_plan of a config; shardwise.models.tensor_plan",
        ),
        Rule(
            name="stages-reduce-in-fp32",
            broken=lambda f: f.strategy.reduce_dtype not in ("auto", "fp32"),
            reason="the pipeline engine adds up and reduces gradients in fp32",
            where="strategy.reduce_dtype",
            fix="leave reduce_dtype out",
            source="shardwise.engines.pipeline.runtime.zero1",
        ),
        no_offload(
            "pipeline",
            "the pipeline engine",
            fix="leave offloading out; more stages or tensor_parallel also save memory",
        ),
    )

    def outside_allocator_bytes(self, strategy: Strategy) -> int:
        return super().outside_allocator_bytes(strategy) + min(strategy.pipeline - 1, 2) * PEER_BYTES

    def runs(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> list[Run]:
        return runs(trace, strategy, hardware)

    def play(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Played:
        return play_pipeline(trace, strategy, hardware)

    def shards(self, stage: int) -> Shards:
        return Shards(optimizer=True)

    def check_launcher(self, target: str, strategy: Strategy) -> None:
        what = f"{strategy.name} cuts the model itself: there are no settings for another training script"
        raise JobError(what, where=f"--to {target}", fix="shardwise train, or strategy: zero2, zero3, fsdp2")
