# %% [markdown]
# # 04 · Performance analysis: three experiments
#
# Needs: labs 01 and 02. On a CPU: about a minute. The same experiments on larger models and a GPU are one command:
# `python benchmarks/experiments/run.py --gpu`.
#
# ## Goal
#
# After this lab you can
#
# - compare an engine with a plain PyTorch loop, fairly: the same rows, the same loss, the same gradient norm;
# - find out what micro-batch, accumulation, offloading and overlap do to speed and memory;
# - tell a leak from a peak.

# %%
import inspect
import sys
from dataclasses import replace

import lab
import matplotlib.pyplot as plt

sys.path.insert(0, str(lab.ROOT / "benchmarks" / "experiments"))
import experiments
import plain_loop
from programs import Place, Program, run

here, work = lab.machine(), lab.folder()
place = Place(folder=work, gpu=here.name if here.gpus else "")
setting = experiments.ON_CPU[0]

# %% [markdown]
# ## Guess
#
# 1. One process, ZeRO-2: there is nobody to share with. What does DeepSpeed still cost in speed, compared with a plain
#    loop on one GPU, for a model of 1.1B?
# 2. The rows of a step stay 8. Once they are computed one at a time, once four at a time. How many times faster is four?
# 3. By how many MB does memory grow from step 3 to step 20?

# %%
my_cost = 0.05
my_speedup = 2.0
my_growth = 100.0

# %% [markdown]
# ## Run: experiment 1, a plain loop
#
# This is the plain loop: transformers, torch's AdamW, autocast, clipping. Read it once; it is what every engine has to
# be compared with.

# %%
print(inspect.getsource(plain_loop.train))

# %% [markdown]
# A speed without a loss proves nothing: a loop that skips half of the tokens is fast. So every row shows loss and
# gradient norm next to speed and memory.

# %%
programs = (
    Program(name="plain loop", steps=18),
    Program(name="single", strategy={"engine": "single"}, steps=18),
    Program(name="zero2", strategy=experiments.ZERO2, steps=18),
)
plain = [run("plain", setting, program, place) for program in programs]


def summary(rows: list[dict]) -> None:
    """A table of an experiment's rows."""
    lab.table(
        [
            {
                "row": row["program"],
                "tokens/s": row["measured"]["tokens_per_second_per_gpu"],
                "GiB": row["measured"]["peak_reserved_bytes"] / lab.GIB,
                "predicted GiB": row["predicted"]["memory"]["peak_reserved_bytes"] / lab.GIB
                if row["predicted"]
                else "",
                "first loss": f"{row['measured']['loss'][0]:.5f}",
                "last loss": f"{row['measured']['loss'][-1]:.5f}",
                "gradient norm": f"{row['measured']['grad_norm'][-1]:.4f}",
            }
            for row in rows
        ]
    )


summary(plain)

# %% [markdown]
# ## Run: experiment 2, the sweep
#
# Micro-batch times accumulation is the number of rows in a step. Here it stays 8, so that the loss of each step must
# stay, too: if it does not, the loop weights micro-batches wrongly.

# %%
points = ((1, 8), (2, 4), (4, 2))
sweep = [
    run(
        "sweep",
        replace(setting, sequence_length=64, micro_batch=micro, accumulation=accumulation),
        Program(name=f"{micro} x {accumulation}", strategy=experiments.ZERO2, steps=5, warmup=1),
        place,
    )
    for micro, accumulation in points
]
summary(sweep)
speedup = (
    sweep[-1]["measured"]["tokens_per_second_per_gpu"] / sweep[0]["measured"]["tokens_per_second_per_gpu"]
)
print(f"\nfour rows at a time are {speedup:.1f} times as fast; you guessed {my_speedup}")

# %% [markdown]
# ## Plot: experiment 3, memory over the run
#
# The memory after each step. It rises in the first steps: the optimizer makes its moments in step 1, caches fill. After
# that it should be flat. What goes on rising is a leak, often a list that keeps losses with their graphs.

# %%
figure, (left, right) = plt.subplots(ncols=2)
for row, colour in zip(plain, (lab.GREY, lab.BLUE, lab.ORANGE), strict=True):
    values = [value / lab.MB for value in row["measured"]["allocated_by_step_bytes"]]
    left.plot(range(1, len(values) + 1), values, color=colour, label=row["program"])
what = "GPU" if here.gpus else "process (resident set)"
left.set(xlabel="step", ylabel=f"MB of the {what}", ylim=(0, None), title="Memory after each step")
left.legend(loc="lower right")
names = [row["program"] for row in sweep]
speeds = [row["measured"]["tokens_per_second_per_gpu"] for row in sweep]
right.bar_label(right.bar(names, speeds, color=lab.BLUE, width=0.6), fmt="{:,.0f}", padding=2)
right.set(xlabel="micro-batch x accumulation", ylabel="tokens/s", title="8 rows a step, measured here")
right.margins(y=0.15)
plt.show()
values = plain[0]["measured"]["allocated_by_step_bytes"]
print(
    f"plain loop: {(values[-1] - values[2]) / lab.MB:+.1f} MB from step 3 to {len(values)}; you guessed {my_growth}"
)

