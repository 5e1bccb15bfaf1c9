"""docs/scenarios.md: its rows have a state, what they cite exists, and a few of their commands are run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).parents[2]

scenarios = script("docs/scenarios.py")
TEXT = scenarios.PAGE.read_text(encoding="utf-8")
ROWS = {row.command: row for row in scenarios.rows(TEXT)}


def test_every_row_has_a_state_and_a_reason_where_it_is_not_done() -> None:
    tables = [table for table in scenarios.tables(TEXT) if table[0][-1] == "state" and len(table[0]) == 4]
    cells = [row for table in tables for row in table[1:]]
    assert len(cells) > 90
    assert {len(row) for row in cells} == {4}
    state = re.compile(r"done(( in|[;:,]) .+)?|(partly|refused)( as .+)?: .+")
    assert [row[3] for row in cells if not state.fullmatch(row[3])] == []


def test_committed_results_that_it_names_exist() -> None:
    lines = (ROOT / "benchmarks/accuracy/results/measured.jsonl").read_text(encoding="utf-8").splitlines()
    measured = {json.loads(line)["id"] for line in lines}
    named = set(re.findall(r"`([\w.-]+\.\dgpu\.[\w.-]+)`", TEXT))
    assert len(named) >= 8
    assert named <= measured
    files = re.findall(r"`(benchmarks/[\w/.-]+)`|`python (benchmarks/[\w/.-]+)", TEXT)
    assert len(files) > 8
    assert [name for pair in files for name in pair if name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    "command",
    [
        "`shardwise init --from ds_config_zero2.json && cat job.yaml`",
        "`shardwise check master.sh`",
        "`shardwise report bench-4xh200 --html page.html`",
    ],
)
def test_a_command_of_the_page_prints_what_it_says(command: str) -> None:
    """All of them: `python docs/scenarios.py`."""
    assert scenarios.run(ROWS[command]) == []


def test_what_is_not_printed_is_found() -> None:
    row = scenarios.Row("", "`x`", "exit code 2: `one … three` then `four`", "done")
    assert scenarios.missing(row, "0 one two\nthr ee four", 2) == []
    assert scenarios.missing(row, "three one four", 0) == ["exit code 0, not 2", "not printed: three"]
