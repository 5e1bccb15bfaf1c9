"""The board's pages, from run folders, benches, plans and findings."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwise.board import plots
from shardwise.board.folder import few_events
from shardwise.hardware.catalog import gpus
from shardwise.models.catalog import shapes
from shardwise.planner import table
from shardwise.planner.plan import Plan
from shardwise.planner.why import does_not_fit
from shardwise.record.bench import is_bench_folder, read_bench
from shardwise.record.read import read_run
from shardwise.report.bench import Row
from shardwise.report.compare import about, row_of
from shardwise.report.html import charts
from shardwise.report.html.pages import page, templates
from shardwise.report.html.views import title
from shardwise.units import GIB, duration

FOLDER = Path(__file__).parent


class PlanForm(BaseModel):
    """What a plan is asked for."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=200)
    gpus: str = Field(min_length=1, max_length=200)
    method: Literal["lora", "qlora", "full"] = "lora"
    rank: int = Field(16, ge=1, le=4096)
    sequence: int | None = Field(None, ge=2, le=1 << 22)
    global_batch: int | None = Field(None, ge=1, le=1 << 20)
    objective: Literal["throughput", "memory", "energy"] = "throughput"

    def changes(self) -> list[str]:
        """As `key=value` texts."""
        keys: dict[str, object] = (
            {"model.lora": "null"} if self.method == "full" else {"model.lora.rank": self.rank}
        )
        keys |= {"data.sequence_length": self.sequence, "train.global_batch": self.global_batch}
        keys |= {"model.quantization": "nf4"} if self.method == "qlora" else {}
        return [f"{key}={value}" for key, value in keys.items() if value is not None]

    def command(self) -> str:
        """The same on the command line."""
        sets = [word for change in self.changes() for word in ("--set", change)]
        words = ["--model", self.model, "--gpus", self.gpus, *sets, "--objective", self.objective, "--pareto"]
        return shlex.join(["shardwise", "plan", *words])


def render(template: str, **context: Any) -> str:
    """A page of the board."""
    return page(
        template, FOLDER / "templates", on_board=True, **{"lead": "", "facts": [], "made": "", **context}
    )


def part(template: str, **context: Any) -> str:
    """A part of a page, for its script to put in place."""
    return (
        templates(FOLDER / "templates").get_template(template).render(duration=duration, GIB=GIB, **context)
    )


def plan_page() -> str:
    """The form, with the models and GPUs that are known without a network."""
    names = [shape.hub or shape.name for shape in shapes()]
    return render("plan.html.j2", title="Plan", models=names, gpus=[gpu.name for gpu in gpus()])


def plan_document(plan: Plan, command: str) -> str:
    """What the board shows of a plan, as a page that needs nothing else."""
    title, lead, shown = plan.job.model, list(table.heading(plan))[1].plain, plan_part(plan, command)
    return page("kept.html.j2", FOLDER / "templates", title=title, lead=lead, facts=[], made="", part=shown)


def plan_part(plan: Plan, command: str) -> str:
    """The choice, the strategies as a table, their memory, speed against memory, and time against energy."""
    reasons = (
        plan.chosen.why if plan.chosen else [str(does_not_fit(plan)), does_not_fit(plan).problems[0].fix]
    )
    rows = [{**option.to_json(), "label": option.strategy.name} for option in table.excerpt(plan)]
    rows = [{**row, "predicted": row["prediction"], "measured": None} for row in rows]
    drawn = {"table": table, "charts": charts, "plots": plots}
    return part("planned.html.j2", plan=plan, reasons=reasons, rows=rows, command=command, **drawn)


def run_page(name: str, path: Path) -> str:
    """One run; its numbers and curves come as a stream."""
    job = read_run(path, with_events=False).job
    return render("one.html.j2", title=str(job.get("name")), lead=" on ".join(about(job)), names=[name])


def compare_page(paths: Mapping[str, Path]) -> str:
    """Runs and the rows of benches together; the curves of runs come as a stream."""
    few_events(paths)
    rows: list[Row] = []
    for name, path in paths.items():
        if is_bench_folder(path):
            bench = read_bench(path)
            more = {"remark": " on ".join(about(bench.head["job"]))}
            rows += [{**row, **more, "label": f"{name}/{title(row)}", "sweep": {}} for row in bench.rows]
        else:
            row, _ = row_of(path)
            rows.append({**row, "label": name, "remark": row["about"]})
    names = [name for name, path in paths.items() if not is_bench_folder(path)]
    return render("compare.html.j2", title="Compare", names=names, rows=rows)
