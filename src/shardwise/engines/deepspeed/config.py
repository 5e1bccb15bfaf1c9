"""DeepSpeed's configuration for a strategy: strict JSON, every value spelled out.

Written for DeepSpeed 0.19, transformers 5 and accelerate 1. The batch size over all GPUs is left out:
DeepSpeed derives it from the world, wrongly so under tensor parallelism, and checks a given one against that.

In files for a user's own script, what the Trainer or Accelerate fill in is `auto`. These name no optimizer:
the script builds its own, and Accelerate refuses a second one.
"""

from typing import Any

from shardwise.job import schema
from shardwise.strategy import Strategy

# ZeRO-3 gathers ahead by this many elements: a Llama-2-7B block has 2.0e8, and DeepSpeed's 5e7 would
# gather a block in four pieces, each waited for on its own.
PREFETCH = 400_000_000

# Parameters up to this size (norms, biases) stay gathered on every GPU under ZeRO-3: DeepSpeed's default.
PERSIST = 100_000

# ZeRO-3 keeps gathered parameters for a reuse within so many elements; always when not resharding.
NEVER_RELEASE = 10**15
RELEASE_AT = 1_000_000_000

# ZeRO-0 and 3 step so many elements at once: 0.6 GB for copies of their gradients, in bf16 and fp32.
# DeepSpeed's default at stage 3 is the second, which stays for an optimizer on the host.
SUB_GROUP, SUB_GROUP_OF_HOST = 100_000_000, 1_000_000_000

# A parameter waits on NVMe in buffers that must hold the largest one: DeepSpeed's default size.
NVME_BUFFER = 100_000_000


def deepspeed_config(
    strategy: Strategy,
    optimizer: schema.Optimizer,
    *,
    trainable_parameters: int | None = None,
    largest_parameter: int = 0,
) -> dict[str, Any]:
    """The dictionary that `deepspeed.initialize` takes, and the run folder's `engine/deepspeed.json`.

    `trainable_parameters`: elements that get a gradient; a bucket need not be larger.
    `largest_parameter`: elements of the model's largest parameter; matters for NVMe only.
    """
    bucket = min(strategy.bucket_size, trainable_parameters or strategy.bucket_size)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulation,
        # Always written: the default became 1.0 in DeepSpeed 0.19.3; 0.0 turns clipping off.
        "gradient_clipping": strategy.clip_norm,
        **_optimizer(strategy, optimizer),
        **_precision(strategy),
        "zero_optimization": _zero(strategy, bucket, largest_parameter),
        # On by default, it makes the process wait for the GPU twice a micro-batch, to time it.
        "timers": {"throughput": {"enabled": False}},
    }
    if strategy.reduce_dtype != "auto":
        config["communication_data_type"] = strategy.reduce_dtype
    if sums_in_fp32(strategy):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if strategy.tensor_parallel > 1:
        config["tensor_parallel"] = {"autotp_size": strategy.tensor_parallel}
    return config


def sums_in_fp32(strategy: Strategy) -> bool:
    """Whether ZeRO-2 and 3 add micro-batches up in fp32, in the partition.

    The reduction stays in the computation's format: no more traffic. ZeRO-1 would reduce all gradients in
    fp32, twice the traffic. Not in fp16: an offloaded ZeRO-2 of 0.19.8 does not empty these buffers after an
    overflow. What passes that are recorded do: policy.py.
    """
    return strategy.stage >= 2 and strategy.accumulation > 1 and strategy.precision == "bf16"


def sub_group(strategy: Strategy) -> int:
    """Elements of a rank that ZeRO-3 steps at once, with copies of their gradients.

    Not of bitsandbytes' AdamW, whose state DeepSpeed saves by these groups: checkpoints stay what they are.
    """
    own = strategy.offload_optimizer == "none" and strategy.optimizer == "adamw"
    return SUB_GROUP if own else SUB_GROUP_OF_HOST


def _optimizer(strategy: Strategy, optimizer: schema.Optimizer) -> dict[str, Any]:
    if strategy.optimizer == "adamw8bit":  # DeepSpeed has none: bitsandbytes' is handed to it
        return {"zero_allow_untested_optimizer": True}
    params: dict[str, Any] = {
        "lr": optimizer.learning_rate,
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
    }
    if strategy.offload_optimizer == "none":
        # torch's fused AdamW instead of DeepSpeed's, which is compiled on the spot and needs nvcc.
        params |= {"torch_adam": True, "fused": True}
    return {"optimizer": {"type": "AdamW", "params": params}}


