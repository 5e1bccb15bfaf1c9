"""GPU memory that torch's allocator knows nothing of: CUDA's context, loaded kernels, NCCL.

Measured by NVML beside what torch had reserved, in the accuracy ledger (`outside_allocator_bytes` in
benchmarks/accuracy/results/measured.jsonl: H200, driver 580, torch 2.11, DeepSpeed 0.19.8; one node of 1, 2
and 4 GPUs). It hardly depends on the model, and not on the batch. Other GPUs are taken to be like the H200,
several nodes to add nothing, until they are measured.
"""

from __future__ import annotations

from shardwise.strategy.strategy import Strategy

MIB = 1024**2

CONTEXT_BYTES = 1316 * MIB
"""CUDA's context and the kernels of torch, cuBLAS and cuDNN: every row on one GPU without DeepSpeed. Where no
attention runs in cuDNN (GPT-Neo, Gemma, Phi-3), it is 16 MiB less."""

NCCL_BYTES = 286 * MIB
"""NCCL's kernels, channels and buffers: what FSDP2 has on 4 GPUs and not on one; 284 MiB on 2."""

DEEPSPEED_BYTES = 104 * MIB
"""What every row with DeepSpeed on one GPU has, at any stage and with any offload, besides NCCL, which it
starts there too."""

DEEPSPEED_GROUP_BYTES = 98 * MIB
"""What DeepSpeed has besides on 2 and 4 GPUs, and FSDP2 has not, unless all of them share each layer
(AutoTP). There is as much as NCCL takes on top, but not under ZeRO-3 with offloading; why is not known. That
offloading its optimizer is enough for that was seen in a row held out, after all else was fixed."""

TENSOR_AND_DATA_BYTES = 486 * MIB
"""What two tensor-parallel groups of two GPUs each take besides, Llama and Qwen3: there are three groups, of
all, of the same rows, of the same part of the model."""


def outside_allocator_bytes(strategy: Strategy) -> int:
    """What a process holds on its GPU, besides what torch reserves, once it trains."""
    together = strategy.world_size > 1
    if strategy.engine != "deepspeed":
        return CONTEXT_BYTES + (NCCL_BYTES if together else 0)
    total = CONTEXT_BYTES + NCCL_BYTES + DEEPSPEED_BYTES
    if strategy.data_parallel > 1:
        total += DEEPSPEED_GROUP_BYTES
    if together:
        away = {strategy.offload_optimizer, strategy.offload_parameters} != {"none"}
        total += 0 if strategy.stage == 3 and away else NCCL_BYTES
    if strategy.tensor_parallel > 1 and strategy.data_parallel > 1:
        total += TENSOR_AND_DATA_BYTES
    return total
