"""A model that a test has trained answers: in a real terminal, line by line, and to the `openai` client."""

from __future__ import annotations

import fcntl
import http.client
import http.server
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from forked_command import Command, forked_shardwise
from test_what_a_run_is_bound_to import SYSTEM, write_base, write_job

QUESTION = "What is a token?"
ASK = ("--prompt", QUESTION, "--max-new-tokens", "12")
ESC = "\u011b"
"""The escape character in a byte-level vocabulary."""
TOKEN = "a-token-of-the-test"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA run, `runs/run`, on the model in `base`."""
    folder = tmp_path_factory.mktemp("chat")
    write_base(folder / "base", seed=0)
    write_job(folder)
    values = yaml.safe_load((folder / "job.yaml").read_text())
    values["optimizer"] = {"learning_rate": 0.01}
    template = (folder / "template.jinja").read_text().partition("}}")[2]  # without the microseconds
    (folder / "template.jinja").write_text(template)
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    code, _, err = forked_shardwise("train", "job.yaml", cwd=folder)
    assert code == 0, err
    return folder


def run(*arguments: str, cwd: Path, **variables: str) -> str:
    """The output of a verb that works."""
    code, out, err = forked_shardwise(*arguments, cwd=cwd, **variables)
    assert code == 0, err
    return out


def test_run_export_merged_and_base_answer_as_they_should(work: Path) -> None:
    answer = run("generate", "runs/run", *ASK, cwd=work)
    assert answer.strip()
    run("export", "runs/run", "--out", "adapter", cwd=work)
    run("export", "runs/run", "--merge", "--out", "merged", cwd=work)
    for folder in ("adapter", "merged"):
        assert run("generate", folder, "--system", SYSTEM, *ASK, cwd=work) == answer
    stop = answer[3:6]
    assert run("generate", "runs/run", "--stop", stop, *ASK, cwd=work).strip() == answer[: answer.index(stop)]
    compared = run("generate", "runs/run", "--base", *ASK, cwd=work)
    assert compared.startswith("base: ")
    assert compared.endswith(f"\ntuned: {answer}")
    assert not compared.startswith(f"base: {answer}")

    card = (work / "adapter" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["shardwise", "lora"]}
    for fact in (
        "| base | base, pretrained weights |",
        "| LoRA | rank 4, alpha 8 |",
        "| data | qa.jsonl |",
        "| steps | 8, of 4 rows of 128 tokens |",
        "| strategy | single, 1 process",
    ):
        assert fact in card
    first, last = re.findall(r"training loss \| (\S+) at step 1, (\S+) at step 8", card)[0]
    assert float(last) < float(first)
    assert "kitchen-door" not in card
    assert str(work) not in card
    assert os.uname().nodename not in card
    assert "merged into the base" in (work / "merged" / "README.md").read_text()


def test_lines_are_answered_one_by_one(work: Path) -> None:
    asked = ("generate", "runs/run", "--max-new-tokens", "12")
    _, out, err = Command(*asked, cwd=work, stdin=f"{QUESTION}\nWhy?\n{QUESTION}\n").finish()
    first, second, third = out.splitlines()
    assert first == third
    assert second
    assert err.startswith("loading runs/run\n")
    code, _, err = Command(*asked, cwd=work, stdin="a\x1b[2J\n").finish()
    assert code == 2
    assert "error: the prompt has control characters" in err
    lines = f"{QUESTION}\n/reset\n{QUESTION}\n/base\n{QUESTION}\n/exit\nnot read\n"
    chat = ("chat", "runs/run", "--temperature", "0", "--max-new-tokens", "12")
    code, out, err = Command(*chat, cwd=work, stdin=lines).finish()
    assert code == 0, err
    assert out.replace("\n", "").count(first.replace("\\n", "")) == 3, "the third next to the base's"
    assert "base: " in out
    assert "not read" not in out
    bare = ("chat", "base", "--max-new-tokens", "12")
    code, out, err = Command(*bare, cwd=work, stdin=f"/base\n{QUESTION}\n").finish()
    assert (code, bool(out.strip())) == (0, True), err
    assert "has no adapter" in err


def in_foreground() -> None:
    """With a controlling terminal Ctrl-C is a signal. A shell ignores it for tests in the background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A process on a pseudo terminal."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        master, slave = pty.openpty()
        streams = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True}
        streams["preexec_fn"] = in_foreground
        self.started = time.monotonic()
        command = [sys.executable, "-m", "shardwise", *arguments]
        self.process = subprocess.Popen(command, cwd=cwd, **streams)
        os.close(slave)
        self.master, self.seen = master, ""

    def until(self, text: str, seconds: float = 120.0) -> str:
        """What is shown up to a text."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            try:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
            except OSError:
                break
        found, _, self.seen = self.seen.partition(text)
        return found + text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_a_terminal_shows_answers_as_they_come_and_no_control_characters(work: Path) -> None:
    """The base may write nothing but ESC: what the terminal gets is a sign for it."""
    folder = work / "escapes"
    run("export", "runs/run", "--merge", "--out", "escapes", cwd=work)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    silent = [token for name, token in vocabulary.items() if name != ESC]  # ESC in a byte-level vocabulary
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": silent}))
    terminal = Terminal("chat", "escapes", "--max-new-tokens", "60", cwd=work)
    assert "loading escapes" in terminal.until("loading escapes")
    assert time.monotonic() - terminal.started < 10, "1 s on a machine that is not busy"
    terminal.until("\n> ")
    terminal.type("hello\n")
    answer = terminal.until("\n> ")
    assert answer.count("\\x1b") == 60
    shown = answer.partition("hello")[2].replace("\x1b[?2004l", "").replace("\x1b[?2004h", "")  # readline's
    assert "\x1b" not in shown
    terminal.type("/base\n")
    assert "has no adapter" in terminal.until("\n> ")
    terminal.type("\x04")
    terminal.until("never", seconds=30)
    assert terminal.process.wait(30) == 0
    os.close(terminal.master)


def test_ctrl_c_ends_an_answer_and_not_the_conversation(work: Path) -> None:
    folder = work / "endless"
    run("export", "runs/run", "--merge", "--out", "endless", cwd=work)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 10**6
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    silent = [token for name, token in vocabulary.items() if name != "a"]
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": silent}))
    terminal = Terminal("chat", "endless", "--max-new-tokens", "900000", cwd=work)
    terminal.until("\n> ")
    terminal.type("early\n")
    terminal.until("early")
    time.sleep(0.2)  # the process that runs the template is starting
    terminal.type("\x03")
    early = terminal.until("\n> ", seconds=60)
    assert "Traceback" not in early
    assert "aaa" not in early
    terminal.type("go\n")
    terminal.until("aaaaaaaa")
    terminal.type("\x03")
    ended = terminal.until("\n> ")
    assert "Traceback" not in ended
    terminal.type("/exit\n")
    terminal.until("never", seconds=30)
    assert terminal.process.wait(30) == 0
    os.close(terminal.master)


@pytest.fixture(scope="module")
def server(work: Path) -> Iterator[int]:
    """The port of `shardwise serve` of the run."""
    process = Command("serve", "runs/run", "--port", "0", cwd=work, name="server")
    found = process.until(r"run answers on http://127\.0\.0\.1:(\d+)/v1.*\n")
    said = process.errors
    yield int(found[1])
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert process.errors == said, "Ctrl-C ends it without a word"


CLIENTS: list[openai.OpenAI] = []


def client(port: int, key: str = "none") -> openai.OpenAI:
    CLIENTS.append(openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0))
    return CLIENTS[-1]


@pytest.fixture(autouse=True)
def _connections_are_closed() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def test_openais_client_gets_the_answers_of_generate(work: Path, server: int) -> None:
    expected = run("generate", "runs/run", *ASK, cwd=work).rstrip("\n")
    api, messages = client(server), [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": QUESTION})
    options: dict[str, Any] = {"model": "run", "messages": messages, "max_tokens": 12, "temperature": 0}
    assert [model.id for model in api.models.list().data] == ["run", "run:base"]
    once = api.chat.completions.create(**options)
    assert once.choices[0].message.content.rstrip() == expected
    assert once.choices[0].finish_reason == "length"
    assert once.usage.completion_tokens == 12
    parts = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    pieces = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(pieces).rstrip() == expected
    assert len([piece for piece in pieces if piece]) > 2
    assert parts[-1].usage == once.usage
    assert parts[-2].choices[0].finish_reason == "length"
    base = api.chat.completions.create(**{**options, "model": "run:base"})
    assert base.choices[0].message.content != once.choices[0].message.content
    stop = expected[3:6]
    [stopped] = api.chat.completions.create(**options, stop=[stop]).choices
    assert (stopped.message.content, stopped.finish_reason) == (expected[: expected.index(stop)], "stop")
    text = api.completions.create(model="run", prompt="A token", max_tokens=5, seed=1)
    assert text.usage.completion_tokens == 5
    assert (
        text.choices[0].text
        == api.completions.create(model="run", prompt="A token", max_tokens=5, seed=1).choices[0].text
    )


def test_a_client_that_goes_away_holds_nobody_up(server: int) -> None:
    api = client(server)
    stream = api.completions.create(model="run", prompt="a", max_tokens=100, stream=True)
    next(iter(stream))
    stream.close()
    answers: list[str] = []

    def ask() -> None:
        answers.append(api.completions.create(model="run", prompt="a", max_tokens=3).choices[0].text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 4


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"model": "gpt-4"}, 404, "there is no model 'gpt-4' here, only run and run:base"),
        ({"max_tokens": 10**9}, 400, "max_tokens: Input should be less than or equal to 4096"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": "a\x1b[2J"}]}, 400, "the prompt has control characters"),
        ({"messages": [{"role": "user", "content": "a " * 900}]}, 400, "leave no room for an answer"),
        ({"n": 2}, 400, "n: Input should be 1"),
        ({"logprobs": True}, 400, "'logprobs' is not supported here"),
        ({"temperature": -1}, 400, "temperature: Input should be greater"),
    ],
)
def test_what_cannot_be_answered_is_an_error_of_openai(
    server: int, changes: dict[str, Any], status: int, says: str
) -> None:
    options = {"model": "run", "messages": [{"role": "user", "content": "a"}], **changes}
    with pytest.raises(openai.APIStatusError) as caught:
        client(server).chat.completions.create(**options)
    assert caught.value.status_code == status
    assert says in caught.value.body["message"]


def raw(port: int, body: Any = b"{}", **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and error of a request as no client of OpenAI would send it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", "/v1/chat/completions", body, named)
    response = connection.getresponse()
    status, error = response.status, json.loads(response.read())["error"]
    connection.close()
    return status, error


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, b"{not json", {}),
        (400, b"\xff\xfe", {}),
        (400, b"[" * 100_000, {}),
        (400, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {}),
        (400, b"{}", {"Host": "[half"}),
        (403, b"{}", {"Origin": "http://evil.example"}),
        (403, b"{}", {"Origin": "null"}),
        (403, b"{}", {"Host": "evil.example:8000"}),
        (413, b"a" * (1 << 20) + b"a", {}),
        (413, b"{}", {"Content-Length": str(1 << 21)}),
        (413, [b"a" * 100_000] * 11, {}),
    ],
)
def test_hostile_requests_are_refused(server: int, status: int, body: Any, headers: dict[str, str]) -> None:
    found, error = raw(server, iter(body) if isinstance(body, list) else body, **headers)
    assert (found, set(error)) == (status, {"message", "type", "param", "code"})


def test_others_need_a_token(work: Path) -> None:
    code, _, err = forked_shardwise("serve", "runs/run", "--host", "0.0.0.0", cwd=work)
    assert code == 2
    assert "everybody who reaches 0.0.0.0 could use the model" in err
    arguments = ("serve", "base", "--host", "0.0.0.0", "--port", "0", "--token", TOKEN)
    process = Command(*arguments, cwd=work)
    port = int(process.until(r":(\d+)/v1.*\n")[1])
    taken, _, err = forked_shardwise("serve", "base", "--port", str(port), cwd=work)
    assert taken == 4
    assert "cannot be listened on: Address already in use" in err
    assert raw(port)[0] == raw(port, Authorization="Bearer wrong")[0] == 401
    assert client(port, TOKEN).models.list().data[0].id == "base"
    with pytest.raises(openai.BadRequestError, match="use /v1/completions"):
        client(port, TOKEN).chat.completions.create(model="base", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.AuthenticationError):
        client(port, "other").models.list()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files needs."""

    got: dict[str, Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got[self.path] = (self.headers["authorization"], body)  # type: ignore[attr-defined]
        if self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            answer: Any = {
                "files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            }
        else:
            url = f"http://{self.headers['host']}/me/model"
            answer = {"url": url, "commitUrl": f"{url}/commit/1", "commitOid": "1" * 40, "name": "me/model"}
        self._send(answer)

    def do_GET(self) -> None:
        self._send({"id": "me/model", "sha": "1" * 40, "siblings": []})

    def _send(self, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Silent."""


def test_an_export_is_pushed_to_the_hub(work: Path) -> None:
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    hub.got = {}  # type: ignore[attr-defined]
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{hub.server_port}"
    variables = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0"}
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "export",
        "runs/run",
        "--out",
        "pushed",
        "--push",
        "me/model",
        "--json",
    ]
    done = subprocess.run(
        command, cwd=work, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    hub.shutdown()
    hub.server_close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["url"] == f"{address}/me/model"
    assert "export: copying adapter_model.safetensors\n" in done.stderr
    got: dict[str, Any] = hub.got  # type: ignore[attr-defined]
    key, created = got["/api/repos/create"]
    assert key == "Bearer hf_test"
    assert "private" in (json.loads(created).get("visibility"), *json.loads(created))
    files = [json.loads(line) for line in got["/api/models/me/model/commit/main"][1].splitlines()]
    names = {line["value"]["path"] for line in files if line["key"] == "file"}
    assert names == {path.name for path in (work / "pushed").iterdir()}
    assert {"README.md", "adapter_model.safetensors", "adapter_config.json"} <= names
