"""Servers of this machine: which requests they answer, and how they run. Needs starlette and uvicorn.

Web pages of other origins are refused by the headers that browsers send: `Origin`, and `Host` where only this
machine reaches the address (a foreign name that resolves to 127.0.0.1 is DNS rebinding).
"""

import base64
import contextlib
import secrets
import socket
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import pydantic
import uvicorn
from anyio import CancelScope, move_on_after
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

MOST_DISCARDED, DISCARD_SECONDS = 64 << 20, 2.0
"""Read of a body that is too large: a client that is still sending would see no answer."""


class RefusedError(HTTPException):
    """A request that is not answered; `code` is OpenAI's word for the reason, where it has one."""

    def __init__(self, status: int, what: str, code: str | None = None) -> None:
        super().__init__(status, what)
        self.code = code


def check(headers: Headers, token: str | None, fix: str) -> None:
    """Refuse a request by its headers; without a token, only this machine reaches the address.

    The token is a program's bearer token, or the password that a browser asks for. `fix` is shown without.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    kind, _, given = headers.get("authorization", "").partition(" ")
    with contextlib.suppress(ValueError):
        if kind.lower() == "basic":
            given = base64.b64decode(given).decode().partition(":")[2]
        if token is None and urlsplit(f"//{host}").hostname not in ("localhost", "127.0.0.1", "::1"):
            raise RefusedError(403, f"the host {host!r} is not this machine")
        if origin is not None and urlsplit(origin).netloc != host:
            raise RefusedError(403, "pages of other origins may not use this server")
        if token is not None and not secrets.compare_digest(given.encode(), token.encode()):
            raise RefusedError(401, fix)
        return
    raise RefusedError(400, "the headers Host and Origin cannot be read")


async def read(request: Request, form: type[pydantic.BaseModel], most_bytes: int) -> Any:
    """The JSON body of a request, as `form` describes it; refused where it is larger or something else."""
    body, size, announced = bytearray(), 0, request.headers.get("content-length", "0")
    large = not announced.isdecimal() or int(announced[:20]) > most_bytes
    with move_on_after(DISCARD_SECONDS if large else None):
        async for part in request.stream():
            size += len(part)
            large = large or size > most_bytes
            body += b"" if large else part
            if size > MOST_DISCARDED:
                break
    if large:
        raise RefusedError(413, f"a request has at most {most_bytes} bytes")
    try:
        return form.model_validate_json(bytes(body))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))[:100]
        what = first["msg"].removeprefix("Value error, ")
        raise RefusedError(400, f"{where}: {what}" if where else what) from None


class Stream(StreamingResponse):
    """What `parts` yields, as it comes; `parts` ends with the response, also where the client has gone."""

    def __init__(self, parts: AsyncGenerator[str, None], media_type: str = "text/event-stream") -> None:
        self._parts = parts
        super().__init__(parts, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with CancelScope(shield=True):
                await self._parts.aclose()


def place(listener: socket.socket) -> str:
    """`127.0.0.1:8000`, `[::1]:8000`."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run(app: ASGIApp, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    ends = {"timeout_graceful_shutdown": 1, "server_header": False}
    config = uvicorn.Config(app, lifespan="off", log_config=None, log_level="critical", **ends)  # type: ignore[arg-type]
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
