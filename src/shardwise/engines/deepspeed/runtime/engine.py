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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # must come before deepspeed.zero.Init: imported inside it, torch 2.13 fails
import torch.distributed as dist
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.deepspeed.config import deepspeed_config
from shardwise.engines.deepspeed.policy import decides_on_gpu, records, sends_once, steps_on_gpu
from shardwise.engines.deepspeed.runtime.extensions import compiling, needed_operators, wait_for_locks
from shardwise.engines.deepspeed.runtime.gradients import Gradients
from shardwise.engines.deepspeed.runtime.patches import (
    DEEPSPEED,
    drop_first_batch_check,
    join_norm,
    keep_views,
    order_streams,
    skip_shared_memory_transport,
    trust_norms,
    use_joint_norms,
    without_reducing,
)
from shardwise.engines.deepspeed.runtime.recorded import Passes, passes_of
from shardwise.engines.deepspeed.runtime.state import Guard, NamedState
from shardwise.engines.deepspeed.runtime.step import StepOnGpu, step_in_parts
from shardwise.engines.deepspeed.runtime.tensor_parallel import check_same_rows, cut_by_plan, gathered
from shardwise.engines.deepspeed.runtime.zero3 import (
    Released,
    gather_in_place,
    release_in_order,
    require_input_gradient,
    work_less_on_the_host,
)
from shardwise.engines.runtime.adamw import AdamW
from shardwise.engines.runtime.base import evaluated, placed, recordable
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
from shardwise.engines.runtime.recorded import RecordedPasses
from shardwise.engines.runtime.state import PICKLED, Part, load_state, parts_of, save_state
from shardwise.errors import CheckpointError
from shardwise.job import schema
from shardwise.patch import supported
from shardwise.strategy import Strategy


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
            self._config["checkpoint"] = {"use_node_local_storage": True}  # of its own files
        _prepare_deepspeed(world)
        with compiling():
            wait_for_locks(needed_operators(strategy))
        import deepspeed

        move_buffers(module, world.device)
        self._fp32 = Fp32Parameters(module, precision=strategy.precision)
        for part in (*blocks, module):
            fill(part, world.device)
            self._fp32.take(part)
            if strategy.stage == 3:
                self._shard(part)
        if strategy.stage == 3:
            # Blocks are gathered, not single linear layers (decision 0009). Fused layers rely on it.
            for block in blocks:
                block.register_forward_pre_hook(require_input_gradient)
            deepspeed.utils.set_z3_leaf_modules(module, list({type(block) for block in blocks}))
        parallel = strategy.tensor_parallel > 1
        with compiling(), cut_by_plan(module) if parallel else nullcontext():
            self._engine, self._optimizer, *_ = deepspeed.initialize(
                model=module,
                optimizer=_make_optimizer(strategy, parameter_groups(trainable(module), by_name), optimizer),
                config=copy.deepcopy(self._config),
                dist_init_required=False,
            )
        if parallel:
            drop_first_batch_check(self._engine)
        self._rows_are_checked = not parallel
        self._reduced: Callable[[], None] = lambda: None
        self._released: Released | None = None  # Of ZeRO-3 on a GPU
        self._patch_optimizer(list(module.parameters()))
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
        self._named = self._named_state()
        self._guard = Guard(self._optimizer, fp16=strategy.precision == "fp16")
        self._frozen = any(not p.requires_grad for p in module.parameters())
        self._graphs = self._recorded_passes(module)
        self._on_gpu: StepOnGpu | None = None
        goes_on = strategy.stage < 3 or self._graphs is not None
        if goes_on and decides_on_gpu(strategy) and supported(DEEPSPEED):
            self._on_gpu = StepOnGpu(
                self._optimizer,
                clip_norm=strategy.clip_norm,
                device=world.device,
                wait=self._before_step,
            )
        self._engine.train()

    @property
    def _recorded(self) -> RecordedPasses | None:
        return None if self._graphs is None else self._graphs.recorded

    def _recorded_passes(self, module: nn.Module) -> Passes | None:
        objective = recordable(module, self._strategy, self.world.device)
        if objective is None or not records(self._strategy) or not supported(DEEPSPEED):
            return None
        if self._named is not None:
            self._named.make()
        apart = [*self._fp32.trainable.values()]
        return passes_of(self._engine, self._strategy, objective, apart, self._released)

    def _before_step(self) -> None:
        """Wait for the memory of gradients and buckets, which the step takes, as without StepOnGpu.

        Passes that may be recorded have memory of their own, which the next ones take.
        """
        if self._graphs is None:
            self._reduced()

    def _shard(self, part: nn.Module) -> None:
        import deepspeed
        from deepspeed.utils import groups

        work_less_on_the_host()
        # hpZ's groups are made by the first call; a second set of them is an error.
        found = groups._get_zero_param_intra_parallel_group() if self._strategy.shard_group else None
        config = copy.deepcopy(self._config)
        deepspeed.zero.Init(module=part, config_dict_or_path=config, zero_param_parallel_group=found)

    def _patch_optimizer(self, parameters: Sequence[nn.Parameter]) -> None:
        from deepspeed.accelerator import get_accelerator

        strategy, cuda = self._strategy, self.world.device.type == "cuda"
        if strategy.stage == 0 and strategy.precision == "bf16" and supported(DEEPSPEED):
            step_in_parts(self._optimizer)
        if 0 < strategy.stage < 3:
            keep_views(self._optimizer)
            if not steps_on_gpu(strategy) and supported(DEEPSPEED):
                trust_norms(self._optimizer)
        if strategy.stage > 0 and steps_on_gpu(strategy):
            use_joint_norms(self._optimizer, strategy.stage)
            if strategy.stage < 3 and cuda:
                self._reduced = order_streams(self._optimizer, get_accelerator())
        if strategy.stage == 3:
            gather_in_place(parameters, self.world.device)
            if cuda:
                self._released = release_in_order(self._optimizer, parameters)
            if self._released is not None and not steps_on_gpu(strategy):
                Gradients(self._optimizer, to_host=sends_once(strategy))

    def _named_state(self) -> NamedState | None:
        """Its state by name; None where DeepSpeed saves it in files of its own."""
        strategy = self._strategy
        nvme = "nvme" in (strategy.offload_optimizer, strategy.offload_parameters)
        if nvme or strategy.optimizer != "adamw" or not supported(DEEPSPEED):
            return None
        return NamedState(self._optimizer, self._engine.module, stage=strategy.stage)

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        if self._diverged:
            nan = self._scalar(float("nan"))
            return StepResult(loss=nan, grad_norm=nan, skipped=self._scalar(1.0))
        if not self._rows_are_checked:  # once: the same few numbers determine the rows of all steps
            check_same_rows(micro_batches)
            self._rows_are_checked = True
        fp16 = self._strategy.precision == "fp16"
        loss_scale = self._scalar(float(self._optimizer.loss_scale)) if fp16 else None
        loss_sum = self._passes(micro_batches, target_tokens, recorded=self._graphs)
        loss = loss_sum / (target_tokens * self._strategy.tensor_parallel)  # its ranks hold the same one
        if self.world.size > 1:
            dist.all_reduce(loss)
        set_rate(self._optimizer.param_groups, learning_rate)
        self._fp32.reduce(divisor=self.world.data_size)
        found, skipped = self._apply()
        norm = found.to(self.world.device).float() if isinstance(found, torch.Tensor) else self._scalar(found)
        if self._fp32_adamw is not None:
            one = torch.ones_like(norm)
            self._fp32_adamw.apply(learning_rate, norm=norm, skipped=skipped, loss_scale=one)
        return StepResult(loss=loss, grad_norm=norm, skipped=skipped, loss_scale=loss_scale)

    def passes(self, micro_batches: Sequence[MicroBatch], *, target_tokens: int) -> torch.Tensor:
        with placed(self._recorded):
            return self._passes(micro_batches, target_tokens, recorded=None)

    def _passes(
        self,
        micro_batches: Sequence[MicroBatch],
        target_tokens: int,
        *,
        recorded: Passes | None,
    ) -> torch.Tensor:
        loss_sum, factor = self._scalar(0.0), self.world.data_size / target_tokens
        if recorded is not None:
            return recorded.run(micro_batches, self._scalar(factor))
        for index, micro_batch in enumerate(micro_batches):
            loss = self._engine(micro_batch)
            self._engine.backward(loss * factor, scale_wrt_gas=False)
            loss_sum += loss.detach()
            if index < len(micro_batches) - 1:
                self._engine.step()  # counts the micro-batch; the weights change at the last one only
        return loss_sum

    @contextmanager
    def apart(self) -> Iterator[nn.Module]:
        with without_reducing(self._optimizer), placed(self._recorded):
            yield self._engine.module

    def evaluate(self, micro_batch: MicroBatch, at: torch.Tensor | None = None) -> torch.Tensor:
        with placed(self._recorded):
            return evaluated(self._engine, micro_batch, at)

    def named_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Part]] | None:
        if self._named is None:
            return None
        tensors, parts = self._own()
        tensors |= {**self._named.tensors(), **self._named.steps()}
        return tensors | self._guard.tensors(diverged=self._has_diverged()), parts | self._named.parts()

    def save(self, directory: Path) -> None:
        named = self.named_state()
        if named is None:
            self._engine.save_checkpoint(
                str(directory),
                tag=PICKLED,
                client_state={"shardwise_diverged": self._has_diverged()},
                save_latest=False,
                exclude_frozen_parameters=self._frozen,  # they come from the base model again
            )
        save_state(directory, self.world, *(named or self._own()))

    def load(self, directory: Path) -> None:
        live, parts = self._own()
        if self._named is None or (directory / PICKLED).is_dir():  # of NVMe, or an older checkpoint
            options = {"tag": PICKLED, "load_module_strict": not self._frozen}
            path, client = self._engine.load_checkpoint(str(directory), **options)
            if path is None:
                what, fix = "DeepSpeed found no state of its own", "resume with the strategy that saved it"
                raise CheckpointError(what, where=str(directory), fix=fix)
            self._set_diverged(bool(client["shardwise_diverged"]))
            if live:
                load_state(directory, self.world, live, parts)
            return
        live |= {**self._named.tensors(), **self._named.steps(), **self._guard.tensors(diverged=False)}
        load_state(directory, self.world, live, parts | self._named.parts())
        self._named.load_steps(live)
        self._set_diverged(bool(live["guard/stopped"]))
        self._guard.load(live)
        self._named.publish()

    def _set_diverged(self, diverged: bool) -> None:
        """As a saved state says."""
        self._diverged = diverged
        if self._on_gpu is not None:
            self._on_gpu.stopped.fill_(float(diverged))

    def _own(self) -> tuple[dict[str, torch.Tensor], dict[str, Part]]:
        """The state of parameters that DeepSpeed does not see."""
        adamw = self._fp32_adamw
        return ({}, {}) if adamw is None else (adamw.state(), parts_of(adamw.parameters))

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

    def _apply(self) -> tuple[float | torch.Tensor, torch.Tensor]:
        """The optimizer step: the gradient norm before clipping, and 1.0 if the step was skipped."""
        if self._strategy.stage == 0 and self._strategy.precision == "fp32":
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            total = torch.nn.utils.get_total_norm(gradients)
            self._diverged = not bool(torch.isfinite(total))
            (self._engine.zero_grad if self._diverged else self._engine.step)()
            return total, self._scalar(float(self._diverged))
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        assert norm is not None
        if self._on_gpu is not None:
            return norm, self._on_gpu.stopped.clone()
        skipped = bool(self._optimizer.overflow)
        self._diverged = skipped and self._strategy.precision != "fp16"
        return norm, self._scalar(float(skipped))

    def _has_diverged(self) -> bool:
        """Whether a step was not finite, so that all later ones are skipped; waits for the GPU."""
        return self._diverged or (self._on_gpu is not None and bool(self._on_gpu.stopped))


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
