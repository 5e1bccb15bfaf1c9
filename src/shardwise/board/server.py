"""The board's server. It only reads, and only its folder; it starts nothing but a process for each plan."""

import asyncio
import json
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from anyio.to_thread import run_sync
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise import web
from shardwise.board import pages
from shardwise.board.folder import Folder, few_events, readable
from shardwise.errors import JobError, ShardwiseError, printable, render
from shardwise.job.paths import is_local
from shardwise.lint.check import Checked, counted
from shardwise.record.bench import read_bench
from shardwise.report.html.pages import bench_page, run_page
from shardwise.report.live.curves import CurvesOfRun

PLANNER = "shardwise.app.plan_process"  # a module; the layers above are named, not imported
STYLE: list[str | tuple[str, str]] = [("shardwise.report.html", "static")]
MOST_BYTES = 1 << 20  # of a request's body
EVERY_SECONDS = 1.0  # a stream looks for news, and finds out whether its page has gone

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
Check = Callable[[Mapping[str, str]], Checked]  # of texts by their file names


class CheckForm(BaseModel):
    """Files to check, as texts by their names."""

    files: Annotated[dict[str, str], Field(min_length=1, max_length=16)]


def _guarded(app: ASGIApp, token: str | None) -> ASGIApp:
    """Refuses requests before anything is done for them, and sends HEADERS with every answer."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        chosen = app
        try:
            web.check(Headers(scope=scope), token, "the password is the board's token")
        except HTTPException as error:
            asks = {"www-authenticate": "Basic realm=shardwise"} if error.status_code == 401 else None
            chosen = PlainTextResponse(printable(error.detail), error.status_code, asks)
        if scope["type"] == "http":  # there are no websockets here
            await chosen(scope, receive, with_headers)

    return answer


@lru_cache(maxsize=32)
def _opened(path: Path) -> tuple[CurvesOfRun, Lock]:
    """A run with its curves, which one thread reads at a time."""
    return CurvesOfRun(path), Lock()


class Board:
    """What the addresses answer."""

    def __init__(self, folder: Folder, check: Check) -> None:
        self._folder, self._check, self._turn = folder, check, asyncio.Lock()

    def app(self, token: str | None) -> ASGIApp:
        """The application, guarded."""
        shown: dict[str, Callable[[dict[str, Path]], str]] = {
            "/": lambda _: pages.render("start.html.j2", title="Runs", folder=self._folder),
            "/run": lambda paths: pages.run_page(*_first(paths)),
            "/bench": lambda paths: bench_page(read_bench(_first(paths)[1]), on_board=True),
            "/report": lambda paths: run_page(few_events(paths), on_board=True),
            "/compare": pages.compare_page,
            "/plan": lambda _: pages.plan_page(),
            "/check": lambda _: pages.render("check.html.j2", title="Check"),
        }
        routes: list[BaseRoute] = [Route(path, self._page(show)) for path, show in shown.items()]
        routes += [
            Route("/live", self._live),
            Route("/plan", self._plan, methods=["POST"]),
            Route("/check", self._findings, methods=["POST"]),
            Mount("/static", StaticFiles(directory=pages.FOLDER / "static", packages=STYLE)),
        ]
        failed = dict.fromkeys((HTTPException, ShardwiseError, Exception), _failed)
        return _guarded(Starlette(routes=routes, exception_handlers=failed), token)

    def _page(self, show: Callable[[dict[str, Path]], str]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return HTMLResponse(await run_sync(shown, request))

        def shown(request: Request) -> str:
            with readable(paths := self._paths(request)):
                return show(paths)

        return answer

    def _paths(self, request: Request) -> dict[str, Path]:
        """The runs and benches that a request names."""
        names = dict.fromkeys(request.query_params.getlist("of"))
        return {name: self._folder.find(name) for name in names}

    async def _live(self, request: Request) -> Response:
        """Events: curves between the steps `first` and `last`, then what is new; or the first page's rows."""
        paths = await run_sync(self._paths, request)
        asked = request.query_params
        try:
            ends = float(asked.get("first", "-inf")), float(asked.get("last", "inf"))
        except ValueError:
            raise web.RefusedError(400, "first and last are numbers") from None
        return web.Stream(_events(_news(list(paths.values()), *ends) if paths else _rows(self._folder)))

    async def _plan(self, request: Request) -> Response:
        form = await web.read(request, pages.PlanForm, MOST_BYTES)
        if is_local(form.model):
            what = f"{form.model!r} is a path: the board plans for known models and those of the hub"
            raise JobError(what, fix=form.command())
        return web.Stream(_planned(form, self._turn), "application/x-ndjson")

    async def _findings(self, request: Request) -> Response:
        form = await web.read(request, CheckForm, MOST_BYTES)
        found = (await run_sync(self._check, form.files)).findings
        return HTMLResponse(pages.part("findings.html.j2", findings=found, counted=counted(found)))


