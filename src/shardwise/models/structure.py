"""Parts of a Hugging Face model: tensors, blocks, modules in order of initialisation, buffers, seeds."""

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from shardwise.errors import JobError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the job's `train.precision`."""


def count_parameters(model: nn.Module) -> int:
    """Count parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def find_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks in order: the module list that holds most of the parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        what = f"{model.config.model_type!r} models have no list of blocks"
        raise JobError(what, where="model.source", fix="use a decoder made of repeated blocks")
    largest = max(lists, key=count_parameters)
    return list(largest)


def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield (dictionary, name, tensor) of each parameter and persistent buffer that `module` itself holds."""
    for place in (module._parameters, module._buffers):
        for name, tensor in place.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield place, name, tensor


def tensor_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and persistent buffer, several for a tied one, by its first name."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for _, name, tensor in own_tensors(module):
            names.setdefault(id(tensor), []).append(join(prefix, name))
    return {all_names[0]: all_names for all_names in names.values()}


def children_first(
    module: nn.Module, initialiser: PreTrainedModel
) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
    """Yield every module below, children before parents, with the model whose `_init_weights` applies."""
    for child in module.children():
        yield from children_first(child, child if isinstance(child, PreTrainedModel) else initialiser)
    yield module, initialiser


def copied(model: PreTrainedModel, copies: dict[int, Any]) -> PreTrainedModel:
    """`copy.deepcopy` with its memo, in half the time: each module has ten empty dictionaries for hooks."""
    for module in model.modules():
        for value in vars(module).values():
            if type(value) is OrderedDict and not value:
                copies[id(value)] = OrderedDict()
    return copy.deepcopy(model, copies)


def join(prefix: str, name: str) -> str:
    """`prefix.name`, or `name` at the top."""
    return f"{prefix}.{name}" if prefix else name


@contextmanager
def seeded(device: torch.device) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that seeds torch's generators, of the CPU and of `device`, from a number and a name.

    Values then depend on nothing that happened before. Both generators are restored afterwards.
    """

    def seed(number: int, name: str) -> None:
        digest = hashlib.blake2b(f"{number}/{name}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(value)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(value)

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield seed


@torch.no_grad()
def build_buffers(model: PreTrainedModel, *, masks: bool = True) -> None:
    """Compute on the CPU, in place, the buffers that no file holds: rotary frequencies, causal masks.

    `_init_weights` sets them, as when transformers loads a model. NaN marks a buffer that it does not set.
    Without `masks`, modules with a buffer of a million elements or more keep theirs on the meta device.
    """
    with seeded(torch.device("cpu")):
        for module, initialiser in list(children_first(model, model)):
            buffers: dict[str, Any] = module._buffers
            names = sorted(name for name in module._non_persistent_buffers_set if buffers[name] is not None)
            if not names or (not masks and any(buffers[name].numel() >= 1e6 for name in names)):
                continue
            for name in names:
                empty = torch.empty_like(buffers[name], device="cpu")
                buffers[name] = empty.fill_(float("nan") if empty.is_floating_point() else 0)
            initialiser._init_weights(module)
        unset = _unset(model)
        if unset:  # a parent may set them, as Falcon-H1's decoder does those of its layers
            for module, initialiser in list(children_first(model, model)):
                if [*module.children()] and not module._buffers:
                    initialiser._init_weights(module)
            unset = _unset(model)
        for module, name in unset:
            what = f"the model's code sets {name} of {type(module).__name__} only when it is built in memory"
            raise JobError(what, where="model.source", fix="use a model whose _init_weights sets all buffers")


def _unset(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Buffers on the CPU that no file holds and that have no values yet, with their modules."""
    return [
        (module, name)
        for module in model.modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers[name]) is not None
        and buffer.is_floating_point()
        and not buffer.is_meta
        and bool(buffer.isnan().any())
    ]


def checkpoint_blocks(blocks: Sequence[nn.Module], *, every: int) -> None:
    """Let blocks 0, n, 2n, … drop their activations and recompute them in the backward pass; 0: none.

    In place and in training mode only. Random states are restored for the second pass, so dropout repeats.
    Call it once, before the engine is built.
    """
    for block in blocks[::every] if every else ():
        checkpointed = partial(_checkpointed, block, block.forward)
        block.forward = wraps(block.forward)(checkpointed)  # type: ignore[method-assign]


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not block.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
