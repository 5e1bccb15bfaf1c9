"""The board as a user starts it: what it refuses, what it never reads, what its streams bring."""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest

from board_server import Folders, Server, begin, head, step, write
from shardwise.board.folder import Folder
from shardwise.cli import main
from shardwise.record.read import EVENTS
from shardwise.record.schema import StopEvent
from shardwise.record.write import RunFolder
from shardwise.report.compare import summary

PAGES = ("/", "/run?of=runs/done", "/bench?of=bench-4xh200", "/report?of=runs/done", "/plan", "/check")
PAGES += ("/compare?of=runs/done&of=bench-4xh200", "/run?of=runs/hostile", "/report?of=runs/hostile")


class Elements(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_no_script_or_style_in_it_and_a_policy_that_allows_none(path: str, board: Folders) -> None:
    status, text, headers = board.server.ask(path)
    assert status == 200
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'"
    )
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
    for tag, attributes in Elements(text).found:
        assert not any(key.startswith("on") or key == "style" for key in attributes), (tag, attributes)
        assert tag != "style"
        assert tag != "script" or str(attributes["src"]).startswith("/static/")
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "[::1"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost"}, 200),
    ],
)
def test_foreign_hosts_and_origins_are_refused(headers: dict[str, str], status: int, board: Folders) -> None:
    for path in ("/", "/live", "/static/board.js"):
        if (status, path) != (200, "/live"):  # which does not end
            assert board.server.ask(path, **headers)[0] == status


def test_what_is_outside_of_the_folder_is_neither_shown_nor_read(board: Folders) -> None:
    text = board.server.ask("/")[1]
    assert "runs/done" in text
    assert "linked" not in text
    assert "runs/part" not in text
    for name in (
        "linked",
        "runs/part",
        "../outside/secret",
        "runs/../../outside/secret",
        "/etc",
        "runs/done/",
    ):
        for page in ("run", "report", "compare", "bench", "live"):
            status, text, _ = board.server.ask(f"/{page}?of={name}")
            assert status == 400, (page, name)
            assert "1.234" not in text
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd"):
        assert board.server.ask(path)[0] == 404


def test_the_first_page_says_how_far_each_run_is(board: Folders) -> None:
    text = board.server.ask("/")[1]
    row = text.partition('data-key="runs/done"')[2].partition("</tr>")[0]
    assert "org/tiny on texts.jsonl" in row
    assert '<span class="tag finished">finished</span>' in row
    assert ">20<small>of 20</small>" in row
    assert '<td data-name="Loss">4.8</td>' in row
    assert '<td data-name="Tokens/s, all">1,000</td>' in row
    assert "interrupted" in text.partition('data-key="runs/long"')[2].partition("</tr>")[0]
    assert "<h1>&lt;/title&gt;&lt;script&gt;" in board.server.ask("/run?of=runs/hostile")[1]


def test_the_speed_on_the_first_page_is_that_of_the_report(tmp_path: Path) -> None:
    """Not of the last step, nor of the first ones of a launch, nor of what another strategy took."""
    path = begin(tmp_path / "run")
    slow = {"seconds": 9.0, "tokens_per_second": 111.0}
    write(path, head(30), *(step(number, **slow) for number in range(1, 11)))
    steps = [step(number, **(slow if number in (*range(11, 16), 20) else {})) for number in range(11, 21)]
    write(path, head(30), *steps, StopEvent(step=20, status="paused", seconds=1.0))
    (shown,) = Folder(tmp_path).entries()
    assert shown["rate"] == summary(path)["tokens_per_second"] == pytest.approx(5000 / 13)
    write(path, *(step(number) for number in range(21, 1000)))
    assert Folder(tmp_path).entries()[0]["rate"] == 1000, "of what it reads of a long run"
    other = begin(tmp_path / "other")
    write(other, head(30), step(1))
    events = other / EVENTS
    events.write_text(events.read_text().replace('"seconds": 1.0', '"seconds": 0.0'))
    shown = {entry["name"]: (entry["step"], entry["rate"]) for entry in Folder(tmp_path).entries()}
    assert shown["other"] == (1, None)


