# %% [markdown]
# # 06 · Mamba: a model without attention
#
# Needs: lab 01. On a CPU: about a minute. On a GPU it uses shardwise's own Triton kernels, and no CUDA compiler.
#
# ## Goal
#
# After this lab you know
#
# - how Mamba's memory and time grow with the length of a row, compared with a transformer's;
# - that the same job file, strategies and plans hold for both;
# - that packed documents do not leak into each other, although Mamba has a state that runs along the row.

# %%
import math

import lab
import matplotlib.pyplot as plt

import shardwise

here, work = lab.machine(), lab.folder()

# %% [markdown]
# ## How it works
#
# Attention compares each token with all before it: $S^2$ products for $S$ tokens. Mamba reads the row once and carries a
# state of fixed size ($16 \times$ the inner width) from token to token. So its work is proportional to $S$.
#
# ## Guess
#
# 1. A row becomes 8 times as long, from 4,096 to 32,768 tokens, one row a step. How many times longer takes a step of
#    TinyLlama (1.1B)? Of `1b_mamba`?

# %%
my_llama = 16.0
my_mamba = 8.0

# %% [markdown]
# ## Run: train one
#
# The same small job as in lab 01, with another model. Without a GPU the scan is a plain loop in PyTorch, so this model
# is smaller. Its first loss follows the same rule.

# %%
small = {
    "source": "130m_mamba",
    "config": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}
job = lab.job(
    "mamba",
    work,
    model=small,
    data={"sequence_length": 64},
    optimizer={"learning_rate": 4e-3, "warmup_steps": 5},
    train={"steps": 30, "global_batch": 8, "micro_batch": 8},
)
run = shardwise.train(job, processes=1)
steps = run.events()
print(f"first loss {steps[0]['loss']:.4f}, predicted {math.log(400):.4f}; last loss {steps[-1]['loss']:.4f}")

# %% [markdown]
# ## Run: how it grows
#
# Plans of both models on one H200: all weights, one row, checkpointing every block.

# %%
lengths = (2048, 4096, 8192, 16384, 32768)

longer = {"tinyllama-1.1b": {"max_position_embeddings": 32768}, "1b_mamba": None}  # Mamba has no positions
curves = {
    model: [
        lab.predict(
            model,
            "1xH200",
            "single",
            rows=1,
            micro_batch=1,
            checkpointing="full",
            length=length,
            config=config,
        )
        for length in lengths
    ]
    for model, config in longer.items()
}

# %% [markdown]
# ## Plot

# %%
figure, (left, right) = plt.subplots(ncols=2)
for (model, found), colour in zip(curves.items(), (lab.ORANGE, lab.BLUE), strict=True):
    left.plot(lengths, [one.time.step_seconds for one in found], marker="o", color=colour, label=model)
    memory = [one.memory.peak_reserved_bytes / lab.GIB for one in found]
    right.plot(lengths, memory, marker="o", color=colour, label=model)
for axes, unit, title in ((left, "seconds a step", "Time"), (right, "GiB", "Memory")):
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.set(xlabel="tokens in the row", ylabel=unit, ylim=(0, None), title=f"{title}, one row on one H200")
    axes.legend()
plt.show()
for model, guess in (("tinyllama-1.1b", my_llama), ("1b_mamba", my_mamba)):
    times = [one.time.step_seconds for one in curves[model]]
    print(f"{model}: 8 times the tokens take {times[4] / times[1]:.1f} times as long; you guessed {guess}")

# %% [markdown]
# Memory hardly grows at first: the states of a 1.1B model, 16 bytes for each parameter, are most of it. What grows is
# proportional to the length in both, as flash attention does not store the $S^2$ scores. The difference is time, and it
# only shows for long rows: at 4k tokens most of a transformer's work is its matrices. Below that both lines are flat,
# because the GPU waits for Python to issue the step.
#
# ## Predicted and measured
#
# Rows of the accuracy ledger, all on H200.

# %%
rows = []
for model, length, micro, every in (
    ("130m_mamba", 2048, 8, 0),
    ("1b_mamba", 2048, 4, 0),
    ("1b_mamba", 2048, 4, 1),
    ("3b_mamba", 4096, 1, 1),
):
    option = lab.predict(
        model,
        "1xH200",
        "single",
        rows=micro,
        micro_batch=micro,
        checkpointing="full" if every else "none",
        length=length,
    )
    measured = lab.ledger(f"{model}.1gpu.single.full.s{length}.b{micro}x1.ck{every}")
    rows.append(
        {
            "model": model,
            "tokens": micro * length,
            "checkpointing": bool(every),
            "predicted GiB": option.memory.peak_reserved_bytes / lab.GIB,
            "measured GiB": measured["peak_reserved_bytes"] / lab.GIB,
            "predicted s": option.time.step_seconds,
            "measured s": measured["step_seconds"],
        }
    )
lab.table(rows)

# %% [markdown]
# ## Exercises
#
# 1. How many parameters has `7b_mamba`, and how many GB of states under AdamW? Ask
#    `shardwise.plan(model="7b_mamba", gpus="8xRTX4090+512GiB").job.parameters`.
# 2. It is sometimes said that 4 cards with 24 GB train it under ZeRO-2. Plan it. What is the least that each
#    card needs under ZeRO-2, with a pencil?
# 3. Set `data.packing` to `False` in the small job. What happens to `tokens` of a step, and why?
# 4. Why is there no tensor parallelism for Mamba here? See what `plan(...).refused` says.

# %% [markdown]
# ## Answers
#
# 1. 6.92 billion; $16 \times 6.92$ are 111 GB.
# 2. $2P + 14P/4$ bytes are 38 GB on each of 4 cards: more than 24 GB before a single activation. ZeRO-3 with offload
#    is what fits: 12 GiB on each card, and 171 GB on the host.
# 3. There are fewer tokens in a step: short paragraphs get a row each, and the rest of the row is padding. Packing
#    fills rows; state and convolution restart at each document, so that the loss is the same as without.
# 4. AutoTP cuts attention heads and the rows and columns of an MLP. Mamba's mixer has neither; cutting its inner width
#    needs another plan, which nobody has written for it.
