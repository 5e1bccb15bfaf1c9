"""DeepSpeed's tensor parallelism (AutoTP) for a loss module around a Hugging Face model (decision 0020).

AutoTP (0.19.8) cuts linear layers by columns or rows as the architecture's plan in transformers says. It
looks for the plan in the config of the module that it is given; without one it goes by the layers' names, and
then leaves the norms of query and key with gradients that differ from rank to rank. Embeddings and the output
head are in no base model's plan: every rank keeps them whole, and computes the same loss.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.errors import JobError, MachineError

_MULTIPLIER = 6364136223846793005
"""Knuth's, of a linear congruential generator modulo 2^64 (The Art of Computer Programming, 3.3.4)."""


@contextmanager
def cut_by_plan(module: nn.Module) -> Iterator[None]:
    """Around `deepspeed.initialize`: shows it the model's plan, keeps it quiet, and looks at what it made.

    Raises JobError where a parameter that no plan knows would get another gradient on every rank.
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
            else "AutoTP found nothing to cut in this model",
            where="strategy.tensor_parallel",
            fix="tensor_parallel: 1; zero3 and fsdp2 spread a model over GPUs, too",
        )


def drop_first_batch_check(engine: Any) -> None:
    """DeepSpeed compares the ranks' first batches, and fails on a MicroBatch. `check_same_rows` does it here.

    Its hook sends the whole batch through pickle and compares nested tensors (runtime/engine.py:
    check_dataloader_inputs_same_across_ranks).
    """
    engine.first_dataloader_check.remove()


def check_same_rows(micro_batches: Sequence[MicroBatch], device: torch.device) -> None:
    """Raises MachineError where the ranks of a tensor-parallel group hold different rows. Collective."""
    from deepspeed.utils import groups

    digest = digest_of(micro_batches).to(device)
    both = torch.cat([digest, -digest])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups.get_tensor_model_parallel_group())
    largest, smallest = both.chunk(2)
    if not torch.equal(largest, -smallest):
        raise MachineError(
            "the processes of a tensor-parallel group hold different rows",
            where="strategy.tensor_parallel",
            fix="give all processes the same job, data and seed; consecutive ranks share their rows",
        )


def digest_of(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Two int64: how many tokens and targets, and a hash of them in their order, 2^62 at most in size."""
    numbers = torch.cat([t.flatten() for b in micro_batches for t in (b.input_ids, b.labels)]).long()
    places = torch.arange(1, len(numbers) + 1, device=numbers.device)
    mixed = (numbers + places * _MULTIPLIER) * _MULTIPLIER  # wraps around
    mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
    return torch.stack([torch.tensor(len(numbers), device=numbers.device), mixed.sum() >> 1])


@contextmanager
def whole(parameter: nn.Parameter) -> Iterator[None]:
    """Lets a parameter that AutoTP has cut hold all of it, others as they are. Collective.

    Unlike DeepSpeed's GatherReplacedLayerParams it does not cut once more on leaving, into new memory.
    """
    part = parameter.data
    if hasattr(parameter, "gather_params"):
        parameter.gather_params([parameter])
    try:
        yield
    finally:
        parameter.data = part
