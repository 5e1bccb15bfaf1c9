"""DeepSpeed's tensor parallelism (AutoTP) for a loss module around a Hugging Face model (decision 0020).

AutoTP (0.19.8) splits linear layers by columns or rows as the architecture's plan in transformers says. It
looks for the plan in the config of its module. Without one it uses the layers' names, and the gradients of
query and key norms then differ between ranks. No plan contains embeddings and the output head: every rank has
all of them, and computes the same loss.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

import torch
import torch.distributed as dist
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.errors import JobError, MachineError

_MULTIPLIER = 6364136223846793005
"""Knuth's, of a linear congruential generator modulo 2^64 (The Art of Computer Programming, 3.3.4)."""


@contextmanager
def cut_by_plan(module: nn.Module) -> Iterator[None]:
    """Give `deepspeed.initialize` the model's plan, suppress its output, and check the split layers.

    Raises JobError if a parameter that is in no plan would get a different gradient on every rank.
    """
    config = module.model.config  # type: ignore[union-attr]
    module.config = config.get_text_config()  # type: ignore[operator,union-attr]
    with redirect_stdout(io.StringIO()):
        yield
    _check_layout(module)


def _check_layout(module: nn.Module) -> None:
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    cut, lost = 0, []
    for owner_name, owner in module.named_modules():
        if not any(isinstance(child, LinearLayer) and not child.gather_output for child in owner.children()):
            continue
        cut += 1
        for name, p in owner.named_parameters():
            inside = owner.get_submodule(name.rpartition(".")[0])
            summed = getattr(p, "_ds_grad_allreduce_registered", False)
            if not (isinstance(inside, LinearLayer | LinearAllreduce) or summed):
                lost.append(f"{owner_name}.{name}")
    if lost or not cut:
        raise JobError(
            f"each rank would train {lost[0]} on its own heads only, and differently"
            if lost
            else "AutoTP found no layer to split in this model",
            where="strategy.tensor_parallel",
            fix="tensor_parallel: 1; zero3 and fsdp2 also spread a model over GPUs",
        )


def check_same_rows(micro_batches: Sequence[MicroBatch], device: torch.device) -> None:
    """Raise MachineError if the ranks of a tensor-parallel group have different rows. Collective."""
    from deepspeed.utils import groups

    digest = digest_of(micro_batches).to(device)
    both = torch.cat([digest, -digest])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups.get_tensor_model_parallel_group())
    largest, smallest = both.chunk(2)
    if not torch.equal(largest, -smallest):
        raise MachineError(
            "the processes of a tensor-parallel group have different rows",
            where="strategy.tensor_parallel",
            fix="give all processes the same job, data and seed; consecutive ranks share their rows",
        )


def digest_of(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Two int64: the number of tokens and targets, and a hash of their sequence of at most 2^62."""
    numbers = torch.cat([t.flatten() for b in micro_batches for t in (b.input_ids, b.labels)]).long()
    places = torch.arange(1, len(numbers) + 1, device=numbers.device)
    mixed = (numbers + places * _MULTIPLIER) * _MULTIPLIER  # wraps around
    mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
    return torch.stack([torch.tensor(len(numbers), device=numbers.device), mixed.sum() >> 1])


@contextmanager
def gathered(parameter: nn.Parameter) -> Iterator[None]:
    """Gather a parameter that AutoTP has split, for the duration of the context. Collective.

    Unlike DeepSpeed's GatherReplacedLayerParams it does not split again, into new memory.
    """
    part = parameter.data
    if hasattr(parameter, "gather_params"):
        parameter.gather_params([parameter])
    try:
        yield
    finally:
        parameter.data = part
