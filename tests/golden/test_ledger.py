"""The accuracy ledger: what the simulator says of every row that was measured, within bounds."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import accuracy
from shardwise.planner import planning
from shardwise.planner.search import MARGIN

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PERCENT = re.compile(r"[+-]?\d+\.\d+ %")
Comparisons = list[dict[str, Any]]


@pytest.fixture(scope="module")
def predict() -> ModuleType:
    return accuracy.module("predict")


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return accuracy.module("page")


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparisons, Comparisons]:
    """Every row, and those on H100, once by the script, which sees to it that strings hash alike."""
    folder = tmp_path_factory.mktemp("ledger")
    files = folder / "comparisons.jsonl", folder / "h100.jsonl"
    done = subprocess.run(
        [sys.executable, str(accuracy.FOLDER / "predict.py"), "--out", files[0], "--h100", files[1]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows, on_h100 = ([json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files)
    return rows, on_h100


@pytest.fixture(scope="module")
def comparisons(predicted: tuple[Comparisons, Comparisons]) -> Comparisons:
    return predicted[0]


@pytest.fixture(scope="module", autouse=True)
def _no_collection() -> Iterator[None]:
    """Traces are made of millions of objects that last: a search for garbage among them takes seconds."""
    gc.disable()
    yield
    gc.enable()
    kept = accuracy.module("predict")
    for made in (kept._trace, kept._tracer, planning._kept_tracer):  # a gigabyte
        made.cache_clear()


def of(comparisons: Comparisons, which: str) -> Comparisons:
    members = [c for c in comparisons if c["set"] == which and c["measured"]]
    if not members:
        pytest.skip(f"no row of the set {which} has been measured yet")
    return members


def test_every_measured_row_is_one_of_the_ledger(predict: ModuleType, comparisons: Comparisons) -> None:
    assert {c["id"] for c in comparisons} == set(predict.measured_rows())
    failed = [row["id"] for row in predict.measured_rows().values() if row["error"] and not row["oom"]]
    assert failed == [], "a row that ended for another reason than memory says nothing"


SETS_AND_QUANTITIES = [
    (s, q) for s in ("fit", "held-out", "choices", "families", "attention") for q in ("reserved", "step")
]


@pytest.mark.parametrize(("which", "quantity"), SETS_AND_QUANTITIES)
def test_each_row_is_within_its_bound(
    predict: ModuleType, comparisons: Comparisons, which: str, quantity: str
) -> None:
    """But those that are named with the reason, which have to be off."""
    members = of(comparisons, which)
    _, worst = predict.BOUNDS[quantity]
    far = {
        c["id"]: f"{c['differences'][quantity]:+.1%}"
        for c in members
        if c["differences"][quantity] is not None and abs(c["differences"][quantity]) > worst
    }
    named = {c["id"] for c in members} & set(accuracy.module("missed").MISSED[quantity])
    assert set(far) == named, far


def _means() -> list[Any]:
    """A mean that misses its bound is a failure that every run shows, until it does not."""
    missed = accuracy.module("missed").MISSED_MEANS
    return [
        pytest.param(
            s, q, marks=pytest.mark.xfail(reason=missed[q][s], strict=True) if s in missed[q] else ()
        )
        for s, q in SETS_AND_QUANTITIES
    ]


@pytest.mark.parametrize(("which", "quantity"), _means())
def test_the_mean_of_a_set_is_within_its_bound(
    predict: ModuleType, comparisons: Comparisons, which: str, quantity: str
) -> None:
    mean, _ = predict.BOUNDS[quantity]
    assert predict.summarize(of(comparisons, which), quantity).mean <= mean


def test_nothing_predicted_to_fit_ran_out_of_memory(comparisons: Comparisons) -> None:
    assert [c["id"] for c in comparisons if c["oom"] and c["fits"]] == []


def test_a_row_that_ran_is_not_refused_by_more_than_the_bound(comparisons: Comparisons) -> None:
    """Saying of everything that it does not fit would keep the promise above."""
    refused = [c for c in comparisons if c["measured"] and not c["fits"]]
    assert [c["id"] for c in refused if c["differences"]["needed"] > 0.05] == []


def test_the_plans_margin_covers_what_was_predicted_too_low(
    predict: ModuleType, comparisons: Comparisons
) -> None:
    missed = accuracy.module("missed").MISSED["reserved"]
    members = [c for c in comparisons if c["measured"] and c["id"] not in missed]
    assert min(c["differences"]["needed"] for c in members) >= -MARGIN


def test_of_a_rows_measurements_the_median_counts_and_those_with_the_timer_only_alone(
    predict: ModuleType, tmp_path: Path
) -> None:
    def line(name: str, engine: str, hour: int, seconds: float) -> str:
        date = f"2026-11-22T{hour:02}:30:00+00:00"
        measured = {"id": name, "strategy": {"engine": engine}, "date": date, "step_seconds": seconds}
        return json.dumps(measured)

    file = tmp_path / "measured.jsonl"
    lines = [line("both", "deepspeed", 20, 9.0), line("both", "deepspeed", 22, 1.0)]
    lines += [line("before", "deepspeed", 20, 3.0), line("before", "deepspeed", 20, 4.0)]
    lines += [line("fsdp2", "fsdp2", hour, seconds) for hour, seconds in ((20, 5.0), (21, 7.0), (22, 6.0))]
    file.write_text("\n".join(lines), encoding="utf-8")
    counts = {name: row["step_seconds"] for name, row in predict.measured_rows(file).items()}
    assert counts == {"both": 1.0, "before": 4.0, "fsdp2": 6.0}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are the same without a process per core, and take a fifth less processor time."""
    monkeypatch.setattr(planning, "_other_processes", lambda _: nullcontext())


