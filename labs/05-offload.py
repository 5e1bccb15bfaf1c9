# %% [markdown]
# # 05 · Offload: host memory instead of another card
#
# Needs: lab 02; the compiled optimizer of DeepSpeed (`make labs` compiles it, a C++ compiler is enough). On a CPU:
# about a minute.
#
# ## Goal
#
# After this lab you know
#
# - what really lies in host memory when "the optimizer is offloaded", and how many bytes that is;
# - why a step then takes longer, and what makes up for it;
# - when to offload, and when rather not.

# %%
import lab
import matplotlib.pyplot as plt

import shardwise

here, work = lab.machine(), lab.folder()

# %% [markdown]
# ## How it works
#
# With `zero2-offload` the GPU keeps weights and activations. fp32 weights, both moments and the gradients of the step
# are in page-locked host memory. At the end of a step gradients go to the host, the **processor** runs AdamW, and new
# bf16 weights come back. `zero3-offload` also keeps the weights on the host and brings each block when it is needed.
#
# | on the host, for each parameter | bytes |
# |---|---|
# | fp32 weight, two moments | 12 |
# | gradient in fp32 | 4 |
# | bf16 weight on its way back | 2 |
#
# These 18 bytes are the least. Page-locked memory is handed out in powers of two: a block of 4.4 GB takes 8.6 GB.
#
# ## Guess
#
# 1. TinyLlama 1.1B on one H200: a step with ZeRO-2 takes about 0.16 s. How long with its optimizer on the host?
# 2. How many GB of host memory does that take?

# %%
my_seconds = 0.3
my_host_gb = 10.0

# %% [markdown]
# ## Run
#
# The same job with the optimizer here and there. On a CPU both are in the same memory: what remains is the difference
# between torch's AdamW and DeepSpeed's, which is written for processors. On a GPU you see the real thing.

# %%
job = lab.job("offload", work, train={"global_batch": 8, "micro_batch": 2})
record = shardwise.bench(
    job,
    strategies="zero2,zero2-offload",
    processes=1,
    steps=8,
    warmup=2,
    profile=False,
    out=work / "bench",
    say=lab.quiet,
)
lab.table(
    [
        {
            "strategy": row["strategy"]["name"],
            "status": row["status"],
            "first loss": f"{row['measured']['loss'][0]:.6f}",
            "last loss": f"{row['measured']['loss'][-1]:.6f}",
            "step, ms": 1e3 * row["measured"]["step_seconds"],
            f"MiB ({row['measured']['memory_of']})": row["measured"]["peak_reserved_bytes"] / 2**20,
        }
        for row in record.rows
    ]
)

# %% [markdown]
# The loss is the same up to the rounding of another AdamW.
#
# ## Run: what a plan says of it
#
# TinyLlama, 4 rows of 2048 tokens, on one card of three kinds. `+128GiB` is the memory of the host: without it nobody
# knows whether offloading fits.

# %%
cards = ("RTX4090", "RTX3090", "H200")
times = {}
for card in cards:
    for strategy in ("zero2", "zero2-offload"):
        times[card, strategy] = lab.predict(
            "tinyllama-1.1b", f"1x{card}+128GiB", strategy, rows=4, micro_batch=4, checkpointing="full"
        )
lab.table(
    [
        {
            "card": card,
            "strategy": strategy,
            "GPU GiB": found.memory.peak_reserved_bytes / lab.GIB,
            "fits": found.memory.fits,
            "host GB": found.memory.host_bytes / 1e9,
            "step s": found.time.step_seconds,
            "tokens/s": found.time.tokens_per_second_per_gpu,
        }
        for (card, strategy), found in times.items()
    ]
)

# %% [markdown]
# ## Plot
#
# Where does the time go? The GPU computes; then it waits while the processor steps the optimizer and weights are copied.

