"""The pages in a real browser: they load nothing, run nothing, fit every screen, and show text as text."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import escape
from test_report import HEAD, make, step, typical

import browser
from browser import Browser
from conftest import HOSTILE, IMAGE
from shardwise.cli import main
from shardwise.report.html.pages import run_page

needs_browser = pytest.mark.skipif(browser.found() is None, reason="no Chromium is installed")

OVERFLOWING = """[...document.querySelectorAll('body *')].filter(e => !e.closest('svg') &&
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.className)"""
CUT_OFF = "[...document.querySelectorAll('.numbers')].filter(e => e.scrollWidth > e.clientWidth).length"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def pages(bench_folder: Path, tmp_path: Path) -> dict[str, Path]:
    """A bench, one run, several runs of which one has not begun to step; each as a page."""
    one = typical(tmp_path / "one")
    hostile = {"name": HOSTILE, "model": {"source": IMAGE}, "data": {"train": f"{HOSTILE}.jsonl"}}
    (one / "job.yaml").write_text(json.dumps(hostile))
    begun = make(tmp_path / "begun", (0.0, HEAD))
    short = make(tmp_path / "short", (0.0, HEAD), (1.0, step(1)))
    made = {}
    for name, folders in {"bench": [bench_folder], "run": [one], "runs": [one, begun, short]}.items():
        made[name] = tmp_path / f"{name}.html"
        assert main(["report", *map(str, folders), "--html", str(made[name])]) == 0
    return made


class Elements(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("name", ["bench", "run", "runs"])
def test_the_file_refers_to_nothing_and_can_run_nothing(name: str, pages: dict[str, Path]) -> None:
    elements = Elements(pages[name].read_text()).found
    assert {tag for tag, _ in elements} & {"script", "img", "iframe", "object", "form", "base", "a"} == set()
    for tag, attributes in elements:
        assert not any(key.startswith("on") or key in ("style", "src", "action") for key in attributes), tag
        assert tag != "link" or attributes["href"] == "data:,"
    policies = [a["content"] for tag, a in elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert str(policies[0]).startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in str(policies[0])


@pytest.mark.parametrize("name", ["bench", "run"])
def test_the_policy_names_the_style_sheet_by_its_hash_and_markup_in_names_is_text(
    name: str, pages: dict[str, Path]
) -> None:
    text = pages[name].read_text()
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src &#39;sha256-{digest}&#39;" in text
    assert f"<h1>{'a bench ' if name == 'bench' else ''}{escape(HOSTILE)}</h1>" in text
    assert HOSTILE not in text


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["bench", "run", "runs"])
def test_a_page_fits_loads_nothing_and_is_silent(
    name: str, width: int, pages: dict[str, Path], chromium: Browser
) -> None:
    chromium.show(pages[name], width=width)
    assert chromium.value("document.documentElement.scrollWidth") == width
    assert chromium.value(OVERFLOWING) == []
    assert chromium.value(CUT_OFF) == 0
    asked = [event["request"]["url"] for event in chromium.seen("Network.requestWillBeSent")]
    assert asked == [pages[name].resolve().as_uri()]
    assert chromium.seen("Log.entryAdded") == []
    assert chromium.seen("Runtime.exceptionThrown") == []
    assert chromium.seen("Runtime.consoleAPICalled") == []
    assert chromium.value("document.scripts.length + document.images.length") == 0


@needs_browser
@pytest.mark.parametrize("name", ["bench", "run"])
def test_markup_in_names_is_shown_as_text(name: str, pages: dict[str, Path], chromium: Browser) -> None:
    chromium.show(pages[name], width=1280)
    text = chromium.value("document.body.textContent")
    assert HOSTILE in text
    assert IMAGE.rpartition("/")[2] in text  # of a path the last part
    assert chromium.value("document.title") != "owned"


@needs_browser
def test_the_policy_holds(pages: dict[str, Path], chromium: Browser) -> None:
    """Even an image that came in somehow would not be asked for."""
    chromium.show(pages["bench"], width=1280)
    chromium.value("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'})), 1")
    chromium.value("document.body.append(Object.assign(document.createElement('script'), {text: 'x=1'})), 1")
    messages = [event["entry"]["text"] for event in chromium.seen("Log.entryAdded")]
    assert any("img-src" in message for message in messages)
    assert any("default-src" in message or "script-src" in message for message in messages)
    assert [event["blockedReason"] for event in chromium.seen("Network.loadingFailed")] == ["csp"]
    assert chromium.seen("Network.responseReceived")[1:] == [], "nothing but the page itself has come"


@needs_browser
def test_dark_and_light_are_two_schemes_and_both_can_be_read(
    pages: dict[str, Path], chromium: Browser
) -> None:
    """Contrast of text and ground as WCAG 2 counts it: at least 7 to 1, and 4.5 for what is softer."""
    grounds = []
    for dark in (False, True):
        chromium.show(pages["bench"], width=1280, dark=dark)
        ground = _luminance(chromium.value("getComputedStyle(document.body).backgroundColor"))
        grounds.append(ground)
        for selector, least in (("h1", 7.0), (".lead", 4.5), (".tag.valid", 4.5)):
            style = f"getComputedStyle(document.querySelector('{selector}'))"
            colour = _luminance(chromium.value(f"{style}.color"))
            behind = ground
            if selector.startswith(".tag"):
                behind = _luminance(chromium.value(f"{style}.backgroundColor"))
            high, low = max(colour, behind), min(colour, behind)
            assert (high + 0.05) / (low + 0.05) >= least, (dark, selector)
    assert grounds[0] > 0.9
    assert grounds[1] < 0.02


def _luminance(colour: str) -> float:
    """Of `rgb(1, 2, 3)`, relative (WCAG 2)."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@needs_browser