def _jobs(kept: str, changed: str) -> list[Any]:
    """Those of both names. A choice that has changed fails until it is measured, and this test with it."""
    choices = accuracy.module("choices")
    reason = "decisions 0102, 0103, 0112: another choice since four GPUs were measured"
    mark = pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError)
    found = [pytest.param(job, id=str(job)) for job in getattr(choices, kept)]
    return found + [pytest.param(job, id=str(job), marks=mark) for job in getattr(choices, changed)]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("job", _jobs("FASTEST", "CHANGED"))
def test_the_plans_choice_is_within_3_percent_of_the_fastest(job: Any) -> None:
    one = accuracy.module("choices").chosen(job)
    assert one.measured is not None
    assert one.behind <= 0.03


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("job", _jobs("REHEARSALS", "CHANGED_REHEARSALS"))
def test_on_smaller_cards_the_choice_runs(job: Any) -> None:
    one = accuracy.module("choices").chosen(job)
    assert one.measured is not None
    assert not one.measured["error"]


@pytest.mark.parametrize(
    "block", ["headline", "bound", "missed", "host", "again", "apart", "peers", "families", "terms"]
)
def test_the_page_says_what_is_computed_now(page: ModuleType, comparisons: Comparisons, block: str) -> None:
    """`python benchmarks/accuracy/page.py` makes it anew."""
    text = page.PAGE.read_text(encoding="utf-8")
    shown = text.split(f"<!-- {block} -->")[1].split("<!-- end -->")[0].strip()
    now = page.BLOCKS[block](comparisons)
    assert PERCENT.sub("%", shown) == PERCENT.sub("%", now)
    numbers = [[float(found[:-2]) for found in PERCENT.findall(text)] for text in (shown, now)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.11)


def test_the_page_has_every_row(page: ModuleType, comparisons: Comparisons) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert [c["id"] for c in comparisons if f"| `{c['id']}` | {c['set']} |" not in text] == []
    for name in page.pictures(comparisons):
        picture = (page.PAGE.parent / name).read_text(encoding="utf-8")
        shown = re.findall(r"<title>(.*?)</title></circle>", picture)
        quantity = "step" if "time" in name else "reserved"
        ran = [c["id"] for c in comparisons if c["measured"].get(quantity) is not None]
        assert shown == ran * 2, f"{name}: in both plots"


def test_plans_name_the_errors_that_are_computed_now(predicted: tuple[Comparisons, Comparisons]) -> None:
    """`python benchmarks/accuracy/evidence.py` writes them."""
    made = accuracy.module("evidence")
    now = tomllib.loads(made.computed(*predicted))
    shown = tomllib.loads(made.TABLE.read_text(encoding="utf-8"))
    assert shown.keys() == now.keys()
    for kind, errors in now.items():
        assert shown[kind].pop("gpus") == errors.pop("gpus")
        for name, values in errors.items():
            assert shown[kind][name] == pytest.approx(values, abs=0.0011), f"{kind}, {name}"