# %%
figure, axes = plt.subplots()
names = [f"{card}\n{strategy}" for card, strategy in times]
computing = [found.time.compute_seconds for found in times.values()]
waiting = [found.time.step_seconds - found.time.compute_seconds for found in times.values()]
lab.stacked(axes, names, {"the GPU computes": computing, "the GPU waits": waiting})
axes.set(ylabel="seconds a step", title="TinyLlama 1.1B, 4 rows of 2048 tokens: predicted")
axes.tick_params(axis="x", labelsize=8)
axes.legend()
plt.show()

# %% [markdown]
# ## Predicted and measured
#
# One H200, measured for the accuracy ledger: peak memory of the GPU, seconds, and page-locked host memory.

# %%
measured = lab.ledger("tinyllama-1.1b.1gpu.zero2-offload.full.s2048.b4x1.ck1")
option = times["H200", "zero2-offload"]
lab.table(
    [
        {
            "": "GPU, GiB",
            "your guess": "",
            "predicted": option.memory.peak_reserved_bytes / lab.GIB,
            "measured": measured["peak_reserved_bytes"] / lab.GIB,
        },
        {
            "": "seconds a step",
            "your guess": my_seconds,
            "predicted": option.time.step_seconds,
            "measured": measured["step_seconds"],
        },
        {
            "": "host, GB",
            "your guess": my_host_gb,
            "predicted": option.memory.host_bytes / 1e9,
            "measured": measured["host_memory_bytes"] / 1e9,
        },
    ]
)

# %% [markdown]
# Measured host memory is all that the process has, Python and the libraries included.
#
# **What makes up for it.** The optimizer steps once for all micro-batches of a step. With more accumulation its time is
# divided among more tokens:

# %%
accumulations = (1, 2, 4, 8, 16, 32)
speeds = {
    strategy: [
        lab.predict(
            "tinyllama-1.1b",
            "1xRTX4090+128GiB",
            strategy,
            rows=4 * accumulation,
            micro_batch=4,
            checkpointing="full",
        ).time.tokens_per_second_per_gpu
        for accumulation in accumulations
    ]
    for strategy in ("zero2", "zero2-offload")
}
figure, axes = plt.subplots()
for (name, values), colour in zip(speeds.items(), (lab.BLUE, lab.ORANGE), strict=True):
    axes.plot(accumulations, values, marker="o", color=colour, label=name)
axes.set_xscale("log", base=2)
axes.set_xticks(accumulations, [str(value) for value in accumulations])
axes.set(
    xlabel="micro-batches a step", ylabel="tokens/s", ylim=(0, None), title="RTX 4090, TinyLlama: predicted"
)
axes.legend()
plt.show()

# %% [markdown]
# ## Exercises
#
# 1. Llama-2-7B, all weights, one card with 24 GB and a host with 128 GB: does `zero3-offload` fit? Compute first.
# 2. Plan it: `shardwise.plan(model="llama-2-7b", gpus="1xRTX4090+128GiB")`. What is chosen?
# 3. Why is offloading with LoRA nearly free of cost, and nearly useless?
# 4. It is often said that offloading costs 30 to 50 % of the speed. Under which condition is that true?

# %% [markdown]
# ## Answers
#
# 1. 18 bytes for each of $6.74 \cdot 10^9$ parameters are 121 GB, and with the rounding 163 GB: more than the host has.
#    Compare with `lab.predict("llama-2-7b", "1xRTX4090+192GiB", "zero3-offload", rows=1, micro_batch=1,
#    checkpointing="full").memory.host_bytes`.
# 2. `fsdp2-offload`. FSDP2 keeps 16 bytes for each parameter on the host, 108 GB, without DeepSpeed's copies.
# 3. The optimizer of adapters is 0.6 % of that of all weights. There is little to copy and little to free.
# 4. It depends on how fast the card is and how many tokens a step has. The plan of the RTX 4090 says 42 % with one
#    micro-batch and 18 % with 32. The H200 of the table computes faster and waits as long: 0.69 s instead of 0.16 s.
