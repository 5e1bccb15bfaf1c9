# %% [markdown]
# # 08 · Energy: joules for each token, and what a power limit changes
#
# Needs: lab 01. On a CPU: about a minute, with a fake GPU. On a GPU: its own energy counter is read; no limit is set.
#
# ## Goal
#
# After this lab you know
#
# - how energy is measured, and which of it is counted;
# - what a lower power limit saves, and what it costs in time;
# - how shardwise finds the limit while it trains, and puts the old one back.

# %%
import lab
import matplotlib.pyplot as plt

import shardwise

here, work = lab.machine(), lab.folder()

# %% [markdown]
# ## Guess
#
# 1. Training TinyLlama (1.1B) on one H200: how many joules does a token cost? (A litre of water from 20 to 100 °C needs
#    335,000 J.)
# 2. You set the limit of an H200 from 700 W to 500 W. By how many percent is a step slower?

# %%
my_joules = 0.1
my_slowdown = 0.30

# %% [markdown]
# ## Run: predicted power limits
#
# A plan with `objective="energy"` also looks at power limits. `max_slowdown` says how much time you would give for it.

# %%
curves = {}
for gpus, model in (("1xH200", "tinyllama-1.1b"), ("1xRTX4090", "tinyllama-1.1b")):
    changes = ["strategy=single", "train.micro_batch=4", "train.global_batch=4", "train.checkpointing=full"]
    plan = shardwise.plan(
        model=model, gpus=gpus, changes=changes, objective="energy", max_slowdown=0.05, memory_cap=None
    )
    chosen, curves[gpus] = plan.options[0], plan.power.curve
    print(
        f"{gpus}: {chosen.power_limit_watts or plan.power.curve[0].limit_watts} W is chosen for at most 5 % more time"
    )

# %% [markdown]
# ## Plot

# %%
figure, axes = plt.subplots()
for (gpus, curve), colour in zip(curves.items(), (lab.BLUE, lab.ORANGE), strict=True):
    own = curve[0].limit_watts
    watts = [100 * point.limit_watts / own for point in curve]
    axes.plot(
        watts, [100 * (point.energy_ratio - 1) for point in curve], color=colour, label=f"{gpus}: energy"
    )
    time = [100 * (point.time_ratio - 1) for point in curve]
    axes.plot(watts, time, color=colour, linestyle="--", label=f"{gpus}: time")
axes.axhline(0, color=lab.GREY, linewidth=1)
axes.set(xlabel="power limit, % of the card's own", ylabel="change, %", ylim=(-40, 60))
axes.set_title("TinyLlama on one card: what a lower limit changes, predicted")
axes.invert_xaxis()
axes.legend(fontsize=8)
plt.show()
at_500 = [point.time_ratio - 1 for point in curves["1xH200"] if point.limit_watts == 500]
if at_500:
    print(f"500 W on H200: {at_500[0]:+.1%} time predicted; you guessed {my_slowdown:+.0%}")

# %% [markdown]
# Where the lines are flat the card draws less than the limit: lowering it changes nothing. Then the clock falls. Power
# grows faster than the clock, so the last watts buy little speed. Below a point the step takes so long that the power
# which does not depend on the clock costs more than is saved: energy rises again.
#
# ## Run: let a run choose
#
# Without a GPU this is a rehearsal: the training is real, the card is a fake one that slows steps down as its clock
# would. Everything that it says is marked SIMULATED. With a GPU the run only measures: setting a limit needs root.

# %%
simulate = here.gpus == 0
job = lab.job(
    "energy",
    work,
    train={"steps": 110 if simulate else 60, "global_batch": 2, "micro_batch": 2},
    energy={"objective": "energy", "power_limits": [700, 600, 500, 400, 300, 200]} if simulate else {},
)
run = shardwise.train(job, processes=1, simulate_power=simulate)
for event in run.events("power"):
    if event["what"] == "choice":
        print("\n".join(event["reasons"]))
joules = [step["joules"] or 0.0 for step in run.events()]
print(f"{sum(joules):,.0f} J in {len(joules)} steps, source: {run.events('run')[-1]['energy_source']}")

# %%
windows = [event for event in run.events("power") if event["what"] == "window"]
if windows:
    figure, (left, right) = plt.subplots(ncols=2)
    each = [(one["watts"], one["joules"] / one["steps"], one["seconds"] / one["steps"]) for one in windows]
    left.scatter([w for w, _, _ in each], [j for _, j, _ in each], color=lab.BLUE)
    left.set(
        xlabel="limit, W", ylabel="joules a step", ylim=(0, None), title="Windows of the search (SIMULATED)"
    )
    steps = run.events()
    right.plot([step["step"] for step in steps], [step["seconds"] for step in steps], color=lab.GREY)
    for event in run.events("power"):
        if event["what"] == "level":
            right.axvline(event["step"], color=lab.ORANGE, linewidth=1)
    right.set(xlabel="step", ylabel="seconds", ylim=(0, None), title="Steps; a line: another limit")
    plt.show()

# %% [markdown]
# ## Predicted and measured
#
# Energy of a step, on H200, with the counters of the cards (NVML). GPUs only: neither processors nor network nor power
# supplies.

# %%
rows = []
for name, model, gpus, strategy, micro, checkpointing in (
    ("tinyllama-1.1b.1gpu.single.full.s2048.b4x1.ck0", "tinyllama-1.1b", 1, "single", 4, "none"),
    ("tinyllama-1.1b.1gpu.single.full.s2048.b4x1.ck1", "tinyllama-1.1b", 1, "single", 4, "full"),
    ("tinyllama-1.1b.4gpu.zero2.full.s2048.b8x1.ck0", "tinyllama-1.1b", 4, "zero2", 8, "none"),
    ("llama-2-7b.4gpu.zero2.full.s2048.b2x1.ck0", "llama-2-7b", 4, "zero2", 2, "none"),
    ("llama-2-7b.4gpu.zero3.full.s2048.b2x1.ck0", "llama-2-7b", 4, "zero3", 2, "none"),
):
    option = lab.predict(
        model,
        f"{gpus}xH200",
        strategy,
        rows=micro * gpus,
        micro_batch=micro,
        checkpointing=checkpointing,
    )
    measured = lab.ledger(name)
    rows.append(
        {
            "row": f"{model}, {gpus} GPU, {strategy}, {checkpointing}",
            "predicted J/token": option.energy.joules_per_token,
            "measured J/token": measured["joules_per_step"] / measured["tokens_per_step"],
        }
    )
lab.table(rows)
print(f"\nyou guessed {my_joules} J for the first row")

# %% [markdown]
# ## Exercises
#
# 1. Checkpointing recomputes each block in the backward pass. By how much does it raise the energy of a token, and why
#    not by a third?
# 2. Pretraining TinyLlama took 3 trillion tokens. With the first row's J/token: how many kWh, and what do they cost you?
# 3. Under ZeRO-3 the 7B model needs more joules for each token than under ZeRO-2. Where do they go?
# 4. `energy: {objective: max-slowdown, max_slowdown: 0.1}`: change the rehearsal. Which limit is chosen?

# %% [markdown]
# ## Answers
#
# 1. See rows 1 and 2: about 30 %. The forward pass is a third of the work of a step, but loss, optimizer and the output
#    head are not recomputed.
# 2. $0.0103\,\mathrm{J} \times 3 \cdot 10^{12} = 3.1 \cdot 10^{10}\,\mathrm{J}$, 8,500 kWh of the GPUs alone.
# 3. The GPUs wait for weights, and a waiting GPU draws a good part of its power.
# 4. Run it. With a fake card that is limited at 700 W it is a higher limit than for least energy.
