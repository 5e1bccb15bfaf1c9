"""The page around the parts: its head, its style, and the policy that lets it load nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

from shardwise.report.html.markup import Child, Html, h


@cache
def style() -> str:
    """The page's style sheet."""
    return (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def policy() -> str:
    """Content-Security-Policy: nothing but the one style sheet, which is named by its hash."""
    digest = base64.b64encode(hashlib.sha256(style().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def page(title: str, *, eyebrow: str, lead: str, made: str, body: Child) -> str:
    """A whole HTML document. `made`: when and of what, for the foot of the page."""
    head = h(
        "head",
        None,
        h("meta", {"charset": "utf-8"}),
        h("meta", {"http-equiv": "Content-Security-Policy", "content": policy()}),
        h("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        h("meta", {"name": "color-scheme", "content": "light dark"}),
        h("meta", {"name": "referrer", "content": "no-referrer"}),
        h("link", {"rel": "icon", "href": "data:,"}),
        h("title", None, f"{title} · shardwise"),
        h("style", None, Html(style())),
    )
    header = h(
        "header",
        None,
        h("p", {"class": "eyebrow"}, eyebrow),
        h("h1", None, title),
        h("p", {"class": "lead"}, lead),
    )
    foot = h("footer", None, f"shardwise {version('shardwise')} · {made}")
    return "<!doctype html>\n" + h(
        "html", {"lang": "en"}, head, h("body", None, h("main", None, header, body, foot))
    )
