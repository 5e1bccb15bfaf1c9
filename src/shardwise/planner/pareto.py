"""`plan --pareto`: time against energy per token as a table, over strategies and power limits."""

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.planner.plan import Plan
from shardwise.planner.search import cost
from shardwise.planner.table import batch, joules, limit
from shardwise.simulate.power import energy_error, levels


def show_pareto(plan: Plan, *, console: Console | None = None) -> None:
    """Print what nothing else beats in both, the fastest first; at most 80 columns."""
    console = console or Console()
    first = plan.pareto[0]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", highlight=False)
    for name in ("\n  strategy", "micro ×\naccum.", "ckpt\n", "limit\nW", "tokens/s\nper GPU", "time\n%"):
        table.add_column(name, justify="left" if "strategy" in name else "right", no_wrap=True)
    for name in ("J per\ntoken", "energy\n%"):
        table.add_column(name, justify="right", no_wrap=True)
    for option in plan.pareto:
        shares = [100 * (cost(option, by) / cost(first, by) - 1) for by in ("throughput", "energy")]
        table.add_row(
            f"  {option.strategy.name}",
            *batch(option.strategy),
            limit(option, plan),
            f"{option.prediction.time.tokens_per_second_per_gpu:,.0f}",
            f"{shares[0]:+.1f}",
            joules(option),
            f"{shares[1]:+.1f}",
        )
    console.print()
    console.print(Text("time against energy: what nothing else beats in both", style="bold"))
    console.print(table)
    console.print(Padding(Text(remark(plan), style="dim"), (0, 0, 0, 2), expand=False))


def remark(plan: Plan) -> str:
    """How certain the energy under a lower limit is."""
    gpu = plan.hardware.gpu
    if not levels(gpu):
        return f"only {gpu.power_watts} W: the range of power limits of {gpu.name} is not known"
    error, swept = energy_error(gpu)
    source = "recorded sweeps of this card" if swept else "no sweep of this card was measured"
    return f"energy under a lower limit ±{error:.0%}: {source}"
