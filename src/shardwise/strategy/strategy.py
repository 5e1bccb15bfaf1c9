"""A strategy: how one optimizer step is spread over the GPUs. A frozen value, free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Engine = Literal["single", "deepspeed", "fsdp2"]
Place = Literal["none", "cpu", "nvme"]
Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Everything an engine needs to know, and nothing about the model or the data.

    `world_size = data_parallel * tensor_parallel`, and
    `global_batch = micro_batch * accumulation * data_parallel` (rows per optimizer step).
    """

    engine: Engine
    stage: int = 0
    offload_optimizer: Place = "none"
    offload_parameters: Place = "none"
    nvme_path: str | None = None
    reshard: bool = True
    tensor_parallel: int = 1
    data_parallel: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    precision: Precision = "bf16"
    checkpoint_every: int = 0
    """Recompute the activations of every n-th block; 0: of none, 1: of all."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0.0: no clipping."""

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.data_parallel

    @property
    def name(self) -> str:
        """Short name: `zero3-offload`, `fsdp2`, `autotp4-zero1`, `single`."""
        if self.engine == "single":
            return "single"
        parallel = f"autotp{self.tensor_parallel}-" if self.tensor_parallel > 1 else ""
        base = f"zero{self.stage}" if self.engine == "deepspeed" else "fsdp2"
        places = {self.offload_optimizer, self.offload_parameters} - {"none"}
        offload = "-nvme" if "nvme" in places else "-offload" if places else ""
        return f"{parallel}{base}{offload}{'' if self.reshard else '-noreshard'}"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}