def serve(folder: Folder, listener: socket.socket, *, check: Check, token: str | None) -> None:
    """Answer until SIGINT or SIGTERM."""
    web.run(Board(folder, check).app(token), listener)


def _first(paths: Mapping[str, Path]) -> tuple[str, Path]:
    for name, path in paths.items():
        return name, path
    raise JobError("no run is named", fix="choose one on the first page")


async def _planned(form: pages.PlanForm, turn: asyncio.Lock) -> AsyncGenerator[str, None]:
    """What the planner writes, and an empty object each second; its process ends with the request."""
    async with turn:
        start = partial(asyncio.create_subprocess_exec, stdin=PIPE, stdout=PIPE, limit=16 * MOST_BYTES)
        # Ctrl-C is for the board, which kills the planner: semaphores that its pool leaves are then no news
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
        started = start(sys.executable, "-m", PLANNER, str(os.getpid()), env=quiet, start_new_session=True)
        process = await started
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(form.model_dump_json().encode() + b"\n")
            line, sent = b"{}\n", asyncio.ensure_future(process.stdout.readline())
            while line:
                yield line.decode()
                done, _ = await asyncio.wait([sent], timeout=EVERY_SECONDS)
                line = sent.result() if done else b"{}\n"
                sent = asyncio.ensure_future(process.stdout.readline()) if done else sent
            if code := await process.wait():
                yield json.dumps({"error": f"the planner ended with {code}: see the terminal"}) + "\n"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _events(looks: Iterator[dict[str, Any]]) -> AsyncGenerator[str, None]:
    while True:
        found = await run_sync(next, looks)
        yield f"data: {json.dumps(found)}\n\n" if found else ": nothing new\n\n"
        await asyncio.sleep(EVERY_SECONDS)


def _rows(folder: Folder) -> Iterator[dict[str, Any]]:
    """The rows of the first page, where they have changed."""
    before = ""
    while True:
        rows = pages.part("rows.html.j2", folder=folder)
        yield {"rows": rows} if rows != before else {}
        before = rows


def _news(paths: list[Path], first: float, last: float) -> Iterator[dict[str, Any]]:
    """Numbers and new points of the runs that have any; `all` where the points replace those before."""
    before: dict[int, Any] = {}
    while True:
        news: dict[str, Any] = {}
        for place, path in enumerate(paths):
            run, lock = _opened(path)
            with lock:
                values = run.look(time.time())
                facts, at = pages.part("facts.html.j2", run=values), (run.launches, run.size())
                if before.get(place) == (facts, at):
                    continue
                again = place not in before or before[place][1][0] != run.launches
                new = run.curves(first, last) if again else run.curves(after=before[place][1][1])
            said = {key: values[key] for key in ("predicted", "processes")}
            news[str(place)] = {"all": again, "curves": new, "facts": facts, **said}
            before[place] = facts, at
        yield news


async def _failed(request: Request, error: Exception) -> Response:
    """What is wrong, as text; as a page where one was asked for."""
    status = getattr(error, "status_code", 400 if isinstance(error, ShardwiseError) else 500)
    other = getattr(error, "detail", f"a bug in shardwise: {error!r}")
    what = render(error) if isinstance(error, ShardwiseError) else other
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(pages.render("page.html.j2", title="Not possible", lead=what), status)
    return PlainTextResponse(printable(what), status)
