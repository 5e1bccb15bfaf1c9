"""What tests/distributed/test_quantization_runs.py runs inside the processes: adapters on a quantised base.

The model comes the way a job's does: built on the meta device, its layers replaced, filled block by block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import engine_worker as w
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engines.runtime.protocol import Engine, World, build_engine
from shardwise.job.schema import Lora, Model
from shardwise.kernels.lora_linear import fuse_lora
from shardwise.kernels.lora_shared import share_inputs
from shardwise.kernels.quantized_linear import QuantizedLinear
from shardwise.models.adapters import dequantize_linears
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.structure import DTYPES
from shardwise.objective.causal_lm import CausalLM
from shardwise.strategy import Strategy

CONFIG = {
    "model_type": "llama",
    "vocab_size": w.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mlp_bias": True,
    "initializer_range": 0.2,
}


def engines(world: World) -> dict[str, Strategy]:
    """Of those that move frozen weights in another way, each one; ZeRO-3 last (see engine_scenarios)."""
    alone = {"single": Strategy(engine="single")} if world.size == 1 else {}
    return alone | {
        "fsdp2": Strategy(engine="fsdp2"),
        "fsdp2-offload": Strategy(engine="fsdp2", offload_optimizer="cpu", offload_parameters="cpu"),
        "zero0": Strategy(engine="deepspeed", stage=0),
        "zero1": Strategy(engine="deepspeed", stage=1),
        "zero2": Strategy(engine="deepspeed", stage=2),
        "zero3": Strategy(engine="deepspeed", stage=3),
        "zero3-offload-parameters": Strategy(engine="deepspeed", stage=3, offload_parameters="cpu"),
    }


def build(folder: Path, quantization: str, precision: str) -> BuiltModel:
    source = folder / f"model-{os.environ['RANK']}"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps(CONFIG))
    model = Model(
        source=str(source), weights="random", lora=Lora(rank=4, alpha=8.0), quantization=quantization
    )
    return build_model(model, dtype=DTYPES[precision], seed=3)


def engine_for(
    folder: Path, quantization: str, strategy: Strategy, world: World, *, fused: bool = True
) -> tuple[Engine, BuiltModel]:
    built = build(folder, quantization, strategy.precision)
    if fused:
        assert fuse_lora(built.model) == 14
        share_inputs(built.model)
    module = CausalLM(built.model)
    return build_engine(strategy, module, built.blocks, built.weights.fill, w.OPTIMIZER, world), built


def reference(
    folder: Path, quantization: str, precision: str, steps: range
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Float64 in one process and plain torch, on the values that the quantised layers stand for."""
    built = build(folder, quantization, precision)
    built.weights.fill(built.model, torch.device("cpu"))
    dequantize_linears(built.model)

    def exact(_: torch.dtype) -> tuple[nn.Module, list[nn.Module]]:
        return w.SummedLoss(built.model.double()), built.blocks

    return w.reference(steps, model=exact)


def stored_bytes(engine: Engine) -> int:
    """Bytes of the quantised weights that this rank holds between steps, scales left out."""
    root = getattr(engine, "module", None) or engine._engine.module  # type: ignore[attr-defined]
    return sum(_local(layer.weight) for layer in _layers(root))


def _layers(root: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in root.modules() if isinstance(module, QuantizedLinear))


def _local(weight: Any) -> int:
    if hasattr(weight, "ds_tensor"):
        weight = weight.ds_tensor
    elif hasattr(weight, "to_local"):
        weight = weight.to_local()
    return weight.numel() * weight.element_size()


def base_is_right(engine: Engine, built: BuiltModel) -> bool:
    """Whether the quantised weights that the engine gives back after training are those of the source."""
    names = [name for name, _ in built.model.named_parameters() if name.endswith("proj.base_layer.weight")]
    gathered = list(engine.weights(names))
    if engine.world.rank != 0:
        return True
    return built.weights.verify(gathered) == len(names) == 14


def resumes(engine: Engine, quantization: str, strategy: Strategy, place: Path) -> bool:
    """Whether a new engine that loads what this one saves takes the same next step, to the bit."""
    place.mkdir(exist_ok=True)
    dist.barrier()
    engine.save(place)
    (straight,) = w.train(engine, strategy, range(4, 5))
    other, _ = engine_for(place.parent, quantization, strategy, engine.world)
    w.train(other, strategy, range(9, 10))  # what is loaded has to replace this
    other.load(place)
    (resumed,) = w.train(other, strategy, range(4, 5))
    mine, theirs = dict(engine.weights()), dict(other.weights())
    return straight.loss.item() == resumed.loss.item() and all(mine[n].equal(theirs[n]) for n in mine)


def codes_as_gathered(engine: Engine, built: BuiltModel) -> tuple[bool, bool]:
    """Whether FSDP2's blocks compute with the codes of the source, and whether some of those are NaN."""
    built.weights.fill(built.model, torch.device("cpu"))
    root = engine.module  # type: ignore[attr-defined]
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
    pairs = [(a.weight, b.weight) for a, b in zip(_layers(root), _layers(built.model), strict=True)]
    bits = [(a.detach().view(torch.uint8), b.detach().view(torch.uint8)) for a, b in pairs]
    return all(a.equal(b) for a, b in bits), any(bool(b.isnan().any()) for _, b in pairs)


def copy_as_cuda(into: Sequence[torch.Tensor], of: Sequence[torch.Tensor], *rest: Any) -> None:
    """`torch._foreach_copy_` as on CUDA, where 16 bits go through fp32: every NaN becomes the same one."""
    FOREACH_COPY(into, [_through_fp32(one) for one in of], *rest)


def _through_fp32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x
    return x.view(torch.int16).masked_fill(x.isnan(), 0x7FFF).view(x.dtype)


FOREACH_COPY = torch._foreach_copy_