def test_a_stream_brings_all_curves_and_then_what_is_written(board: Folders) -> None:
    path = begin(board.root / "runs" / "now")
    writer = RunFolder.reopen(path)
    write(path, head(), *map(step, (1, 2, 3, 4)))
    try:
        with board.server.events("/live?of=runs/now") as events:
            first = next(events)["0"]
            assert first["all"]
            assert first["curves"]["loss"] == {"x": [1, 2, 3, 4], "y": [4.99, 4.98, 4.97, 4.96]}
            assert first["curves"]["memory_gib"]["y"] == [8, 8, 8, 8]
            assert first["curves"]["watts"] == {"x": [2, 4], "y": [300, 300]}  # of two seconds each
            assert '<span class="tag running">running</span>' in first["facts"]
            written = time.monotonic()
            write(path, step(5, loss=None), step(6))
            then = next(events)["0"]
            assert time.monotonic() - written < 5
            assert not then["all"]
            assert then["curves"]["loss"] == {"x": [5, 6], "y": [None, 4.94]}
            assert then["curves"]["watts"] == {"x": [6], "y": [300]}
            write(path, StopEvent(step=6, status="stopped", seconds=6.0))
            assert '<span class="tag stopped">stopped</span>' in next(events)["0"]["facts"]
            (path / "again").write_text("")
            write(path.parent / "now", head())
            (path / "events.jsonl").rename(path / "before")
            write(path, head(), step(1))
            last = {}
            while not last.get("all"):
                last = next(events)["0"]
            assert last["curves"]["loss"]["x"] == [1], "a resumed run replaces its file"
    finally:
        writer.close()


def test_a_stream_of_the_first_page_shows_a_new_run(board: Folders) -> None:
    with board.server.events("/live") as events:
        assert "runs/fresh" not in next(events)["rows"]
        write(begin(board.root / "runs" / "fresh"), head(), step(1))
        assert "runs/fresh" in next(events)["rows"]


def test_a_hundred_thousand_steps_come_with_few_points_and_their_spike(board: Folders) -> None:
    with board.server.events("/live?of=runs/long") as events:
        curves = next(events)["0"]["curves"]
    assert len(curves["grad_norm"]["x"]) < 1300
    assert dict(zip(*curves["grad_norm"].values(), strict=True))[43_210] == 77
    assert curves["loss"]["x"][0] == 1
    assert curves["loss"]["x"][-1] == 100_000
    with board.server.events("/live?of=runs/long&first=43200&last=43220") as events:
        zoomed = next(events)["0"]["curves"]["grad_norm"]
    assert zoomed["x"] == list(range(43_199, 43_222))
    assert board.server.ask("/live?of=runs/long&first=x")[0] == 400


def test_predicted_and_measured_are_compared(board: Folders) -> None:
    with board.server.events("/live?of=runs/done") as events:
        found = next(events)["0"]
    assert found["predicted"]["tokens_per_second_per_gpu"] == 520
    assert "predicted 520, +4.0\u202f%" in found["facts"]
    assert "predicted 8.00\u202fGiB, +0.0\u202f%" in found["facts"]
    assert "held out 4 at step 20" in found["facts"]


def test_runs_and_benches_are_compared(board: Folders) -> None:
    text = board.server.ask("/compare?of=runs/done&of=bench-4xh200")[1]
    assert "bench-4xh200/fsdp2-noreshard<small>" in text
    assert '<th scope="row">runs/done' in text
    assert "data-of" in text


def sign_in(kind: str, text: str) -> dict[str, str]:
    sent = base64.b64encode(f"me:{text}".encode()).decode() if kind == "Basic" else text
    return {"Authorization": f"{kind} {sent}"}


