"""On a GPU: quantised bases train beside bf16, take what the plan says, are no slower than bitsandbytes'."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, run_all
from test_quantization_runs import adapters_on, base_of
from test_whole_runs import losses
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines import descriptor
from shardwise.engines.runtime.protocol import World, build_engine
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Lora, Model, Optimizer
from shardwise.kernels.fused import apply_fused_kernels
from shardwise.kernels.quantized_linear import LAYERS, dequantize_int8
from shardwise.models.build import build_model
from shardwise.models.families import liger_kernels
from shardwise.models.structure import checkpoint_blocks
from shardwise.objective.causal_lm import CausalLM
from shardwise.strategy import Strategy
from shardwise.trace.trace import Tracer

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # kernels compiled for the first time and third-party code may warn
    pytest.mark.filterwarnings("default"),
]
DEVICE = torch.device("cuda", 0)
GPUS = max(count for count in (1, 2, 4) if count <= max(1, torch.cuda.device_count()))
ROWS, SEQUENCE, LAYERS_OF_MODEL = 2, 2048, 8
KINDS = list(LAYERS)


def model(quantization: str) -> Model:
    return Model(
        source="llama-2-7b",
        weights="random",
        config={"num_hidden_layers": LAYERS_OF_MODEL},
        lora=Lora(rank=16),
        quantization=quantization,  # type: ignore[arg-type]
    )


def batch(step: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(step % 2)  # two batches, which can be learnt
    ids = torch.randint(32000, (ROWS, SEQUENCE), generator=generator)
    return MicroBatch(
        input_ids=ids,
        labels=ids.roll(-1, 1),
        position_ids=torch.arange(SEQUENCE).repeat(ROWS, 1),
        cu_seqlens=torch.arange(ROWS + 1, dtype=torch.int32) * SEQUENCE,
        max_seqlen=SEQUENCE,
        single_segment_rows=ROWS,
    ).to(DEVICE)


STRATEGY = Strategy(engine="single", micro_batch=ROWS, checkpoint_every=1)


def trained(quantization: str, *, steps: int) -> tuple[list[float], int]:
    """Losses, and the peak of what was allocated."""
    gc.collect()  # engines refer to themselves: an earlier one would count as there, and go meanwhile
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    built = build_model(model(quantization), dtype=torch.bfloat16, seed=0)
    assert "lora_linear" in apply_fused_kernels(built.model, DEVICE, liger=liger_kernels(built.config))
    checkpoint_blocks(built.blocks, every=1)
    world = World(rank=0, size=1, local_rank=0, device=DEVICE, data_rank=0, data_size=1)
    optimizer = Optimizer(learning_rate=1e-3, clip_norm=1.0)
    engine = build_engine(STRATEGY, CausalLM(built.model), built.blocks, built.weights.fill, optimizer, world)
    found = [
        engine.step([batch(step)], target_tokens=ROWS * SEQUENCE, learning_rate=1e-3).loss.item()
        for step in range(steps)
    ]
    return found, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("quantization", ["none", *KINDS])
def test_the_peak_is_the_predicted_one(quantization: str) -> None:
    pytest.importorskip("liger_kernel")  # what the trace takes for granted
    trained(quantization, steps=1)  # Triton measures kernels when they first run, with 256 MiB beside them
    _, measured = trained(quantization, steps=3)
    trace = Tracer(model(quantization), precision="bf16", sequence_length=SEQUENCE).trace(
        rows=ROWS, checkpoint_every=1
    )
    hardware = parse_hardware("1xH200")
    predicted = descriptor(STRATEGY).peak_memory(
        trace, STRATEGY, hardware, capacity_bytes=hardware.gpu.memory_bytes
    )
    print(
        f"{quantization}: predicted {predicted.peak_allocated_bytes / 2**30:.3f} GiB, {measured / 2**30:.3f}"
    )
    assert predicted.peak_allocated_bytes == pytest.approx(measured, rel=0.02)


def test_losses_are_those_of_bf16_but_for_rounding() -> None:
    exact, _ = trained("none", steps=20)
    for kind, share in (("int8", 0.01), ("nf4", 0.03)):
        found, _ = trained(kind, steps=20)
        print(f"{kind}: {found[0]:.4f} to {found[-1]:.4f}; bf16 {exact[0]:.4f} to {exact[-1]:.4f}")
        assert found == pytest.approx(exact, rel=share)
        assert found[-1] < found[0]


OUT, IN, TOKENS = 11008, 4096, 4096


def weight() -> torch.Tensor:
    return 0.02 * torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))


def layers(kind: str) -> tuple[nn.Module, nn.Module]:
    """Ours, and bitsandbytes' as transformers sets it up."""
    import bitsandbytes as bnb

    value = weight().bfloat16()
    ours = LAYERS[kind](IN, OUT, None, dtype=torch.bfloat16)
    ours.quantize(value.to(DEVICE))
    theirs: Any
    if kind == "int8":
        theirs = bnb.nn.Linear8bitLt(IN, OUT, bias=False, has_fp16_weights=False, threshold=6.0)
        theirs.weight = bnb.nn.Int8Params(value, requires_grad=False, has_fp16_weights=False)
    else:
        theirs = bnb.nn.Linear4bit(
            IN, OUT, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=True
        )
        theirs.weight = bnb.nn.Params4bit(value, requires_grad=False, quant_type="nf4")
    return ours, theirs.to(DEVICE).train()