def test_bars_are_as_long_as_what_they_show(pages: dict[str, Path], chromium: Browser) -> None:
    """zero2: 13 GiB predicted, 6 of them weights, and 11 measured: in pixels of the browser."""
    chromium.show(pages["bench"], width=1280)
    card = (
        "[...document.querySelectorAll('section')].find(e => e.querySelector('h2').textContent == 'Memory')"
    )
    width = f"{card}.querySelectorAll('.row')[0].querySelectorAll('svg')"
    total = "reduce((sum, e) => sum + e.getBoundingClientRect().width, 0)"
    predicted = chromium.value(f"[...{width}[0].querySelectorAll('rect')].{total}")
    weights = chromium.value(f"{width}[0].querySelector('.f-weights').getBoundingClientRect().width")
    measured = chromium.value(f"[...{width}[1].querySelectorAll('rect')].{total}")
    assert weights / predicted == pytest.approx(6 / 13, rel=1e-3)
    assert measured / predicted == pytest.approx(11 / 13, rel=1e-3)


def test_the_page_says_what_was_decided_and_what_failed(pages: dict[str, Path]) -> None:
    text = pages["bench"].read_text()
    assert "<b>zero2</b> was predicted to be the fastest that fits" in text
    assert "zero2: the fastest<" in text
    assert "<b>zero0</b>: out of memory, after 0 of 13 steps: 40 GiB" in text
    assert "shardwise train" in text
    assert "no step is done yet" in pages["runs"].read_text() or "running" in pages["runs"].read_text()


def test_runs_of_different_models_name_each_one_s(tmp_path: Path) -> None:
    paths = []
    for name, model in (("a", "org/one"), ("b", "org/two")):
        paths.append(typical(tmp_path / name))
        job = {"name": name, "model": {"source": model}, "data": {"train": f"{name}.jsonl"}}
        (paths[-1] / "job.yaml").write_text(json.dumps(job))
    text = run_page(paths)
    assert "2 runs of different models or data" in text
    assert "org/one on a.jsonl" in text
    assert "org/two on b.jsonl" in text
    assert "Held-out loss" in text
    assert "Gradient norm" in text
    assert "Learning rate" in text


@pytest.mark.parametrize("kept", [0, 1])
def test_a_bench_without_results_has_a_page(kept: int, bench_folder: Path, tmp_path: Path) -> None:
    """Just begun, or with nothing but a failure."""
    rows = bench_folder / "rows.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[-1:][:kept]))
    assert main(["report", str(bench_folder), "--html", str(tmp_path / "p.html")]) == 0
    text = (tmp_path / "p.html").read_text()
    assert ("out of memory, after 0 of 13 steps" in text) == bool(kept)
    assert main(["report", str(bench_folder)]) == 0


def test_a_page_says_where_it_is_and_json_stays_alone(
    bench_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(bench_folder), "--html", str(tmp_path / "p.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'p.html'}\n"
    assert main(["report", str(bench_folder), "--html", str(tmp_path / "p.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1


def test_exposed_communication_is_a_share_of_the_step_and_off_by_points(pages: dict[str, Path]) -> None:
    """Predicted 20 % and measured 25 %: 5 points, and not 20 % of 25 %."""
    text = pages["bench"].read_text()
    assert '<th scope="col">Exposed comm., of the step</th>' in text
    assert "20\u202f% · -5.0\u202fpoints" in text
    assert "-20.0\u202f%" not in text
