"""DeepSpeed behind the engine protocol: ZeRO-0 to 3, optimizer and parameter offload, tensor parallelism.

| DeepSpeed | here |
|---|---|
| averages gradients over data-parallel ranks | the loss is multiplied by their number first |
| divides by the accumulation steps | `scale_wrt_gas=False` |
| stage 0, bf16: allocates the state by a step with zero gradients | learning rate 0; step counts are reset |
| stage 0, fp32: applies a non-finite gradient | the norm is checked here |
| continues after a skipped bf16 or fp32 step | all later steps are skipped, as by the other engines |
| rounds all parameters to the computation's format | those kept in fp32 have an AdamW of their own |
"""

import copy
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # must come before deepspeed.zero.Init: imported inside it, torch 2.13 fails
import torch.distributed as dist
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.deepspeed.config import deepspeed_config
from shardwise.engines.deepspeed.runtime.extensions import needed_operators, wait_for_locks
from shardwise.engines.deepspeed.runtime.patches import (
    drop_first_batch_check,
    join_norm,
    release_in_order,
    skip_shared_memory_transport,
    use_joint_norms,
)
from shardwise.engines.deepspeed.runtime.tensor_parallel import check_same_rows, cut_by_plan, gathered
from shardwise.engines.runtime.adamw import AdamW
from shardwise.engines.runtime.base import load_state, save_state
from shardwise.engines.runtime.parameters import (
    Fill,
    Fp32Parameters,
    chosen,
    groups_by_name,
    move_buffers,
    parameter_groups,
    set_rate,
    trainable,
)
from shardwise.engines.runtime.protocol import StepResult, World
from shardwise.errors import CheckpointError, JobError
from shardwise.job import schema
from shardwise.strategy import Strategy

TAG = "state"


class DeepSpeedEngine:
    """Wraps the engine that `deepspeed.initialize` returns."""

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        fill: Fill,
        optimizer: schema.Optimizer,
        world: World,
    ) -> None:
        self.world, self._strategy = world, strategy
        self._diverged = False
        by_name = groups_by_name(module, optimizer)
        self._config = deepspeed_config(
            strategy,
            optimizer,
            trainable_parameters=sum(p.numel() for p in trainable(module).values()),
            largest_parameter=max(p.numel() for p in module.parameters()),
        )
        if world.local_disks:
            self._config |= on_local_disks(strategy)
        _prepare_deepspeed(world)
        wait_for_locks(needed_operators(strategy))
        import deepspeed
        from deepspeed.utils import groups

        move_buffers(module, world.device)
        self._fp32 = Fp32Parameters(module, precision=strategy.precision)
        for part in (*blocks, module):
            fill(part, world.device)
            self._fp32.take(part)
            if strategy.stage == 3:
                # hpZ's groups are made by the first call; a second set of them is an error.
                found = groups._get_zero_param_intra_parallel_group() if strategy.shard_group else None
                config = copy.deepcopy(self._config)
                deepspeed.zero.Init(module=part, config_dict_or_path=config, zero_param_parallel_group=found)
        if strategy.stage == 3:
            # Blocks are gathered, not single linear layers (decision 0009). Fused layers rely on it.
            for block in blocks:
                block.register_forward_pre_hook(_require_input_gradient)
            deepspeed.utils.set_z3_leaf_modules(module, list({type(block) for block in blocks}))
        parallel = strategy.tensor_parallel > 1
        with cut_by_plan(module) if parallel else nullcontext():
            self._engine, self._optimizer, *_ = deepspeed.initialize(
                model=module,
                optimizer=_make_optimizer(strategy, parameter_groups(trainable(module), by_name), optimizer),
                config=copy.deepcopy(self._config),
                dist_init_required=False,
            )
        if parallel:
            drop_first_batch_check(self._engine)
        self._rows_are_checked = not parallel
        if strategy.stage > 0 and strategy.offload_optimizer == "none" and not parallel:
            use_joint_norms(self._optimizer, strategy.stage)
        if strategy.stage == 3 and world.device.type == "cuda":
            release_in_order(self._optimizer, module.parameters())
        self._fp32_adamw: AdamW | None = None
        if self._fp32.trainable:
            self._fp32_adamw = AdamW(
                self._fp32.trainable,
                by_name,
                optimizer,
                clip_norm=strategy.clip_norm,
                fp16=False,
                sharded=False,
                device=world.device,
            )
            join_norm(self._optimizer, strategy.stage, self._fp32.norm)
        for state in getattr(self._optimizer, "optimizer", self._optimizer).state.values():
            if "step" in state:
                state["step"] = state["step"] * 0
        self._frozen = any(not p.requires_grad for p in module.parameters())
        self._engine.train()

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        loss_sum = torch.zeros((), device=self.world.device)
        if self._diverged:
            nan = self._scalar(float("nan"))
            return StepResult(loss=nan, grad_norm=nan, skipped=self._scalar(1.0))
        if not self._rows_are_checked:  # once: the same few numbers determine the rows of all steps
            check_same_rows(micro_batches)
            self._rows_are_checked = True
        factor = self.world.data_size / target_tokens
        fp16 = self._strategy.precision == "fp16"
        loss_scale = self._scalar(float(self._optimizer.loss_scale)) if fp16 else None
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            loss = self._engine(micro_batch)
            loss_sum += loss.detach()
            self._engine.backward(loss * factor, scale_wrt_gas=False)
            if not last:
                self._engine.step()  # counts the micro-batch; the weights change at the last one only
        loss = loss_sum / (target_tokens * self._strategy.tensor_parallel)  # its ranks hold the same one
        if self.world.size > 1:
            dist.all_reduce(loss)
        set_rate(self._optimizer.param_groups, learning_rate)
        self._fp32.reduce(divisor=self.world.data_size)
        found, was_skipped = self._apply()
        norm = found.to(self.world.device).float() if isinstance(found, torch.Tensor) else self._scalar(found)
        skipped = self._scalar(float(was_skipped))
        if self._fp32_adamw is not None:
            one = torch.ones_like(norm)
            self._fp32_adamw.apply(learning_rate, norm=norm, skipped=skipped, loss_scale=one)
        self._diverged = was_skipped and not fp16
        return StepResult(loss=loss, grad_norm=norm, skipped=skipped, loss_scale=loss_scale)

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        return self.logits(micro_batch, None)

    @torch.no_grad()
    def logits(self, micro_batch: MicroBatch, at: torch.Tensor | None) -> torch.Tensor:
        self._engine.eval()
        try:
            return self._engine(micro_batch) if at is None else self._engine(micro_batch, at)
        finally:
            self._engine.train()

    def save(self, directory: Path) -> None:
        self._engine.save_checkpoint(
            str(directory),
            tag=TAG,
            client_state={"shardwise_diverged": self._diverged},
            save_latest=False,
            exclude_frozen_parameters=self._frozen,  # they come from the base model again
        )
        if self._fp32_adamw is not None:
            save_state(directory, self.world, self._fp32_adamw.state())

    def load(self, directory: Path) -> None:
        strict = not self._frozen
        path, client_state = self._engine.load_checkpoint(str(directory), tag=TAG, load_module_strict=strict)
        if path is None:
            fix = "resume with the strategy that the run was started with"
            what = "DeepSpeed found no state in the checkpoint"
            raise CheckpointError(what, where=str(directory / TAG), fix=fix)
        self._diverged = bool(client_state["shardwise_diverged"])
        if self._fp32_adamw is not None:
            self._fp32_adamw.restore(load_state(directory, self.world))

    @torch.no_grad()
    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        import deepspeed

        for name, p in chosen(self._engine.module.named_parameters(), names).items():
            with deepspeed.zero.GatheredParameters([p], enabled=self._strategy.stage == 3), gathered(p):
                full = p.detach().to("cpu", copy=True) if self.world.rank == 0 else torch.empty(0)
            yield name, full
        for name, tensor in chosen(self._fp32.tensors.items(), names).items():
            yield name, tensor.detach().cpu() if self.world.rank == 0 else torch.empty(0)

    def config(self) -> dict[str, Any]:
        return self._config

    def _scalar(self, value: float) -> torch.Tensor:
        """A number filled in on the device: a copy from the host would wait for the step to end."""
        return torch.full((), value, device=self.world.device)

    def _apply(self) -> tuple[float | torch.Tensor, bool]:
        """The optimizer step: the gradient norm before clipping, and whether the step was skipped."""
        if self._strategy.stage == 0 and self._strategy.precision == "fp32":
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            if not torch.isfinite(norm):
                self._engine.zero_grad()
                return norm, True
            self._engine.step()
            return norm, False
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        assert norm is not None
        return norm, bool(self._optimizer.overflow)


