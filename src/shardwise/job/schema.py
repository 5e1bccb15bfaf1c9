"""The job: what the user asks for. Every field is documented here, and only here.

A `Job` is a value: frozen, complete, with every default filled in. `job.load` makes one from a
file; nothing downstream reads the file again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardwise.job.strategies import ENGINES, NAMED

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
SAMPLE_FIELDS = (
    "prompt", "completion", "instruction", "input", "output", "history", "system",
    "conversations", "messages", "tools", "text",
)  # fmt: skip
Kept = Literal["last", "best", "every", "days", "mirror"]

if TYPE_CHECKING:
    EngineName = str
    StrategyName = str
    SampleField = str
else:
    SampleField = Literal[SAMPLE_FIELDS]
    EngineName = Literal[tuple(ENGINES)]
    StrategyName = Literal[("auto", *NAMED)]

Quantization = Literal["none", "int8", "nf4"]
OptimizerName = Literal["adamw", "adamw8bit"]


class Section(BaseModel):
    """A part of the job. Unknown keys are refused; values are not coerced between kinds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Lora(Section):
    """Low-rank adapters on a frozen base (PEFT)."""

    rank: Positive = 16
    """Rank of the update matrices."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0
    """The update is scaled by alpha / rank. Unset: twice the rank, so that another rank keeps the scale."""
    variants: list[Literal["dora", "rslora"]] = []
    """`dora` learns the length of each weight's rows apart; `rslora` scales by alpha / sqrt(rank)."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input while training."""
    targets: Literal["all-linear"] | Texts = "all-linear"
    """Names of the linear modules that get an adapter, or `all-linear` (all but the output head)."""
    modules_to_save: list[Text] = []
    """Modules without an adapter that are trained in full, e.g. [embed_tokens, lm_head] for new tokens."""

    @model_validator(mode="after")
    def _alpha(self) -> Lora:
        if "alpha" not in self.model_fields_set:
            object.__setattr__(self, "alpha", 2.0 * self.rank)
        return self


class Model(Section):
    """Which model, where its weights come from, and what of it is trained."""

    source: Text
    """A hub id, a local folder (config.json and safetensors), or a name from `shardwise init --models`."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` starts from a fresh initialisation of the shape: pretraining."""
    revision: Text | None = None
    """Commit, tag or branch of a hub model."""
    config: dict[str, Any] = {}
    """Changes to the Hugging Face config, e.g. {num_hidden_layers: 4}; only with `weights: random`."""
    tokenizer: Text | None = None
    """A hub id or folder; unset means the model's own. `train` learns one from the data."""
    tokenizer_vocab: Annotated[int, Field(ge=258, le=2**20)] = 32000
    """Vocabulary size (byte-level BPE) when `tokenizer: train`."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""
    quantization: Quantization = "none"
    """Frozen weights below `lora`: int8 (LLM.int8's) or nf4 (QLoRA's), with bitsandbytes. Sets `lora: {}`."""
    trust_remote_code: bool = False
    """Run Python code that a hub repository brings. Needs `revision` to be a commit hash."""

    @model_validator(mode="after")
    def _adapters(self) -> Model:
        if self.quantization != "none" and "lora" not in self.model_fields_set:
            object.__setattr__(self, "lora", Lora())
        return self


class Data(Section):
    """What is trained on, and how text becomes rows of tokens."""

    train: Text | Texts
    """Files or folders (json, jsonl, parquet, txt), or one hub dataset id."""
    weights: (
        Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)] | None
    ) = None
    """How often an epoch takes the samples of each entry of `train`: 2: twice, 0.5: every second one."""
    format: (
        Literal["auto", "prompt-completion", "alpaca", "sharegpt", "messages", "text"]
        | Annotated[dict[SampleField, Text], Field(min_length=1)]
    ) = "auto"
    """The samples' shape; `auto` looks at the fields. Or columns: {prompt: question, completion: answer}."""
    split: Text = "train"
    """Split of a hub dataset."""
    subset: Text | None = None
    """Configuration of a hub dataset that has several, such as wikitext-2-raw-v1."""
    eval: Text | Texts | None = None
    """Held-out data of its own; unset takes `eval_fraction` of the samples."""
    eval_fraction: Fraction = 0.02
    """Share of the samples held out for evaluation when `eval` is unset; 0 turns evaluation off."""
    max_samples: Positive | None = None
    """Use only the first so many samples: conversations or entire documents (a txt file is one), not rows."""
    sequence_length: Annotated[int, Field(ge=2, le=2**24)] = 1024
    """Tokens in a row."""
    packing: bool = True
    """Fill each row with several samples. They never attend to each other."""
    loss_on: Literal["answers", "all"] = "answers"
    """`answers` trains on the assistant's messages, but not on a prompt's; plain text is trained in full."""
    chat_template: Text | None = None
    """Replaces the tokenizer's: a Jinja file, or `chatml`, `llama-3` or `alpaca`."""
    system: str | None = None
    """System message put before conversations that have none."""
    too_long: Literal["error", "truncate", "drop"] = "truncate"
    """What happens to a conversation longer than a row. Plain text is cut into rows instead."""
    skip_bad: bool = False
    """Leave out samples that cannot be read, and count them, instead of stopping."""


