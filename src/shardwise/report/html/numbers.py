"""Numbers as the page writes them; the filters of its templates."""

from shardwise.units import GIB

NONE = "–"
THIN = "\u202f"  # a narrow space that keeps a number and its unit on one line


def gib(value: float | None) -> str:
    """`12.3 GiB` of bytes, two decimals below ten."""
    return NONE if value is None else f"{value / GIB:.{1 if value >= 10 * GIB else 2}f}{THIN}GiB"


def of_gib(size: float) -> str:
    """`2.5 GiB` of a number in GiB, for an axis."""
    return f"{size:.3g}{THIN}GiB"


def plain(value: float | None) -> str:
    """At least three significant digits, and every digit before the point: `12,345`, `0.0123`."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """`12 %`, with a decimal below ten; below 0.05 % one significant digit, down to 0.001 %."""
    if value is None:
        return NONE
    if 0 < abs(value) < 1e-5:
        return f"<{THIN}0.001{THIN}%"
    if 0 < abs(value) < 0.0005:
        return f"{100 * value:.1g}{THIN}%"
    return f"{100 * value:.0f}{THIN}%" if abs(value) >= 0.0995 else f"{100 * value:.1f}{THIN}%"


def off(predicted: float | None, measured: float | None) -> str | None:
    """Relative error of a prediction: `+3.1 %`; None where a number is missing."""
    if predicted is None or not measured:
        return None
    return f"{round(100 * (predicted / measured - 1), 1) + 0.0:+.1f}{THIN}%"  # no -0.0


def points_off(predicted: float | None, measured: float | None) -> str | None:
    """Error of a predicted share in percentage points: `-5.0 points`."""
    if predicted is None or measured is None:
        return None
    return f"{round(100 * (predicted - measured), 1) + 0.0:+.1f}{THIN}points"


def loss(value: float | None) -> str:
    """Four significant digits: losses are compared."""
    return NONE if value is None else f"{value:.4g}"


def seconds(value: float) -> str:
    """`0.43 s`, `12 ms`."""
    return f"{value:.3g}{THIN}s" if value >= 0.1 or value == 0 else f"{1000 * value:.3g}{THIN}ms"


def attribute(value: float) -> str:
    """A number in an attribute: at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