def on_local_disks(strategy: Strategy) -> dict[str, Any]:
    """Settings with which each node can load what its own ranks have saved. JobError where it could not."""
    if (
        strategy.tensor_parallel > 1
    ):  # the model of local rank 0 alone is saved then (0.19.8, runtime/engine.py)
        what = "DeepSpeed saves only one part of a tensor-parallel model where the nodes share no disk"
        raise JobError(what, where="output", fix="--set output=DIR, on a disk that all nodes share")
    return {"checkpoint": {"use_node_local_storage": True}}


def _prepare_deepspeed(world: World) -> None:
    """Give DeepSpeed the existing process group, and keep it from printing and compiling."""
    for key, value in (("RANK", world.rank), ("WORLD_SIZE", world.size), ("LOCAL_RANK", world.local_rank)):
        os.environ.setdefault(key, str(value))
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # DeepSpeed 0.19 uses names of collectives that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if world.device.type == "cpu":
        skip_shared_memory_transport()
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)


def _require_input_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the first block of a frozen base an input with a gradient.

    DeepSpeed 0.19.8 takes this gradient as the end of a block's backward pass. Without it, the parameters of
    the block are freed too early.
    """
    if not inputs:
        return inputs
    hidden, *rest = inputs
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *rest)


def _make_optimizer(
    strategy: Strategy, groups: list[dict[str, Any]], optimizer: schema.Optimizer
) -> torch.optim.Optimizer:
    betas = (optimizer.beta1, optimizer.beta2)
    values: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": optimizer.epsilon}  # a step sets its own lr
    if strategy.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        found: torch.optim.Optimizer = AdamW8bit(groups, **values)
        return found
    if strategy.offload_optimizer == "none":
        return torch.optim.AdamW(groups, fused=True, **values)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, adamw_mode=True, **values)
