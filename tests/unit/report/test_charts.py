"""Charts draw what they are given, to scale, and their texts are escaped."""

from __future__ import annotations

import re

import pytest

from shardwise.report.html import numbers
from shardwise.report.html.charts import Bar, Chart, Curve, Part, bars, layered, plot, ticks
from shardwise.report.html.pages import templates


def draw(macro: str, chart: Chart) -> str:
    return str(getattr(templates().get_template("parts.html.j2").module, macro)(chart))


def test_text_is_escaped() -> None:
    drawn = draw("bars", bars([('a"b', "<i>", [Bar([Part("&", 1, "s0")], "4")])], text=str))
    assert 'aria-label="a&#34;b: 4"' in drawn
    assert "<small>&lt;i&gt;</small>" in drawn
    assert "<title>&amp;: 1</title>" in drawn


def test_an_attribute_has_at_most_two_decimals() -> None:
    assert [numbers.attribute(value) for value in (1 / 3, 2.0, 210)] == ["0.33", "2", "210"]


@pytest.mark.parametrize(
    ("high", "low", "expected"),
    [
        (55.9, 0.0, [0, 20, 40, 60]),
        (1.0, 0.0, [0, 0.25, 0.5, 0.75, 1.0]),
        (6.13, 5.57, [5.4, 5.6, 5.8, 6.0, 6.2]),
        (0.0, 0.0, [-0.5, -0.25, 0, 0.25, 0.5]),
    ],
)
def test_ticks_are_round_and_span_the_values(high: float, low: float, expected: list[float]) -> None:
    assert ticks(high, low) == pytest.approx(expected)


def test_bars_share_one_scale() -> None:
    one, three, two = (Part(f"part {n}", n, "s0") for n in (1, 3, 2))
    rows = [("a", "", [Bar([one, three], "4")]), ("b", "", [Bar([two], "2")])]
    drawn = draw("bars", bars(rows, limit=8.0, text=str))
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+%" width="([\d.]+)%"', drawn)]
    assert widths == pytest.approx([100 / 8.08, 300 / 8.08, 200 / 8.08], abs=1e-3)
    assert drawn.count('class="limit"') == 2
    assert "<title>part 3: 3</title>" in drawn


def test_a_curve_is_interrupted_where_there_is_no_value() -> None:
    curve = Curve("c", [(0, 0.0), (1, 1.0), (2, None), (3, 0.5)], "l-s0")
    drawn = draw("plot", plot([curve], label="l", text=str, x_labels=["0", "3"]))
    path = re.search(r'd="([^"]*)"', drawn)
    assert path is not None
    assert path[1].count("M") == 2
    assert path[1].startswith("M0.0 210.0")
    assert "M1000.0 105.0" in path[1]


def test_nothing_measured_is_said() -> None:
    assert "nothing was measured" in draw("plot", plot([], label="l", text=str, x_labels=[]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.gib(11.04 * 2**30), "11.0 GiB"),
        (numbers.gib(10 * 2**30), "10.0 GiB"),
        (numbers.gib(9.9 * 2**30), "9.90 GiB"),
        (numbers.gib(None), "–"),
        (numbers.of_gib(2.5), "2.5 GiB"),
        (numbers.plain(10755.3), "10,755"),
        (numbers.plain(123.4), "123"),
        (numbers.plain(999.6), "1,000"),
        (numbers.plain(0.012345), "0.0123"),
        (numbers.share(0.0832), "8.3 %"),
        (numbers.share(0.0996), "10 %"),
        (numbers.share(0.000003), "< 0.001 %"),
        (numbers.share(None), "–"),
        (numbers.off(11.0, 10.0), "+10.0 %"),
        (numbers.off(9.99999, 10.0), "+0.0 %"),
        (numbers.off(None, 10.0), None),
        (numbers.points_off(0.2, 0.25), "-5.0 points"),
        (numbers.points_off(0.2, 0.200001), "+0.0 points"),
        (numbers.seconds(0.43), "0.43 s"),
        (numbers.seconds(0.012), "12 ms"),
    ],
)
def test_numbers_as_a_person_reads_them(text: str | None, expected: str | None) -> None:
    assert text == (expected and expected.replace(" ", numbers.THIN))


def test_curves_that_cover_each_other_get_thinner() -> None:
    assert [layered(place, 3) for place in range(3)] == [5.25, 3.5, 1.75]
    assert layered(0, 1) == 1.75


def test_the_warm_up_is_shaded_up_to_its_share_of_the_axis() -> None:
    curve = Curve("c", [(0.5, 1.0), (4.5, 2.0)], "l-s0")
    chart = plot([curve], label="l", text=str, x_labels=[], shade_to=1.5)
    assert chart["shade"] == "25.000%"
    assert plot([curve], label="l", text=str, x_labels=[], shade_to=0.5)["shade"] is None
