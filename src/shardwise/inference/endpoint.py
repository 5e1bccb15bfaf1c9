"""OpenAI's API for one model, on one address: `/v1/models`, `/v1/chat/completions`, `/v1/completions`.

Answers are computed one after another. Everything that is refused (shardwise/web.py) is an `error` in
OpenAI's form.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shardwise import web
from shardwise.errors import DoesNotFitError, JobError, ShardwiseError, printable, render, what_of
from shardwise.inference.model import Answer, LoadedModel, TooLongError
from shardwise.inference.requests import ChatRequest, TextRequest

MOST_BYTES = 1 << 20  # Of a request's body
_NO_KEY = "send the server's token as the API key (Authorization: Bearer ...)"
MOST_WAITING = 32  # Requests that wait for the one that is answered

_Values = dict[str, Any]
_Pieces = AsyncGenerator[tuple[str, Answer], None]
_Show = Callable[[str], None]
_Handler = Callable[[Request], Awaitable[Response]]


def run(model: LoadedModel, listener: socket.socket, *, token: str | None, show: _Show) -> None:
    """Serve until SIGINT or SIGTERM; `token` is what clients send as their key, None: nothing."""
    service = _Service(model, token, show)
    show(f"{model.name} answers on http://{web.place(listener)}/v1 (Ctrl-C ends it)")
    web.run(service.app(), listener)


def _error(status: int, what: str, code: str | None = None) -> _Values:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = code or HTTPStatus(status).name.lower()
    return {"error": {"message": printable(what), "type": kind, "param": None, "code": code}}


class _Service:
    """Answers requests, one at a time."""

    def __init__(self, model: LoadedModel, token: str | None, show: _Show) -> None:
        self._model, self._token, self._show = model, token, show
        self._turn, self._waiting, self._started = asyncio.Lock(), 0, int(time.time())
        self._names = {model.name: False}
        if model.peft is not None:
            self._names[f"{model.name}:base"] = True

    def app(self) -> Starlette:
        def guarded(handler: _Handler) -> _Handler:
            async def checked(request: Request) -> Response:
                web.check(request.headers, self._token, _NO_KEY)
                return await handler(request)

            return checked

        routes = [
            Route("/v1/models", guarded(self._models)),
            Route("/v1/chat/completions", guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", guarded(self._text), methods=["POST"]),
        ]
        kinds = (HTTPException, JobError, DoesNotFitError, ClientDisconnect, Exception)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, self._failed))

    def _failed(self, _: Request, error: Exception) -> Response:
        headers = None
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, HTTPException):
            status, body = (
                error.status_code,
                _error(error.status_code, error.detail, getattr(error, "code", None)),
            )
            headers = {"www-authenticate": "Bearer"} if status == 401 else error.headers
        elif isinstance(error, JobError):
            long = isinstance(error, TooLongError)
            status, body = 400, _error(400, what_of(error), "context_length_exceeded" if long else None)
        elif isinstance(error, DoesNotFitError):
            status, body = 503, _error(503, what_of(error))
        else:
            self._show(render(error) if isinstance(error, ShardwiseError) else f"error: {error!r}")
            status, body = 500, _error(500, "the server failed; its terminal says why")
        return JSONResponse(body, status, headers=headers)

    async def _models(self, _: Request) -> Response:
        about = {"object": "model", "created": self._started, "owned_by": "shardwise"}
        return JSONResponse({"object": "list", "data": [{"id": name, **about} for name in self._names]})

    async def _chat(self, request: Request) -> Response:
        asked = await web.read(request, ChatRequest, MOST_BYTES)
        if not self._model.has_template:
            raise web.RefusedError(400, "this model has no chat template: use /v1/completions")
        messages = [message.plain() for message in asked.messages]
        return await self._answer(request, asked, messages, "chat.completion")

    async def _text(self, request: Request) -> Response:
        asked = await web.read(request, TextRequest, MOST_BYTES)
        return await self._answer(request, asked, asked.prompt, "text_completion")

    async def _answer(self, request: Request, asked: Any, prompt: Any, kind: str) -> Response:
        name = asked.model or self._model.name
        if name not in self._names:
            what = f"there is no model {name[:200]!r} here, only {' and '.join(self._names)}"
            raise web.RefusedError(404, what, "model_not_found")
        if self._waiting > MOST_WAITING:
            raise web.RefusedError(429, f"{MOST_WAITING} requests are waiting already")
        ids = await run_sync(self._model.prompt, prompt)
        pieces = self._pieces(ids, asked, base=self._names[name])
        frame = {"id": secrets.token_hex(12), "object": kind, "created": int(time.time()), "model": name}
        if asked.stream:
            return web.Stream(self._events(pieces, frame, asked, len(ids)))
        text = ""
        async with contextlib.aclosing(pieces):
            async for piece, answer in pieces:
                text, ended = text + piece, answer
                if await request.is_disconnected():
                    raise ClientDisconnect
        message = {"message": {"role": "assistant", "content": text}}
        choice = _choice(message if isinstance(asked, ChatRequest) else {"text": text}, ended.finish)
        return JSONResponse({**frame, "choices": [choice], "usage": _usage(len(ids), ended)})

    async def _pieces(self, ids: list[int], asked: Any, *, base: bool) -> _Pieces:
        """Pieces of the answer, the last one empty, once it is this request's turn."""
        self._waiting += 1
        try:
            async with self._turn:
                answer = self._model.stream(ids, asked.sampling(), base=base)
                try:
                    piece: str | None = ""
                    while piece is not None:
                        piece = await run_sync(next, answer, None, abandon_on_cancel=True)
                        yield piece or "", answer
                finally:
                    answer.close()  # takes one token's time at most
        finally:
            self._waiting -= 1

    async def _events(
        self, pieces: _Pieces, frame: _Values, asked: Any, prompt_tokens: int
    ) -> AsyncGenerator[str, None]:
        chat = isinstance(asked, ChatRequest)
        frame = {**frame, "object": "chat.completion.chunk"} if chat else frame
        role: _Values = {"role": "assistant"}
        try:
            async with contextlib.aclosing(pieces):
                async for piece, answer in pieces:
                    ended, part = answer, {"delta": {**role, "content": piece}} if chat else {"text": piece}
                    role = {}
                    yield _event({**frame, "choices": [_choice(part)]})
            last = _choice({"delta": {}} if chat else {"text": ""}, ended.finish)
            yield _event({**frame, "choices": [last]})
            if asked.stream_options is not None and asked.stream_options.include_usage:
                yield _event({**frame, "choices": [], "usage": _usage(prompt_tokens, ended)})
            yield "data: [DONE]\n\n"
        except DoesNotFitError as error:  # the status was sent before the model began
            yield _event(_error(503, what_of(error)))


def _choice(part: _Values, finish: str | None = None) -> _Values:
    return {"index": 0, **part, "finish_reason": finish, "logprobs": None}


def _event(values: _Values) -> str:
    return f"data: {json.dumps(values)}\n\n"


def _usage(prompt_tokens: int, answer: Answer) -> dict[str, int]:
    total = prompt_tokens + answer.tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": total}