WARMUP_SHARE = 0.03
"""Of all steps, where `optimizer.warmup_steps` is unset."""


DECAY_SHARE = 0.2
"""Of all steps, the last ones in which `schedule: wsd` (warm-up, stable, decay) lowers the rate: as 1 - sqrt
(Haegele et al. 2024, https://arxiv.org/abs/2405.18392)."""

LORA_RATE = 2e-4
"""Where `model.lora` is set and `optimizer.learning_rate` is not: adapters need about ten times the rate of
all weights (Schulman et al., LoRA Without Regret, 2025)."""


class Optimizer(Section):
    """AdamW and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """`adamw8bit` keeps both moments in 8 bits (bitsandbytes): 2 bytes a trained weight instead of 8."""
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-5
    """Peak learning rate. Unset: 2e-5, and 2e-4 with `model.lora`."""
    lora_plus: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """LoRA+: how many times the rate of A the adapters' B get; its authors propose 16."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled weight decay on matrices; never on biases and norms."""
    clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the rate after warm-up; `wsd`: constant, then down over the last 20 % of the steps."""
    warmup_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Steps of linear warm-up, or below 1 the share of all steps, rounded up; unset means 3 %."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step as a share of the peak."""


class Train(Section):
    """How long, how much at a time, how often to look and to save."""

    steps: Positive | None = None
    """Optimizer steps. Give this or `epochs`."""
    epochs: Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] | None = None
    """Passes over the data. Give this or `steps`; neither means one epoch."""
    global_batch: Positive = 16
    """Rows per optimizer step, over all GPUs. It never changes with the number of GPUs."""
    micro_batch: Positive | None = None
    """Rows a GPU takes at a time; accumulation follows from it. Unset lets the plan choose."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Number format of the computation. The optimizer always keeps fp32 weights."""
    checkpointing: Literal["auto", "none", "full"] | Positive = "auto"
    """Recompute activations in the backward pass: of no block, all, or every n-th. `auto`: the plan's."""
    eval_every: Annotated[int, Field(ge=0)] = 50
    """Steps between evaluations, in addition to those before and after training; 0: only those."""
    patience: Annotated[int, Field(ge=0)] | None = None
    """End after so many evaluations without a lower loss; 0: never. The best step is kept and exported."""
    sample_prompts: list[Text] = []
    """At each evaluation the model continues or answers these, greedily, by up to 48 tokens."""
    save_every: Annotated[int, Field(ge=0)] = 100
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep: Positive | dict[Kept, Annotated[float, Field(gt=0, allow_inf_nan=False)] | Text] = 2
    """Newest checkpoints kept, or e.g. {last: 3, best: 1, every: 1000, days: 2, mirror: s3://bucket/runs}."""
    worst_case_first: bool = True
    """Step 1 takes the longest rows and is saved, unless `save_every` is 0: what fails later fails now."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    """Seed of initialisation, data order and dropout."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms on the GPU as well (slower)."""


BUCKET, BUCKET_OF_HOST = 500_000_000, 100_000_000
"""The first is DeepSpeed's default of `reduce_bucket_size` and `allgather_bucket_size` (zero/config.py), the
second ours with `offload_optimizer` (decision 0112)."""
LEAST_BUCKET, MOST_BUCKET = 1_000_000, 2_000_000_000


