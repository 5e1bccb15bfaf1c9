# %% [markdown]
# # 02 · ZeRO-1 and ZeRO-2: nobody needs all of the optimizer
#
# Needs: lab 01. On a CPU: about a minute, two processes. On GPUs: all of them, at most four.
#
# ## Goal
#
# After this lab you know
#
# - what data parallelism keeps several times, and what ZeRO-1 and ZeRO-2 keep only once;
# - how to compute the bytes on each GPU with a pencil;
# - that sharding changes where numbers are kept, not the numbers: the loss is the same.

# %%
import lab
import matplotlib.pyplot as plt

import shardwise

here, work = lab.machine(), lab.folder()
print(f"{here.processes} processes on {here.name}")

# %% [markdown]
# ## The pencil
#
# Mixed precision with AdamW keeps for each parameter 2 bytes of weight, 2 of gradient, and 12 of optimizer state
# (fp32 copy, two moments). With $P$ parameters on $N$ GPUs each GPU holds
#
# | | weights | gradients | optimizer |
# |---|---|---|---|
# | ZeRO-0 (DDP) | $2P$ | $2P$ | $12P$ |
# | ZeRO-1 | $2P$ | $2P$ | $12P/N$ |
# | ZeRO-2 | $2P$ | $2P/N$ | $12P/N$ |
# | ZeRO-3 (lab 03) | $2P/N$ | $2P/N$ | $12P/N$ |
#
# ## Guess
#
# 1. Llama-2-7B has 6.74 billion parameters. How many GB of states has each of 4 GPUs under ZeRO-2?
# 2. Two processes train the same small model: once alone, once with ZeRO-2. After five steps, how much do the losses
#    differ?

# %%
my_zero2_gb = 28.0
my_difference = 0.01

# %% [markdown]
# ## Run: the same job under three strategies
#
# `bench` runs each strategy for a few steps in processes of its own, on the same rows. The global batch stays the
# same: with two processes each takes half of the rows.

# %%
batch = 4 * here.processes
job = lab.job("zero", work, train={"global_batch": batch, "micro_batch": 2})
rows = []
for strategy, processes in (("single", 1), *((f"zero{stage}", here.processes) for stage in (0, 2))):
    record = shardwise.bench(
        job,
        strategies=strategy,
        processes=processes,
        steps=6,
        warmup=2,
        profile=False,
        out=work / strategy,
        say=lab.quiet,
    )
    rows += record.rows
lab.table(
    [
        {
            "strategy": row["strategy"]["name"],
            "processes": row["strategy"]["data_parallel"],
            "first loss": f"{row['measured']['loss'][0]:.6f}",
            "last loss": f"{row['measured']['loss'][-1]:.6f}",
            "gradient norm": f"{row['measured']['grad_norm'][-1]:.5f}",
            "tokens/s/process": row["measured"]["tokens_per_second_per_gpu"],
        }
        for row in rows
    ]
)
last = [row["measured"]["loss"][-1] for row in rows]
print(f"\nlargest difference of the last losses: {max(last) - min(last):.1e}; you guessed {my_difference}")

# %% [markdown]
# On such a small model more processes are **slower** for each process: there is little to compute and much to
# say. What scales is lab 04's and lab 09's question.
#
# ## Run: what a rank really holds
#
# A checkpoint of ZeRO-2 has a file for each rank, with that rank's part of the optimizer: fp32 weights and two
# moments, 12 bytes for each parameter of its part. So the size of the file is a measurement of ZeRO.

# %%
short = lab.job("shards", work, strategy="zero2", train={"steps": 3, "global_batch": batch})
run = shardwise.train(short, processes=here.processes)
parameters = run.events("run")[-1]["parameters"]
files = sorted(run.folder.glob("checkpoints/*/engine/rank-*.safetensors"))
parts = [file.stat().st_size / lab.MB for file in files]
for file, size in zip(files, parts, strict=True):
    print(f"{file.name}: {size:.2f} MB")

# %% [markdown]
# ## Plot

