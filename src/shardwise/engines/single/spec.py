"""The engine that runs in one process and shards nothing."""

from shardwise.engines.descriptor import EngineSpec
from shardwise.engines.facts import Rule, no_offload
from shardwise.engines.single.memory import SingleMemory
from shardwise.engines.single.time import SingleSchedule
from shardwise.errors import JobError
from shardwise.strategy import Strategy


class Single(EngineSpec):
    """One process; AdamW over fp32 weights."""

    name = "single"
    plain = True
    memories, schedules = (SingleMemory,), (SingleSchedule,)
    runtime = "shardwise.engines.single.runtime:SingleEngine"
    keeps_fp32 = True
    rules = (
        Rule(
            name="single-is-one-process",
            broken=lambda f: f.world_size != 1,
            reason="the single engine runs in one process, and there are several",
            where="strategy.engine",
            fix="--processes 1, or a strategy that shards: zero2, zero3, fsdp2",
            source="shardwise.engines.single.runtime",
        ),
        Rule(
            name="single-reduces-nothing",
            broken=lambda f: f.strategy.reduce_dtype != "auto",
            reason="one process sums no gradients over ranks",
            where="strategy.reduce_dtype",
            fix="leave reduce_dtype out",
            source="shardwise.engines.single.runtime",
        ),
        no_offload(
            "single",
            "the single engine",
            fix="strategy: zero2-offload or zero3-offload; both run in one process, too",
        ),
    )

    def check_launcher(self, target: str, strategy: Strategy) -> None:
        if target != "torchrun":
            what = f"{strategy.name} runs in one process and needs no configuration"
            raise JobError(what, where="--to", fix="--to torchrun, or `python train.py`")