def values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, IN, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
    return x, torch.randn(1, TOKENS, OUT, generator=generator).to(DEVICE, torch.bfloat16)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(OUT, IN), (7, 12), (3, 8200)])
def test_int8_codes_times_their_scale_are_torchs_own(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    codes = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
    scale = torch.rand(shape[0], device=DEVICE) * 1e-3
    exact = (codes.float() * scale.unsqueeze(1)).to(dtype)
    assert torch.equal(dequantize_int8(codes.view(dtype), scale, dtype), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_no_further_from_the_exact_ones_than_those_of_bitsandbytes(kind: str) -> None:
    ours, theirs = layers(kind)
    x, upstream = values()
    matrix = weight().to(DEVICE).double()
    exact, exact_dx = x[0].double() @ matrix.t(), upstream[0].double() @ matrix
    errors = []
    for layer in (ours, theirs):
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, upstream)
        errors.append((error(y[0], exact), error(dx[0], exact_dx)))
    print(f"{kind}: relative errors of y and dx {errors[0]}, bitsandbytes {errors[1]}")
    assert all(mine <= 1.02 * other for mine, other in zip(*errors, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_no_slower_than_that_of_bitsandbytes_and_never_waits(kind: str) -> None:
    ours, theirs = layers(kind)
    x, upstream = values()
    seconds = []
    for layer in (ours, theirs):
        for _ in range(3):
            torch.autograd.grad(layer(x), x, upstream)
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(20):
            torch.autograd.grad(layer(x), x, upstream)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - since) / 20)
    print(f"{kind}: {seconds[0] * 1e3:.3f} ms forward and backward, bitsandbytes {seconds[1] * 1e3:.3f} ms")
    assert seconds[0] <= 1.1 * seconds[1]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(ours(x), x, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_every_engine_trains_close_to_bf16_on_the_gpus_present(tmp_path: Path) -> None:
    base = base_of(tmp_path, processes=GPUS)
    names = [f"{strategy}-{kind}" for strategy in ("zero2", "zero3", "fsdp2") for kind in ("none", *KINDS)]
    runs = [Run(adapters_on(base, tmp_path, name, *name.split("-"))) for name in names]
    found = {folder.name: losses(folder) for folder in run_all(runs, processes=GPUS, folder=tmp_path)}
    exact = found["zero2-none"]
    for name in names:
        share = {"none": 0.005, "int8": 0.005, "nf4": 0.02}[name.partition("-")[2]]
        assert found[name] == pytest.approx(exact, rel=share), name