# %% [markdown]
# ## Predicted and measured
#
# The same three experiments on one H200: TinyLlama with all weights, and Llama-2-7B with LoRA. The lines are committed
# in `benchmarks/experiments/results`, with their predictions from before the run.

# %%
gpu = lab.committed("experiments/results/1xh200.jsonl")
gpu = [row for row in gpu if row["measured"]]
for name in dict.fromkeys(row["setting"]["name"] for row in gpu if row["experiment"] == "plain"):
    print(f"\n{name}, one H200")
    found = [row for row in gpu if row["experiment"] == "plain" and row["setting"]["name"] == name]
    summary(found)
    speed = {row["program"]: row["measured"]["tokens_per_second_per_gpu"] for row in found}
    if {"plain loop", "zero2"} <= speed.keys():
        print(f"zero2: {speed['zero2'] / speed['plain loop'] - 1:+.0%} speed; you guessed {-my_cost:+.0%}")
if not gpu:
    print("not measured yet: python benchmarks/experiments/run.py --gpu")

# %%
rows = [row for row in gpu if row["experiment"] == "sweep"]
if rows:
    names = [
        f"{p['micro_batch']} x {p['accumulation']}"
        + (" offload" if p["offload"] else "")
        + ("" if p["overlap"] else " no overlap")
        for p in (row["point"] for row in rows)
    ]
    figure, (left, right) = plt.subplots(ncols=2, figsize=(9.0, 4.0), sharey=True)
    at = range(len(rows))
    for axes, unit, measured, predicted in (
        (
            left,
            "tokens/s",
            [row["measured"]["tokens_per_second_per_gpu"] for row in rows],
            [row["predicted"]["time"]["tokens_per_second_per_gpu"] for row in rows],
        ),
        (
            right,
            "GiB reserved",
            [row["measured"]["peak_reserved_bytes"] / lab.GIB for row in rows],
            [row["predicted"]["memory"]["peak_reserved_bytes"] / lab.GIB for row in rows],
        ),
    ):
        axes.barh(at, measured, height=0.6, color=lab.BLUE, label="measured")
        axes.plot(predicted, at, "D", color=lab.RED, markersize=5, label="predicted")
        axes.set(xlabel=unit)
        axes.grid(axis="y", visible=False)
    left.set_yticks(at, names)
    left.invert_yaxis()
    left.legend(fontsize=8)
    figure.suptitle("Sweep on one H200: TinyLlama, ZeRO-2, micro-batch x accumulation")
    plt.show()

# %%
curve = next((row for row in gpu if row["experiment"] == "memory" and row["program"] == "single"), None)
if curve:
    points = curve["measured"]["memory_in_step"]
    figure, axes = plt.subplots()
    axes.fill_between([p[0] for p in points], [p[1] / lab.GIB for p in points], color=lab.BLUE, alpha=0.5)
    peak = curve["predicted"]["memory"]["peak_allocated_bytes"] / lab.GIB
    axes.axhline(peak, color=lab.RED, linestyle="--", label=f"predicted peak: {peak:.1f} GiB")
    axes.set(
        xlabel="share of the step", ylabel="GiB allocated", title="Memory within a step, one H200, measured"
    )
    axes.legend()
    plt.show()

# %% [markdown]
# Memory rises through the forward pass, as activations are kept, and falls through the backward pass. The peak is where
# the two meet: at the loss.
#
# ## Exercises
#
# 1. Set `accumulation` to 16 and `micro_batch` to 1. What happens to tokens/s and to the loss of the first step?
# 2. Why does the plain loop need less memory than DeepSpeed on one GPU, although both keep the same weights and moments?
# 3. Guides often name 12 to 14 GB for training Llama-2-7B "as usual" and 8 to 10 GB with ZeRO-2 and offload.
#    Compare with the tables above: what is wrong, and what did they count?
# 4. Add `keep.append(loss)` without `detach()` to a copy of the loop. What does the plot look like?

# %% [markdown]
# ## Answers
#
# 1. The speed falls: each product is smaller, and Python's part stays. The loss of the first step changes, as the step
#    has other rows; its expectation does not.
# 2. DeepSpeed keeps flat copies and buckets for communication, also for one process.
# 3. 12 to 14 GB are the weights alone, in 16 bits. Training all of them needs 16 bytes for each parameter, 108 GB; with
#    LoRA the weights, and activations. Offloading the optimizer of adapters frees nearly nothing.
# 4. A line that rises by the size of a step's graph, until memory is full.
