# %% [markdown]
# # 01 · Setup: what this machine can train
#
# Needs: nothing but `make labs`. On a CPU: about a minute. On GPUs it runs as it stands.
#
# ## Goal
#
# After this lab you know
#
# - what your machine is missing for training, and how to find out;
# - the three steps of every training with shardwise: a **job**, a **plan**, a **run**;
# - two numbers that you can predict before any GPU is touched.

# %%
import math

import lab
import matplotlib.pyplot as plt

import shardwise

here, work = lab.machine(), lab.folder()
print(f"shardwise {shardwise.__version__} on {here.name}, {here.gpus} GPUs")

# %% [markdown]
# ## Guess
#
# Write your guesses down before you run the next cells. Nobody looks.
#
# 1. A model that has learned nothing gives each of its 400 tokens the same probability. Its loss is the mean of
#    $-\ln p$ over the tokens. What is the loss of the first step?
# 2. TinyLlama has 1.1 billion parameters. Training all of them in bf16 with AdamW, 4 rows of 2048 tokens at a
#    time, without checkpointing: how many GiB of GPU memory?

# %%
my_first_loss = 5.0
my_gib = 10.0

# %% [markdown]
# ## Run: ask the machine
#
# `doctor` looks at drivers, GPUs, links, kernels, DeepSpeed, disks and ports. It changes nothing. Anything that is
# a `problem` stops training; a `warning` makes it slower or less safe.

# %%
report = shardwise.doctor()
for check in report.checks:
    print(f"{check.status:>8}  {check.name}: {check.finding}")
print("ready to train" if report.ready else "not ready: see the problems above")

# %% [markdown]
# ## Run: a job
#
# A job says what to train, on which data, for how long. It does **not** say how the work is spread over GPUs: that
# is the strategy, which a plan can choose. `lab.job` makes a small Llama with random weights on a text that comes
# with shardwise. Reading the file of your own job is `shardwise.load_job("job.yaml")`.

# %%
job = lab.job("first", work, train={"steps": 60, "global_batch": 16, "micro_batch": 8})
print(job.model.source, job.model.config)
print(job.train)

# %% [markdown]
# ## Run: train it
#
# `train` starts processes of its own and returns when they have ended. The run folder has everything: the job, the
# plan, the machine, one line for each step, and checkpoints.

# %%
run = shardwise.train(job, processes=1)
numbers = run.summary()
print(f"exit code {run.exit_code}, {numbers['steps']} steps, {numbers['tokens_per_second']:,.0f} tokens/s")

# %% [markdown]
# ## Plot

# %%
steps = run.events()
figure, axes = plt.subplots()
axes.plot(
    [step["step"] for step in steps], [step["loss"] for step in steps], color=lab.BLUE, label="measured"
)
axes.axhline(math.log(400), color=lab.RED, linestyle="--", label="predicted for step 1: ln 400")
axes.set(xlabel="step", ylabel="loss, nats a token", title="A small model learns a small text")
axes.legend()
plt.show()

# %% [markdown]
# ## Predicted and measured
#
# **The first loss.** Uniform over 400 tokens: $-\ln\frac{1}{400} = \ln 400 = 5.99$. A fresh model is not quite
# uniform, so it starts slightly above. If your first loss is far higher, the weights or the labels are wrong. If it
# is far lower, the model has already seen the answer.

# %%
lab.table(
    [
        {
            "": "first loss",
            "your guess": my_first_loss,
            "predicted": math.log(400),
            "measured": steps[0]["loss"],
        }
    ]
)

# %% [markdown]
# **The memory of a 1.1B model.** A plan runs the real training step of the real model on tensors without memory, and
# replays it on a GPU that you name. You need neither the weights nor the GPU. Measured is a run on one H200 that is
# part of this repository (`benchmarks/accuracy`).

# %%
changes = [
    "strategy=single",
    "train.global_batch=4",
    "train.micro_batch=4",
    "train.checkpointing=none",
    "data.sequence_length=2048",
]
plan = shardwise.plan(model="tinyllama-1.1b", gpus="1xH200", changes=changes)
option = plan.options[0]
measured = lab.ledger("tinyllama-1.1b.1gpu.single.full.s2048.b4x1.ck0")
predicted = option.prediction.memory
lab.table(
    [
        {
            "": "GiB reserved",
            "your guess": my_gib,
            "predicted": predicted.peak_reserved_bytes / lab.GIB,
            "measured": measured["peak_reserved_bytes"] / lab.GIB,
        },
        {
            "": "seconds a step",
            "your guess": "",
            "predicted": option.prediction.time.step_seconds,
            "measured": measured["step_seconds"],
        },
    ]
)

# %% [markdown]
# The next labs write this call as `lab.predict(...)`.
#
# Most of the memory is neither weights nor activations. AdamW keeps an fp32 copy of each weight and two moments: 12 bytes
# for each parameter, on top of 2 for the bf16 weight.

# %%
terms = vars(predicted.terms)
names = [name.removesuffix("_bytes").replace("_", " ") for name in terms]
figure, axes = plt.subplots(figsize=(8.0, 2.8))
bars = axes.barh(names, [value / lab.GIB for value in terms.values()], color=lab.BLUE)
axes.bar_label(bars, fmt="%.1f", padding=3)
axes.invert_yaxis()
axes.margins(x=0.08)
axes.set(xlabel="GiB", title="TinyLlama 1.1B on one GPU: where the memory goes when most is allocated")
axes.grid(axis="y", visible=False)
plt.show()

# %% [markdown]
# ## Exercises
#
# 1. Double `global_batch` to 32 and train under another name. What changes in the curve, what does not?
# 2. The vocabulary of Llama-2 has 32,000 tokens. What is the first loss of a Llama-2 with random weights?
# 3. How much memory does the 1.1B model need with `train.checkpointing=full`? Change one word above.
# 4. 16 bytes for each parameter: what do the states of a 7B model need? Does it fit a card with 24 GB?

# %% [markdown]
# ## Answers
#
# 1. The first loss stays: it depends on the weights, not on the batch. Each step is less noisy and takes twice as
#    long; after the same number of **tokens** the loss is usually somewhat higher, as there were fewer updates.
# 2. $\ln 32000 = 10.37$.
# 3. Run it: activations shrink to the inputs of the blocks, and the step takes about a third longer. The ledger has
#    18.97 GiB measured for `ck1`.
# 4. $16 \times 6.74 \cdot 10^9$ bytes are 108 GB. It does not fit: it has to be sharded (labs 02 and 03), offloaded
#    (lab 05), or only adapters are trained (LoRA).
