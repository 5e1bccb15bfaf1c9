"""A real browser for tests: headless Chromium, spoken to over a pipe in the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

MOVE = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from descriptor 3 and answers on 4. (`preexec_fn` is not for threaded tests.)"""


def found() -> str | None:
    """The browser's program; None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a browser without a window. Events are kept as they come."""

    def __init__(self, profile: Path) -> None:
        """`profile`: a new folder for what the browser writes."""
        self.events: list[dict[str, Any]] = []
        program = found()
        assert program is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", MOVE, str(theirs_in), str(theirs_out)),
                *(program, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._buffer, self._number, self._session = b"", 0, None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command's answer."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def show(self, page: Path | str, *, width: int, dark: bool = False) -> None:
        """Load a file or an address in a window of this width."""
        self.events.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        until = time.monotonic() + 30
        while time.monotonic() < until and not self.seen("Page.loadEventFired"):
            self._next()

    def value(self, expression: str) -> Any:
        """What a JavaScript expression, or its promise, gives on the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> Any:
        """The first true value of an expression."""
        until = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < until, expression
            time.sleep(0.05)
        return found

    def press(self, key: str) -> None:
        """One key, as `Tab`, `Enter`, `ArrowRight` or a character."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        same = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **same)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **same)

    def seen(self, method: str) -> list[dict[str, Any]]:
        """The parameters of the events of a kind since the page was asked for."""
        return [event["params"] for event in self.events if event["method"] == method]

    def picture(self) -> bytes:
        """The entire page as a PNG."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _next(self) -> dict[str, Any]:
        """The next message; events are kept on the way."""
        while b"\0" not in self._buffer:
            chunk = os.read(self._in.fileno(), 1 << 16)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message
