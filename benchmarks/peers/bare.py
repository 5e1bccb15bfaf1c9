"""Bare training loops as a baseline: a Hugging Face model, Liger's kernels, no code of shardwise.

    python bare.py --assets assets/8b --lora 16 --sequence 4096
    torchrun --nproc-per-node 4 bare.py --assets assets/7b --engine zero2 --micro-batch 2 --sequence 2048

Rows are full and attention is causal over the entire row: documents attend to earlier ones. That is the
fastest loop one would write by hand, not the correct one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Clock, emit, packed_rows, peak_memory, row
from transformers import AutoConfig, AutoModelForCausalLM

Step = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def build(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A random model of the shape, with Liger's kernels, its fused loss included, and LoRA if asked."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(arguments.assets / "model")
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    apply_liger_kernel_to_llama(model=model)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=arguments.lora, lora_alpha=2 * arguments.lora, target_modules="all-linear")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model.train()


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def torch_step(model: torch.nn.Module, arguments: argparse.Namespace) -> Step:
    """Forward, backward, clip, AdamW; the same code for one GPU and for FSDP2."""
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate, fused=True)

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    return step


def fsdp2(arguments: argparse.Namespace, device: torch.device) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(arguments, device, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.get_base_model().model.layers if arguments.lora else model.model.layers
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch_step(model, arguments)


def deepspeed(arguments: argparse.Namespace, device: torch.device) -> Step:
    import deepspeed as ds

    model = build(arguments, device, torch.bfloat16)
    zero: dict[str, Any] = {
        "stage": int(arguments.engine[-1]),
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if arguments.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if arguments.offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(trained(model), lr=arguments.learning_rate)
    else:
        optimizer = torch.optim.AdamW(trained(model), lr=arguments.learning_rate, fused=True)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach(), torch.as_tensor(engine.get_global_grad_norm())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--engine", choices=("plain", "zero1", "zero2", "zero3", "fsdp2"), default="plain")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains all weights")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument(
        "--offload", action="store_true", help="optimizer, and with zero3 parameters, on the CPU"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    arguments = parser.parse_args()

    rank, gpus = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if arguments.engine == "plain":
        step = torch_step(build(arguments, device, torch.bfloat16), arguments)
    else:
        dist.init_process_group("nccl", device_id=device)
        step = (fsdp2 if arguments.engine == "fsdp2" else deepspeed)(arguments, device)

    rows = packed_rows(arguments.assets, arguments.sequence, arguments.steps * arguments.micro_batch * gpus)
    batches = rows.view(arguments.steps, gpus, arguments.micro_batch, arguments.sequence)[
        :, rank
    ].pin_memory()
    clock, losses, norms = Clock(), [], []
    clock.mark()
    for batch in batches:
        loss, norm = step(batch.to(device, non_blocking=True))
        losses.append(loss)
        norms.append(norm)
        clock.mark()
    seconds = clock.seconds()
    loss = torch.stack(losses).float()
    if gpus > 1:
        dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        name = f"bare {arguments.engine}{' offload' if arguments.offload else ''}"
        name += f"{f' lora{arguments.lora}' if arguments.lora else ''}"
        name += f"{' checkpointing' if arguments.checkpointing else ''}"
        tokens = [arguments.micro_batch * arguments.sequence * gpus] * arguments.steps
        settings = {"micro_batch": arguments.micro_batch, "sequence_length": arguments.sequence}
        curves = {"loss": loss.tolist(), "grad_norm": [float(norm) for norm in norms]}
        emit(
            row(
                name,
                seconds,
                tokens,
                warmup=arguments.warmup,
                gpus=gpus,
                **settings,
                **peak_memory(),
                **curves,
            )
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