def _precision(strategy: Strategy) -> dict[str, Any]:
    """Sections bf16 and fp16. Both present, so that neither depends on a default."""
    fp16: dict[str, Any] = {"enabled": strategy.precision == "fp16"}
    if fp16["enabled"]:
        # Dynamic loss scale from 2^16, halved after one overflow: torch.amp.GradScaler's behaviour.
        fp16 |= {"loss_scale": 0.0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    bf16: dict[str, Any] = {"enabled": strategy.precision == "bf16"}
    if bf16["enabled"]:
        # A non-finite gradient must never reach the weights.
        bf16["check_grad_overflow"] = True
    return {"bf16": bf16, "fp16": fp16}


def _zero(strategy: Strategy, bucket: int, largest_parameter: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": strategy.stage}
    if strategy.stage == 0:
        return zero
    zero |= {
        # Reduce while the backward pass goes on; DeepSpeed's default only at stage 3.
        "overlap_comm": strategy.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
    }
    if strategy.stage < 3:
        zero["allgather_bucket_size"] = bucket + bucket % 2  # DeepSpeed takes even sizes only
    if strategy.offload_optimizer != "none":
        zero["offload_optimizer"] = _place(strategy.offload_optimizer, strategy.nvme_path)
    if strategy.stage == 3:
        keep = RELEASE_AT if strategy.reshard else NEVER_RELEASE
        zero |= {
            "stage3_prefetch_bucket_size": PREFETCH,
            "stage3_param_persistence_threshold": PERSIST,
            "stage3_max_live_parameters": keep,
            "stage3_max_reuse_distance": keep,
            "sub_group_size": sub_group(strategy),
            # DeepSpeed's own linear layer does not keep the gathered weight alive from forward to backward.
            # torch's is faster and rounds once instead of twice, and is as good where the weight is to stay
            # anyway, or where the forward pass is done again.
            "memory_efficient_linear": strategy.reshard and strategy.checkpoint_every != 1,
        }
        if strategy.shard_group:
            zero["zero_hpz_partition_size"] = strategy.shard_group
        for what in ("weights", "gradients"):
            if getattr(strategy, f"quantized_{what}"):
                zero[f"zero_quantized_{what}"] = True
        if strategy.offload_parameters != "none":
            zero["offload_param"] = _place(strategy.offload_parameters, strategy.nvme_path)
            if strategy.offload_parameters == "nvme":
                zero["offload_param"]["buffer_size"] = max(NVME_BUFFER, largest_parameter)
    return zero


def _place(place: str, nvme_path: str | None) -> dict[str, Any]:
    # Pinned host memory: copies overlap with the computation. The default since 0.19.5.
    section: dict[str, Any] = {"device": place, "pin_memory": True}
    if place == "nvme":
        section["nvme_path"] = nvme_path
    return section


AUTO = "auto"

# Elements: 32 MiB in bf16. DeepSpeed's own files (config.py) make a bucket no larger than the trained
# parameters; these files may be used with more of them.
LEAST_BUCKET = 1 << 24


def trainer_config(strategy: Strategy, *, trainable_parameters: int) -> dict[str, Any]:
    """For the Trainer: it fills in what its arguments say, and refuses values that differ from them."""
    config = own_config(strategy, None, trainable_parameters=trainable_parameters)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        config[key] = AUTO
    for precision in ("bf16", "fp16"):
        config[precision]["enabled"] = AUTO
    return config


def accelerate_config(strategy: Strategy, *, trainable_parameters: int) -> dict[str, Any]:
    """For a script that calls Accelerator: the rows at a time are its data loader's.

    The precision is spelled out: with a DeepSpeed file the launch may not name one.
    """
    config = own_config(strategy, None, trainable_parameters=trainable_parameters)
    return {**config, "train_micro_batch_size_per_gpu": AUTO}


def own_config(
    strategy: Strategy, optimizer: schema.Optimizer | None, *, trainable_parameters: int
) -> dict[str, Any]:
    """For a script that calls deepspeed.initialize; without an optimizer where the script brings one."""
    config = deepspeed_config(
        strategy,
        optimizer or schema.Optimizer(),
        trainable_parameters=max(LEAST_BUCKET, trainable_parameters),
    )
    if optimizer is None:
        config.pop("optimizer", None)
    if strategy.stage == 3:
        # Otherwise nothing that loads as a model can be saved.
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return config