class StrategySpec(Section):
    """A strategy named explicitly. Where a key is unset, the engine's documented default holds."""

    engine: EngineName
    """`single`: one process, no sharding."""
    stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """DeepSpeed ZeRO stage."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where DeepSpeed keeps the optimizer's state."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where the parameters wait: ZeRO-3 (cpu, nvme), FSDP2 (cpu, together with the optimizer)."""
    nvme_path: Text | None = None
    """Folder on a local NVMe disk for offloading."""
    reshard: bool = True
    """FSDP2 and ZeRO-3: free gathered parameters after forward. False is faster and needs more memory."""
    shard_group: Annotated[int, Field(ge=0, le=2**20)] = 0
    """How many ranks share a copy of the weights, such as a node's: FSDP2's HSDP, ZeRO-3's hpZ. 0: all."""
    quantized_weights: bool = False
    """ZeRO-3 on GPUs (ZeRO++'s qwZ): gather weights in int8. Changes the loss."""
    quantized_gradients: bool = False
    """ZeRO-3 on several nodes, in fp16 (ZeRO++'s qgZ): exchange gradients in int4. Changes the loss."""
    reduce_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Format in which gradients are summed over GPUs. `auto`: FSDP2 fp32, DeepSpeed `train.precision`."""
    powersgd: Annotated[int, Field(ge=0, le=1024)] = 0
    """DDP sends gradients as two factors of this rank, from step 10 on. Changes the loss. 0: all of them."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """GPUs that share each row: DeepSpeed's AutoTP, or within a stage of `engine: pipeline`."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Of `engine: pipeline`: GPUs that each hold a part of the blocks, one after the other."""
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """Of `engine: pipeline`: the order of its passes. `interleaved`: two parts of the blocks a GPU."""
    bucket: Annotated[int, Field(ge=LEAST_BUCKET, le=MOST_BUCKET)] | None = None
    """Gradients, in elements, that DeepSpeed reduces at once: 1e8 with `offload_optimizer`, else 5e8."""
    overlap_comm: bool = True
    """ZeRO-2: reduce gradients while the backward pass goes on. False needs one bucket instead of two."""


Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Energy(Section):
    """GPU energy: what the power limit is chosen for while training, what may be used, what it costs."""

    objective: Literal["measure", "energy", "time", "eta", "cost", "max-slowdown"] = "measure"
    """`measure` sets nothing. `energy`: least energy a step; `max-slowdown`: the same, not much slower."""
    eta: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of `objective: eta`, Zeus' cost `eta*E + (1-eta)*P_max*T`: 1 is energy alone, 0 time alone."""
    max_slowdown: Fraction = 0.05
    """Of `objective: max-slowdown`: how much longer than at the present limit a step may take."""
    power_limits: Literal["auto"] | Annotated[list[Positive], Field(min_length=1)] = "auto"
    """Limits to try in watts a GPU, `auto`: each 25 W. The present limit is always one, none is above it."""
    power_limit: Positive | None = None
    """Watts a GPU that are set for the run and put back at its end; nothing is searched."""
    budget_kwh: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """When all GPUs have used so much, the state is saved and the run ends with 75; resuming counts on."""
    price_per_kwh: Price | None = None
    """In your currency."""
    price_per_gpu_hour: Price | None = None
    """In the same currency, energy not included."""
    carbon_g_per_kwh: Price | None = None
    """Grams of CO2 equivalent for each kWh of your grid."""


class Job(Section):
    """A training job. See `shardwise init` for a commented example."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run; its folder is `output`/`name`."""
    output: Text = "runs"
    """Folder that holds the run folders."""
    model: Model
    data: Data
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    strategy: StrategyName | StrategySpec = "auto"
    """How the work is spread. `auto` picks (see `shardwise train --dry-run`); or a name; or its parts."""
    energy: Energy = Energy()
    tracking: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = ["tensorboard"]
    """Where metrics go in addition to events.jsonl. A service's key is read from its environment variable."""

    @model_validator(mode="after")
    def _rate(self) -> Job:
        if self.model.lora is not None and "learning_rate" not in self.optimizer.model_fields_set:
            rate = {"learning_rate": LORA_RATE}
            object.__setattr__(self, "optimizer", self.optimizer.model_copy(update=rate))
        return self
