"""The board in a real browser: it fits every screen, draws, follows a run, and can be used by keyboard."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser
from board_server import Folders, begin, head, step, write
from browser import Browser

pytestmark = pytest.mark.skipif(browser.found() is None, reason="no Chromium is installed")

PAGES = ("/", "/run?of=runs/done", "/compare?of=runs/done&of=bench-4xh200", "/plan", "/check")
AXE = Path(__file__).parents[2] / "shared" / "axe" / "axe.min.js.gz"
DRAWN = "charts.filter(Boolean).length"
OVERFLOWING = """[...document.querySelectorAll('body *')].filter(e => !e.closest('svg, .uplot') &&
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.className)"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(page: str, board: Folders, chromium: Browser, *, width: int = 1280, dark: bool = False) -> None:
    chromium.show(f"{board.server.address}{page}", width=width, dark=dark)
    if page.startswith(("/run?", "/compare")):
        chromium.wait(DRAWN)


def silent(chromium: Browser) -> None:
    for kind in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
        assert chromium.seen(kind) == []


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_asks_nobody_else_and_is_light(
    page: str, width: int, board: Folders, chromium: Browser
) -> None:
    show(page, board, chromium, width=width)
    assert chromium.value("document.documentElement.scrollWidth") == width
    assert chromium.value(OVERFLOWING) == []
    asked = [event["request"]["url"] for event in chromium.seen("Network.requestWillBeSent")]
    assert all(url.startswith((board.server.address, "data:")) for url in asked)
    assert sum(event["encodedDataLength"] for event in chromium.seen("Network.loadingFinished")) < 1_000_000
    silent(chromium)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("page", [*PAGES, "/bench?of=bench-4xh200", "/report?of=runs/done"])
def test_axe_finds_nothing_serious(page: str, dark: bool, board: Folders, chromium: Browser) -> None:
    show(page, board, chromium, dark=dark)
    chromium.value(f"{gzip.decompress(AXE.read_bytes()).decode()}; 1")
    found = chromium.value("axe.run().then(found => JSON.stringify(found.violations))")
    assert [(one["impact"], one["id"]) for one in json.loads(found)] == []


def test_a_chart_follows_the_run_and_shows_what_was_predicted(board: Folders, chromium: Browser) -> None:
    path = begin(board.root / "runs" / "watched")
    write(path, head(), *map(step, range(1, 4)))
    show("/run?of=runs/watched", board, chromium)
    assert chromium.value(DRAWN) == 6  # without evaluations
    began = time.monotonic()
    write(path, step(4, loss=2.5))
    chromium.wait("charts[0].plot.data[0].length === 4")
    assert time.monotonic() - began < 5
    assert chromium.value("charts[0].plot.data[1]") == [4.99, 4.98, 4.97, 2.5]
    assert chromium.wait("document.querySelector('.facts').textContent.includes('2.5')")
    show("/run?of=runs/done", board, chromium)
    titles = "charts.map(chart => chart.figure.title + ': ' + chart.plot.series.map(s => s.label).join())"
    assert chromium.value(titles) == [
        "Loss: step,training,held out",
        "Gradient norm: step,before clipping",
        "Learning rate: step,learning rate",
        "Tokens a second: step,all together,predicted",
        "Memory: step,reserved at most, worst rank,predicted",
        "Power: step,all GPUs",
    ]
    silent(chromium)


def test_a_run_of_a_hundred_thousand_steps_is_zoomed_by_keyboard(board: Folders, chromium: Browser) -> None:
    show("/run?of=runs/long", board, chromium)
    assert chromium.value("Math.max(...charts[1].plot.data[1])") == 77
    chromium.value("document.querySelector('.plot-area').focus(), 1")
    chromium.press("ArrowLeft")
    assert chromium.value("document.querySelector('.u-legend .u-value').textContent") != ""
    chromium.press("+")
    chromium.wait("view && charts[0].plot.data[0][0] > 60000")
    assert chromium.value("charts[0].plot.data[0].at(-1)") == 100_000
    chromium.wait("document.activeElement.className === 'plot-area'")
    chromium.press("Escape")
    chromium.wait("!view && charts[0].plot.data[0][0] === 1")


def test_runs_are_chosen_and_compared_by_keyboard(board: Folders, chromium: Browser) -> None:
    show("/", board, chromium)
    for _ in range(40):
        chromium.press("Tab")
        element = "document.activeElement"
        if chromium.value(f"!{element}.checked && {element}.value") in ("runs/done", "bench-4xh200"):
            chromium.press(" ")
    assert chromium.value("document.querySelectorAll('input:checked').length") == 2
    chromium.value("document.querySelector('form button').focus(), 1")
    chromium.press("Enter")
    chromium.wait("location.pathname === '/compare' && document.readyState === 'complete' && charts.length")
    assert chromium.wait("charts[0].plot.series.length") >= 3


def test_the_list_keeps_what_is_chosen_while_it_changes(board: Folders, chromium: Browser) -> None:
    show("/", board, chromium)
    box = "document.querySelector('input[value=\"runs/done\"]')"
    chromium.value(f"{box}.click(), {box}.focus(), 1")
    write(begin(board.root / "runs" / "newest"), head(), step(7))
    chromium.wait("!!document.querySelector('[data-key=\"runs/newest\"]')")
    chromium.wait(f"{box}.checked && document.activeElement === {box}")


def test_findings_and_a_refused_plan_are_shown(board: Folders, chromium: Browser) -> None:
    show("/check", board, chromium)
    chromium.value("document.querySelector('textarea').value = '{\"zero_optimization\": {\"stage\": 7}}', 1")
    chromium.value("document.querySelector('#check').requestSubmit()")
    chromium.wait("document.querySelectorAll('.finding').length")
    show("/plan", board, chromium)
    chromium.value("document.querySelector('[name=gpus]').value = '4xNothing', 1")
    chromium.value("document.querySelector('#plan').requestSubmit()")
    assert "Nothing" in chromium.wait("document.querySelector('#status.error')?.textContent")
    assert chromium.value("document.querySelector('#cancel').hidden")
    silent(chromium)