def test_a_token_is_asked_for_as_a_password(tmp_path: Path) -> None:
    server = Server(tmp_path, SHARDWISE_TOKEN="s3cret")
    try:
        status, _, headers = server.ask("/")
        assert (status, headers["www-authenticate"]) == (401, "Basic realm=shardwise")
        for kind in ("Basic", "Bearer"):
            assert server.ask("/", **sign_in(kind, "s3cret"))[0] == 200
            assert server.ask("/", **sign_in(kind, "wrong"))[0] == 401
            assert server.ask("/static/board.js", **sign_in(kind, ""))[0] == 401
        assert server.ask("/", Authorization="Basic \xff")[0] in (400, 401)
        assert server.ask("/", **sign_in("Basic", "s3cret"), Origin="http://evil.example")[0] == 403
    finally:
        server.close()


def test_findings_of_texts(board: Folders, tmp_path: Path) -> None:
    files = {"ds_config.json": '{"zero_optimization": {"stage": 7}, "train_batch_sized": 3}'}
    status, text, _ = board.server.ask("/check", {"files": files})
    assert status == 200
    assert "<h2>2 errors" in text
    assert "ds_config.json:1: train_batch_sized" in text
    (tmp_path / "other.json").write_text('{"zero_optimization": {"stage": 7}}')
    text = f"deepspeed_config: {{deepspeed_config_file: {tmp_path}/other.json}}\ndistributed_type: DEEPSPEED"
    named = {"a.yaml": text}
    assert "stage" not in board.server.ask("/check", {"files": named})[1], "a file on disk was read"
    status, text, _ = board.server.ask(
        "/check", {"files": {"job.yaml": "model: {source: a}\ndata: {train: b}"}}
    )
    assert (status, "job.yaml is a job file" in text) == (400, True)
    assert board.server.ask("/check", {"files": {}})[0] == 400
    assert board.server.ask("/check", {"files": {"a": "x" * (1 << 20)}})[0] == 413


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"model": "/etc"}, 400, "is a path"),
        ({"model": "./x"}, 400, "is a path"),
        ({"rank": 0}, 400, "rank"),
        ({"output": "x"}, 400, "output"),
        ({"gpus": "4xNothing"}, 200, "error"),
    ],
)
def test_a_plan_is_refused(change: dict[str, Any], status: int, said: str, board: Folders) -> None:
    """The last one by the planner itself, in its process."""
    found = board.server.ask("/plan", {"model": "smollm2-135m", "gpus": "1x24GB", **change})
    assert found[0] == status
    assert said in found[1]


