"""HTML from values: whatever is not made here is text, and is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

Attributes = Mapping[str, str | int | float | None]
VOID = frozenset({"meta", "link", "br", "hr"})


class Html(str):
    """Text that is markup already; only this module makes it from values."""

    __slots__ = ()


Child = str | Html | None | Iterable["Child"]


def h(tag: str, attributes: Attributes | None = None, /, *children: Child) -> Html:
    """An element. Children that are no `Html` are text; attributes that are None are left out."""
    given = "".join(
        f' {name}="{escape(_plain(value))}"'
        for name, value in (attributes or {}).items()
        if value is not None
    )
    if tag in VOID:
        return Html(f"<{tag}{given}>")
    return Html(f"<{tag}{given}>{joined(*children)}</{tag}>")


def joined(*children: Child) -> Html:
    """Children after each other, without an element around them."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(escape(child))
        elif child is not None:
            parts.append(joined(*child))
    return Html("".join(parts))


def _plain(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
