"""What the server of a model does with clients that go away, and with large bodies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.inference.endpoint import _Service


@pytest.mark.parametrize(
    ("announced", "sent", "status"),
    [(10, None, 499), (5 << 20, None, 499), (5 << 20, 5 << 20, 413), (0, 5 << 20, 413)],
)
def test_what_clients_do_is_no_error_of_the_server(announced: int, sent: int | None, status: int) -> None:
    """`sent` None: the client hangs up. A body that is too large is read before it is refused."""
    shown: list[str] = []
    answers: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = [{"type": "http.disconnect"}]
    if sent is not None:
        piece = b"a" * 65_536
        parts = [
            {"type": "http.request", "body": piece, "more_body": True} for _ in range(sent // len(piece))
        ]
        parts += [{"type": "http.request", "body": b"", "more_body": False}]
    waiting = iter(parts)

    async def receive() -> Any:
        return next(waiting)

    async def send(message: Any) -> None:
        answers.append(message)

    headers = [(b"host", b"localhost")]
    headers += [(b"content-length", str(announced).encode())] if announced else []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    scope |= {"query_string": b"", "server": ("localhost", 80)}
    model: Any = SimpleNamespace(name="a", peft=None)
    asyncio.run(_Service(model, None, shown.append).app()(scope, receive, send))  # type: ignore[arg-type]
    assert answers[0]["status"] == status
    assert shown == []
    assert next(waiting, None) is None