# %%
pencil = {
    name: (2.0, 2.0 / (4 if stage > 1 else 1), 12.0 / (4 if stage > 0 else 1))
    for stage, name in enumerate(("ZeRO-0", "ZeRO-1", "ZeRO-2"))
}
billions = 6.738
figure, (left, right) = plt.subplots(ncols=2, gridspec_kw={"width_ratios": (3, 2)})
lab.stacked(
    left,
    list(pencil),
    {
        kind: [billions * bytes_[place] for bytes_ in pencil.values()]
        for place, kind in enumerate(("weights", "gradients", "optimizer"))
    },
)
left.set(ylabel="GB on each GPU", title="Llama-2-7B on 4 GPUs: states")
left.legend()
right.bar([f"rank {rank}" for rank in range(len(parts))], parts, color=lab.BLUE, width=0.5)
right.axhline(
    12 * parameters / here.processes / lab.MB, color=lab.RED, linestyle="--", label="predicted: 12 P / N"
)
right.set(ylabel="MB of optimizer state", title="Measured here: ZeRO-2's files")
right.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## Predicted and measured
#
# First the files of this machine; then what torch reserves for Llama-2-7B on 4 H200: 2 rows of 2048 tokens on each
# GPU, no checkpointing. The prediction counts more than the pencil: activations, communication buffers, what the
# allocator cannot use. Both last columns are without CUDA and NCCL, which take 2 GiB more, and for rows of one document
# each, as they were measured. `shardwise plan` does not know the rows and assumes about 1 GiB more
# ([lesson 2](../docs/lessons/02-zero.md)).

# %%
found = [
    {
        "": "optimizer state of rank 0, MB",
        "your guess": "",
        "pencil": 12 * parameters / here.processes / lab.MB,
        "predicted": "",
        "measured": parts[0],
    }
]
for name in ("zero1", "zero2"):
    row = f"llama-2-7b.4gpu.{name}.full.s2048.b2x1.ck0"
    memory, measured = lab.predicted(row).memory, lab.ledger(row)
    found.append(
        {
            "": f"Llama-2-7B, 4 H200, {name}, GiB",
            "your guess": my_zero2_gb * 1e9 / lab.GIB if name == "zero2" else "",
            "pencil": billions * sum(pencil[f"ZeRO-{name[-1]}"]) * 1e9 / lab.GIB,
            "predicted": memory.peak_reserved_bytes / lab.GIB,
            "measured": measured["peak_reserved_bytes"] / lab.GIB,
        }
    )
lab.table(found)

# %% [markdown]
# ZeRO-1 and ZeRO-2 need the same here, although the pencil says otherwise. The peak is where the backward pass
# begins, when the activations are there and the gradients are not yet. ZeRO-2 helps when gradients are added up
# over several micro-batches, or when activations are few.
#
# ## Exercises
#
# 1. Which columns of the pencil's table does LoRA change, and to what?
# 2. How many bytes for each parameter does ZeRO-2 need as $N \to \infty$? What does that say about 7B on cards with
#    16 GB?
# 3. Predict both with accumulation and checkpointing: `lab.predict("llama-2-7b", "4xH200", "zero1", rows=16,
#    micro_batch=1, checkpointing="full")`. Is ZeRO-2 now smaller than ZeRO-1?
# 4. It is often said that ZeRO-2 has 1.5 times the communication of DDP. Count it: what is sent?

# %% [markdown]
# ## Answers
#
# 1. Gradients and optimizer: only adapters have them, 0.6 % of the parameters at rank 16 on all linear layers. The
#    weights stay $2P$. ZeRO-1 and 2 then save nearly nothing: use ZeRO-3 or FSDP2, or a quantised base.
# 2. $2P$: 13.5 GB for 7B. Weights alone nearly fill 16 GB, so ZeRO-2 cannot be enough, however many cards there are.
# 3. Yes: ZeRO-1 keeps $2P$ of gradients until the last micro-batch, ZeRO-2 an fp32 sum of its part, $4P/N$.
# 4. DDP all-reduces gradients: that is a reduce-scatter and an all-gather, $2P$ elements for each GPU. The paper's ZeRO-1
#    and 2 reduce-scatter gradients and all-gather weights: $2P$ as well, so the factor is 1. DeepSpeed 0.19 all-reduces
#    each bucket, keeps its part, and gathers weights: $3P$. There the factor is 1.5.
