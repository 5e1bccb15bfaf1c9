"""DeepSpeed's tensor parallelism (AutoTP) for a loss module around a Hugging Face model (decision 0020).

AutoTP (0.19.8) splits linear layers by columns or rows as the architecture's plan in transformers says. It
looks for the plan in the config of its module. Without one it uses the layers' names, and the gradients of
query and key norms then differ between ranks. No plan contains embeddings and the output head: every rank has
all of them, and computes the same loss.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

import torch.distributed as dist
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.errors import JobError, MachineError


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
        differs = f"each rank would train {lost[0]} on its own heads only, and differently" if lost else ""
        what = differs or "AutoTP found no layer to split in this model"
        fix = "tensor_parallel: 1; zero3 and fsdp2 also spread a model over GPUs"
        raise JobError(what, where="strategy.tensor_parallel", fix=fix)


def check_same_rows(micro_batches: Sequence[MicroBatch]) -> None:
    """Raise MachineError if the ranks of a tensor-parallel group have different rows. Collective."""
    from deepspeed.utils import groups

    group = groups.get_tensor_model_parallel_group()
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest_of(micro_batches), group=group)
    if len(set(digests)) > 1:
        what = "the processes of a tensor-parallel group have different rows"
        fix = "give all processes the same job, data and seed; consecutive ranks share their rows"
        raise MachineError(what, where="strategy.tensor_parallel", fix=fix)


def digest_of(micro_batches: Sequence[MicroBatch]) -> str:
    """SHA-256 of the tokens and targets in sequence."""
    tensors = [t for b in micro_batches for t in (b.input_ids, b.labels)]
    return hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in tensors)).hexdigest()


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
