"""A strategy: how one optimizer step is spread over the GPUs. A frozen value, free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

from shardwise.job.schema import BUCKET, BUCKET_OF_HOST, LEAST_BUCKET, MOST_BUCKET, OptimizerName
from shardwise.job.strategies import ENGINES

Place = Literal["none", "cpu", "nvme"]
Precision = Literal["bf16", "fp16", "fp32"]
ReduceDtype = Literal["auto", "bf16", "fp16", "fp32"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]

_WORD: dict[Place, str] = {"none": "", "cpu": "-offload", "nvme": "-nvme"}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Everything an engine needs to know, and nothing about the model or the data.

    `world_size = pipeline * data_parallel * tensor_parallel`, ranks counted in this order, and
    `global_batch = micro_batch * accumulation * data_parallel` (rows per optimizer step).
    """

    engine: str  # A key of `job.strategies.ENGINES`
    stage: int = 0
    offload_optimizer: Place = "none"
    offload_parameters: Place = "none"
    nvme_path: str | None = None
    reshard: bool = True
    shard_group: int = 0  # Consecutive ranks that hold one copy of the weights between them; 0: all
    quantized_weights: bool = False  # ZeRO++'s qwZ: weights are gathered in int8
    quantized_gradients: bool = False  # ZeRO++'s qgZ: gradients are exchanged in int4
    tensor_parallel: int = 1
    pipeline: int = 1  # Ranks that each hold some of the blocks, and pass activations on
    pipeline_schedule: PipelineSchedule = "1f1b"
    data_parallel: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    precision: Precision = "bf16"
    checkpoint_every: int = 0  # Recompute the activations of every n-th block; 0: of none, 1: of all
    powersgd: int = 0  # Rank of the two factors that DDP sends of a gradient; 0: all of it
    reduce_dtype: ReduceDtype = "auto"  # Format in which gradients are summed over ranks; auto: the engine's
    clip_norm: float = 1.0  # Largest global gradient norm; 0.0: no clipping
    optimizer: OptimizerName = "adamw"
    bucket: int | None = None  # As named in the job; `bucket_size` is what holds
    overlap_comm: bool = True  # Buckets are reduced during the backward pass; ZeRO-2 can do without

    @property
    def bucket_size(self) -> int:
        """Elements that DeepSpeed reduces, and below ZeRO-3 gathers, at once. ZeRO-1 and 2 have two."""
        usual = BUCKET if self.offload_optimizer == "none" else BUCKET_OF_HOST
        return usual if self.bucket is None else self.bucket

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data_parallel * self.tensor_parallel

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.data_parallel

    @property
    def offloads(self) -> bool:
        """Whether anything waits on the host or on a disk, so that the speed depends on them."""
        return {self.offload_optimizer, self.offload_parameters} != {"none"}

    def reduced_in(self, default: Precision) -> Precision:
        """The format in which gradients are summed, where the engine's own is `default`."""
        return default if self.reduce_dtype == "auto" else self.reduce_dtype

    @property
    def sharers(self) -> int:
        """Ranks that gather weights from each other: a group of `shard_group`, or all."""
        return self.shard_group or self.data_parallel

    @property
    def name(self) -> str:
        """Short name, another for every other engine, stage, place, resharding, group and parallel degree.

        `single`, `zero3-offload-optimizer`, `fsdp2-noreshard`, `fsdp2-hsdp8`, `autotp4-zero1`, `pp2-zero1`,
        `pp4-interleaved-tp2-zero1`, ...
        """
        words = ENGINES[self.engine]
        stages = f"pp{self.pipeline}-" if self.pipeline > 1 else ""
        stages += "" if self.pipeline_schedule == "1f1b" else f"{self.pipeline_schedule}-"
        parallel = f"{words.split}{self.tensor_parallel}-" if self.tensor_parallel > 1 else ""
        group = f"-{words.group}{self.shard_group}" if self.shard_group else ""
        group += "-qwz" * self.quantized_weights + "-qgz" * self.quantized_gradients
        base = words.base.format(stage=self.stage) + group
        reduce = "" if self.reduce_dtype == "auto" else f"-reduce-{self.reduce_dtype}"
        reduce += f"-powersgd{self.powersgd}" if self.powersgd else ""
        return f"{stages}{parallel}{base}{self._offload}{'' if self.reshard else '-noreshard'}{reduce}"

    @property
    def _offload(self) -> str:
        """Where things wait: for all that can (below ZeRO-3 only the optimizer), or thing by thing."""
        optimizer, parameters = self.offload_optimizer, self.offload_parameters
        only_optimizer = self.stage < ENGINES[self.engine].optimizer_only_below and parameters == "none"
        if optimizer == parameters or only_optimizer:
            return _WORD[optimizer]
        moved = {"optimizer": optimizer, "parameters": parameters}
        return "".join(f"{_WORD[place]}-{what}" for what, place in moved.items() if place != "none")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Strategy:
        """The value that `to_json` wrote. TypeError or ValueError where it did not."""
        if not isinstance(values, Mapping):
            raise TypeError(f"a strategy has keys: {values!r}")
        known = {key: value for key, value in values.items() if key != "name"}
        found = _adapter().validate_json(json.dumps(known), strict=True)
        unknown = known.keys() - {field.name for field in fields(cls)}
        each_at_least_one = (found.world_size, found.pipeline, found.tensor_parallel)
        least = min(*each_at_least_one, found.micro_batch, found.accumulation)
        wrong = least < 1 or found.shard_group < 0 or not 0 <= found.stage <= 3
        no_bucket = found.bucket is not None and not LEAST_BUCKET <= found.bucket <= MOST_BUCKET
        if unknown or found.engine not in ENGINES or wrong or no_bucket:
            raise ValueError(f"no strategy has these values: {known}")
        usual = replace(found, bucket=None)  # once always written down
        return usual if usual.bucket_size == found.bucket_size else found


@cache
def _adapter() -> TypeAdapter[Strategy]:
    return TypeAdapter(Strategy)