def test_a_plan_ends_with_its_page(board: Folders) -> None:
    """The client goes away while the model is being built."""
    connection = http.client.HTTPConnection(board.server.host, board.server.port, timeout=60)
    connection.request("POST", "/plan", json.dumps({"model": "opt-125m", "gpus": "1x24GB", "sequence": 99}))
    assert connection.getresponse().readline() == b"{}\n"
    planner = psutil.Process(board.server.process.pid)
    assert len(planner.children()) == 1
    connection.close()
    until = time.monotonic() + 20
    while planner.children():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_what_the_command_refuses(board: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["board", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "everybody who reaches 0.0.0.0 could read your runs" in capsys.readouterr().err
    assert main(["board", str(tmp_path / "none"), "--port", "0"]) == 2
    assert main(["board", str(board.root / "runs" / "done"), "--port", "0"]) == 2
    assert "is one run" in capsys.readouterr().err
    assert main(["board", str(tmp_path), "--port", str(board.server.port)]) == 4


GOOD_STEP = '{"kind": "step", "time": 1.0, "step": 3, "loss": 2.0, "tokens": 5, "seconds": 1.0}\n'
RUN = '{"kind": "run", "time": 1.0, "processes": 2, "total_steps": 9}\n'
DAMAGES = {
    "loss": ("events.jsonl", RUN + GOOD_STEP.replace("2.0", '"<b>12"')),
    "step": ("events.jsonl", RUN + GOOD_STEP.replace(": 3", ': "three"')),
    "deep plan": ("plan.json", "[" * 300_000),
    "deep job": ("job.yaml", "[" * 300_000),
    "model": ("job.yaml", "{name: a, model: 5, data: 6}"),
    "pace": ("events.jsonl", RUN + GOOD_STEP.replace("}", ', "learning_rate": "x"}') + GOOD_STEP),
    "gpus": ("environment.json", '{"gpus": "<script>"}'),
    "head": ("events.jsonl", RUN.replace('"processes": 2, ', "") + GOOD_STEP),
    "kind": ("events.jsonl", RUN + GOOD_STEP.replace('"kind": "step", ', "")),
    "line": ("events.jsonl", RUN + "x" * (5 << 20) + "\n" + GOOD_STEP),
    "many": ("events.jsonl", RUN + GOOD_STEP.replace("}", " " * 4_000_000 + "}") * 34),
}
LISTED = {"loss", "step", "deep plan", "deep job", "model", "kind"}  # as damaged on the first page
PIPES = ("events.jsonl", "environment.json", "supervise.jsonl", ".lock", "energy/meter.json")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Beside a good run `good`: one for each of DAMAGES, one for each of PIPES, and a link to itself."""
    root = tmp_path_factory.mktemp("damaged")
    for name, (file, text) in DAMAGES.items():
        run = begin(root / name)
        write(run, head(), step(1))
        (run / file).write_text(text)
    for number, file in enumerate(PIPES):
        run = begin(root / f"pipe{number}")
        write(run, head(), step(1))
        (run / file).unlink(missing_ok=True)
        (run / file).parent.mkdir(exist_ok=True)
        os.mkfifo(run / file)
    (begin(root / "loop") / "events.jsonl").unlink()
    (root / "loop" / "events.jsonl").symlink_to("events.jsonl")
    write(begin(root / "good"), head(), step(1))
    server = Server(root)
    yield server
    server.close()


def test_a_damaged_run_is_shown_as_such_and_the_others_as_always(damaged: Server) -> None:
    status, text, _ = damaged.ask("/")
    assert status == 200
    rows = {
        name: text.partition(f'data-key="{name}"')[2].partition("</tr>")[0] for name in [*DAMAGES, "good"]
    }
    assert {name for name, row in rows.items() if '"tag damaged"' in row} == LISTED
    assert "plan.json cannot be read (RecursionError)" in rows["deep plan"]
    assert "loss cannot be read: ValueError" in rows["loss"]
    assert "4.99" in rows["good"]
    assert '"tag damaged"' in text.partition('data-key="pipe0"')[2].partition("</tr>")[0]
    assert "it is no regular file" in text.partition('data-key="pipe0"')[2].partition("</tr>")[0]
    assert 'data-key="loop"' not in text


@pytest.mark.parametrize("page", ["report", "compare"])
@pytest.mark.parametrize("name", [*DAMAGES, *(f"pipe{number}" for number in range(len(PIPES)))])
def test_a_report_of_a_damaged_run_says_what_is_damaged(name: str, page: str, damaged: Server) -> None:
    status, text, _ = damaged.ask(f"/{page}?of={name.replace(' ', '%20')}", accept="text/html")
    assert "Traceback" not in text
    if status == 200:  # the broken file is not needed
        assert name in {"gpus", "pace", "pipe1", "pipe2", "pipe3", "step"}
        return
    assert status == 400
    expected = {"line": "events.jsonl:2", "many": "shardwise report", "pipe4": "energy meter"}
    assert expected.get(name, "cannot be") in text


@pytest.mark.parametrize("name", ["pace", "line", "loss", "pipe0"])
def test_a_stream_of_a_damaged_run_says_so_and_goes_on(name: str, damaged: Server) -> None:
    with damaged.events(f"/live?of={name}") as events:
        found = next(events)["0"]
    assert '<span class="tag failed">' in found["facts"]
    if name in ("pace", "line"):
        assert found["curves"]["loss"] == {"x": [3], "y": [2]}


def test_a_body_that_is_too_large_is_answered_after_it_was_sent(damaged: Server) -> None:
    for size in (5 << 20, 20 << 20):
        assert damaged.ask("/check", {"files": {"a": "x" * size}})[0] == 413
