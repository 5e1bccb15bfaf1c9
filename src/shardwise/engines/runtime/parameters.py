"""A module's parameters as every engine sees them: filling, names, weight decay, and those kept in fp32."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwise.job import schema

T = TypeVar("T", bound=torch.Tensor)


class Fill(Protocol):
    """Give the meta parameters and buffers below `module` their values, on `device`."""

    def __call__(self, module: nn.Module, device: torch.device) -> None: ...


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers (rotary frequencies and the like), which are never sharded, to `device`.

    Those on the meta device are left to `Fill`.
    """
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(owner, name, buffer.to(device))


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name; tied ones once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def chosen(tensors: Iterable[tuple[str, T]], names: Collection[str] | None) -> dict[str, T]:
    """For `Engine.weights`, by name in the Hugging Face model, which the loss module holds as `model`."""
    public = ((name.removeprefix("model."), tensor) for name, tensor in tensors)
    return {name: t for name, t in public if (t.requires_grad if names is None else name in names)}


class Group(NamedTuple):
    """What the optimizer does differently with some parameters."""

    weight_decay: float
    rate: float = 1.0  # Of the step's learning rate


def groups_by_name(module: nn.Module, optimizer: schema.Optimizer) -> dict[str, Group]:
    """The group of every trainable parameter. Call before sharding, which changes shapes and classes.

    Matrices decay, embeddings included. Vectors, biases, norms and what the model exempts
    (`_no_weight_decay`: Mamba's A_log and D) do not. LoRA+ (https://arxiv.org/abs/2402.12354) gives the
    adapters' B another rate, and as PEFT does all vectors (DoRA's lengths).
    """
    return {
        name: Group(
            weight_decay=optimizer.weight_decay if _decays(module, name, p) else 0.0,
            rate=optimizer.lora_plus if ".lora_B." in name or p.ndim == 1 else 1.0,
        )
        for name, p in trainable(module).items()
    }


_NORM = re.compile(r"[Nn]orm(Gated|\dd)?$")
"""How the class name of a norm ends. `NormedEmbedding` and `NormHead` are no norms: their matrices decay."""


def _decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Biases and norms can be matrices, with a row for each expert or head."""
    if parameter.ndim < 2 or name.endswith("bias") or getattr(parameter, "_no_weight_decay", False):
        return False
    # the class, because names mislead: AXK2 has linear layers below modules called layernorm
    owner = module.get_submodule(name.rpartition(".")[0])
    return _NORM.search(type(owner).__name__) is None


def parameter_groups(
    parameters: Mapping[str, torch.Tensor], groups: Mapping[str, Group]
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer."""
    return [
        {"params": [p for name, p in parameters.items() if groups[name] == group], **group._asdict()}
        for group in sorted({groups[name] for name in parameters}, reverse=True)
    ]


def set_rate(param_groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
    """Give the groups of `parameter_groups` this step's learning rate."""
    for group in param_groups:
        group["lr"] = learning_rate * group.get("rate", 1.0)  # older checkpoints of DeepSpeed have none


class Fp32Parameters:
    """Small parameters that a model keeps in fp32 among bf16 weights (decision 0019).

    DeepSpeed casts every parameter to the computation's format, and FSDP2 gathers a block in one format. What
    the model holds in fp32 (Mamba's A_log, D and dt's bias: 0.1 % of its weights) is taken out of the module
    before the engine sees it. Every rank keeps all of it, gradients are summed here, and AdamW steps it.
    """

    def __init__(self, module: nn.Module, *, precision: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}  # By their name in the module; filled by `take`
        self._names = {
            (owner, attribute): f"{prefix}.{attribute}"
            for prefix, owner in module.named_modules()
            for attribute, p in owner._parameters.items()
            if p is not None and p.dtype == torch.float32 and precision != "fp32"
        }

    def take(self, part: nn.Module) -> None:
        """Turn those below `part`, once filled, from parameters into plain tensors."""
        for owner in part.modules():
            for attribute, p in list(owner._parameters.items()):
                name = self._names.pop((owner, attribute), None)
                if name is None or p is None:
                    continue
                tensor = p.detach().requires_grad_(p.requires_grad)
                del owner._parameters[attribute]
                owner.__dict__[attribute] = tensor  # the module's code reads it as before
                self.tensors[name] = tensor

    @property
    def trainable(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    @torch.no_grad()
    def reduce(self, *, divisor: int = 1) -> None:
        """Sum the gradients over all ranks and divide them. Collective."""
        tensors = self.trainable.values()
        if not tensors:
            return
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
        total = torch.cat([gradient.flatten() for gradient in gradients])
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        total /= divisor
        for tensor, gradient in zip(tensors, total.split([t.numel() for t in tensors]), strict=True):
            tensor.grad = gradient.view_as(tensor)

    def norm(self) -> torch.Tensor:
        """Euclidean norm of the reduced gradients; fp32 scalar."""
        return torch.nn.utils.get_total_norm([t.grad for t in self.trainable.values() if t.grad is not None])
