"""DeepSpeed's optimizer state as named tensors: where each parameter lies in its flat partitions.

| stage | fp32 weights | what a rank holds |
|---|---|---|
| 0 | one tensor a parameter | all |
| 1, 2 | one flat tensor a parameter group | an equal share of the group, whatever the parameters' borders |
| 3 | one flat tensor a sub-group | an equal share of each parameter, padded |

Read in DeepSpeed 0.19.8: `runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/fp16/unfused_optimizer.py`,
`module_inject/layers.py`. Below tensor parallelism a layer knows all ranks' shares (`_partition_sizes`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engines.deepspeed.runtime.patches import rely_on
from shardwise.engines.runtime.adamw import GROWTH_INTERVAL
from shardwise.engines.runtime.parameters import trainable
from shardwise.engines.runtime.state import KINDS, Cut, Part
from shardwise.errors import CheckpointError

# By stage, what DeepSpeed does when it has loaded fp32 weights itself
PUBLISHING = {
    **dict.fromkeys((1, 2), ("update_lp_params",)),
    3: ("checkpoint_event_prologue", "_unflatten_partitioned_parameters", "checkpoint_event_epilogue"),
}


class _Place(NamedTuple):
    """Elements of a parameter (its local part) from `begin` on, at `at` in a flat fp32 tensor."""

    name: str
    parameter: nn.Parameter
    flat: torch.Tensor
    at: int
    begin: int
    size: int


class NamedState:
    """The fp32 weights and moments that DeepSpeed's optimizer has on this rank, by name."""

    def __init__(self, optimizer: Any, module: nn.Module, *, stage: int) -> None:
        self._optimizer, self._module, self._stage = optimizer, module, stage
        self._inner = getattr(optimizer, "optimizer", optimizer)
        self._names = {id(p): name for name, p in trainable(module).items()}
        for name in PUBLISHING.get(stage, ()):
            rely_on(optimizer, name)
        self._places = [place for place in self._find() if place.size > 0]

    def _find(self) -> Iterator[_Place]:
        o = self._optimizer
        if self._stage == 0:
            for p, flat in self._pairs():
                yield _Place(self._names[id(p)], p, flat, 0, 0, p.numel())
            return
        if self._stage == 3:
            for index, flat in enumerate(o.fp32_partitioned_groups_flat):
                rank, at = o._get_sub_group_partition_rank(index), 0
                for p in o.fp16_groups[index]:
                    size = p.partition_numel()
                    begin = min(rank * size, p.ds_numel)
                    yield _Place(self._names[id(p)], p, flat, at, begin, min(size, p.ds_numel - begin))
                    at += size
            return
        for index, flat in enumerate(o.single_partition_of_fp32_groups):
            first = dist.get_rank(o.real_dp_process_group[index]) * flat.numel()
            places = zip(o.round_robin_bit16_groups[index], o.round_robin_bit16_offsets[index], strict=True)
            for p, offset in places:
                begin, end = max(offset, first), min(offset + p.numel(), first + flat.numel())
                yield _Place(self._names[id(p)], p, flat, begin - first, begin - offset, end - begin)

    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Stage 0: each parameter with its fp32 weights, which in fp32 are itself."""
        o = self._optimizer
        if not hasattr(o, "fp32_groups"):
            return [(p, p) for group in o.param_groups for p in group["params"]]
        groups = zip(o.fp16_groups, o.fp32_groups, strict=True)
        return [pair for group in groups for pair in zip(*group, strict=True)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of what is saved of each element, by `kind/name`."""
        found = {}
        for place in self._places:
            flats = {**self._moments(place.flat), "parameter": place.flat.detach()}
            for kind in KINDS:
                found[f"{kind}/{place.name}"] = flats[kind].view(-1)[place.at : place.at + place.size]
        return found

    def steps(self) -> dict[str, torch.Tensor]:
        """AdamW's count of steps, by `step/name`."""
        counts = {place.name: self._moments(place.flat)["step"] for place in self._places}
        return {f"step/{name}": torch.tensor(float(count)) for name, count in counts.items()}

    def make(self) -> None:
        """Make AdamW's state, which would be made in its first step, in the memory of its gradients."""
        for place in self._places:
            self._moments(place.flat)

    def load_steps(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Set the counts: DeepSpeed has one for many parameters. CheckpointError where they differ."""
        counts = sorted({int(saved[f"step/{place.name}"]) for place in self._places})
        if len(counts) > 1:
            what = (
                f"some parameters were stepped {counts[0]} times, some {counts[-1]}; DeepSpeed has one count"
            )
            raise CheckpointError(what, fix="resume with strategy single, ddp or fsdp2")
        for moments in (self._moments(place.flat) for place in self._places):
            step = moments["step"]
            moments["step"] = step.fill_(counts[0]) if isinstance(step, torch.Tensor) else counts[0]

    def _moments(self, flat: torch.Tensor) -> dict[str, Any]:
        """AdamW's state of a flat tensor; made as AdamW does in its first step, where there is none yet."""
        state: dict[str, Any] = self._inner.state[flat]
        if not state:
            fused = isinstance(self._inner, torch.optim.AdamW)
            state["step"] = torch.zeros((), device=flat.device) if fused else 0
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(flat.detach()) for _ in range(2))
        return state

    def parts(self) -> dict[str, Part]:
        return {place.name: self._part(place) for place in self._places}

    def _part(self, place: _Place) -> Part:
        from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer

        p: Any = place.parameter
        shape = tuple(p.ds_shape if self._stage == 3 else p.shape)
        owner, _, kind = place.name.rpartition(".")
        layer: Any = self._module.get_submodule(owner)
        split = isinstance(layer, TensorParallel_Layer) and layer.tp_world_size > 1
        if not split or (type(layer) is LinearAllreduce and kind == "bias"):
            return Part(shape, place.begin)
        dim = {LinearLayer: 0, LinearAllreduce: 1}.get(type(layer), -1)
        if dim < 0:
            return Part(shape, place.begin, Cut(-1, layer.tp_index, layer.tp_index + 1))
        sizes = layer._partition_sizes
        first = sum(sizes[: layer.tp_index])
        full = tuple(sum(sizes) if at == dim else size for at, size in enumerate(shape))
        return Part(full, place.begin, Cut(dim, first, first + sizes[layer.tp_index]))

    @torch.no_grad()
    def publish(self) -> None:
        """Make the weights follow the fp32 weights, which were changed. Collective."""
        if self._stage == 0:
            for p, flat in self._pairs():
                p.copy_(flat)
        elif self._stage < 3:
            self._optimizer.update_lp_params()
        else:
            o = self._optimizer
            o.checkpoint_event_prologue()
            for index, flat in enumerate(o.fp32_partitioned_groups_flat):
                o.fp16_partitioned_groups_flat[index].copy_(flat)
                o._unflatten_partitioned_parameters(index)
            if o.persistent_parameters:
                o.persistent_parameters[0].partition(o.persistent_parameters)
            o.checkpoint_event_epilogue()


class Guard:
    """What `AdamW` keeps of the loss scale and of steps that were not finite."""

    def __init__(self, optimizer: Any, *, fp16: bool) -> None:
        self._optimizer, self._fp16 = optimizer, fp16

    @property
    def _scaler(self) -> Any:
        """Loading DeepSpeed's own files replaces it. None outside fp16."""
        o = self._optimizer
        return (getattr(o, "loss_scaler", None) or o.loss_scale_config) if self._fp16 else None

    def tensors(self, *, diverged: bool) -> dict[str, torch.Tensor]:
        """`growth` begins with -1: DeepSpeed doubles the scale one good step later than torch."""
        scale, growth = 1.0, 0
        if s := self._scaler:
            scale, good = float(s.cur_scale), s.cur_iter - s.last_overflow_iter - 1
            growth = (good - 1) % GROWTH_INTERVAL if good else -1
        return {
            "guard/stopped": torch.tensor(float(diverged)),
            "guard/loss_scale": torch.tensor(scale),
            "guard/growth": torch.tensor(growth, dtype=torch.int32),
        }

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        if s := self._scaler:
            s.cur_scale = float(saved["guard/loss_scale"])
            s.cur_iter, s.last_overflow_iter = int(saved["guard/growth"]) + 1, -1
