"""The verb as a user meets it: one frame, lines, a terminal, files, signals."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.app import monitor as app
from shardwise.cli import main
from shardwise.device.find import REPLAY
from shardwise.errors import JobError
from shardwise.record.schema import RunEvent, StepEvent
from shardwise.record.write import EventWriter, RunFolder

TWO_GPUS = Path(__file__).parents[3] / "docs/examples/two-h200.json"
COMMAND = [sys.executable, "-m", "shardwise", "monitor"]


@pytest.fixture(autouse=True)
def _two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLAY, str(TWO_GPUS))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run() -> Iterator[RunFolder]:
    """`runs/a`, at step 3 of 10; its lock is held."""
    folder = RunFolder.create(Path("runs/a"), job_yaml="name: a\n", plan={}, environment={})
    writer = EventWriter(folder.events)
    sizes = {"global_batch": 4, "sequence_length": 64, "parameters": 1, "trainable_parameters": 1}
    writer.write(RunEvent(name="a", strategy="zero2", processes=2, total_steps=10, **sizes))
    for number in range(1, 4):
        rates = {"tokens_per_second": 500.0, "tokens_per_second_per_gpu": 250.0, "learning_rate": 1e-4}
        rates |= {"seconds": 2.0, "grad_norm": 1.0, "loss": 2.5, "joules": 800.0}
        writer.write(
            StepEvent(step=number, epoch=0, skipped=False, tokens=1000, target_tokens=1000, **rates)  # type: ignore[arg-type]
        )
    writer.close()
    yield folder
    folder.close()


def test_once_shows_one_frame_of_the_run_that_runs(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", "--once"]) == 0
    out = capsys.readouterr().out
    assert "2 × NVIDIA H200" in out
    assert "a  running, zero2 on 2, runs/a" in out
    assert "step 3/10 (30%), ETA" in out
    assert "\x1b" not in out, "no colour without a terminal"


def test_once_json_is_one_object_with_units_in_its_keys(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", str(run.path), "--once", "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["driver"], len(shown["gpus"])) == (1, "580.95.05", 2)
    assert shown["gpus"][1]["power_limit_watts"] == 600.0
    assert (shown["run"]["status"], shown["run"]["joules_per_token"]) == ("running", 0.8)
    assert shown["run"]["unavailable"]["eval_loss"] == "it is not finite, or no evaluation is done yet"


def test_without_a_gpu_and_a_run_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REPLAY, "none")
    assert main(["monitor", "--once"]) == 0
    out = capsys.readouterr().out
    assert "no GPU: SHARDWISE_DEVICE=none hides all GPUs" in out
    assert "no run: none is running in runs/" in out
    assert "host: CPU " in out


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["none"], "none"),
        (["--json"], "--json"),
        (["--every", "0"], "--every"),
        (["--every", "nan"], "--every"),
        (["--once", "--every", "5"], "--every"),
        (["--once", "--csv", "none/a.csv"], "--csv"),
    ],
)
def test_what_cannot_be_shown_is_said(
    arguments: list[str], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", "--jsonl", "rows.jsonl", *arguments]) == 2
    printed = capsys.readouterr()
    assert f"at:  {where}" in printed.err
    assert printed.out == ""
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(), "signals are no longer held back"
    assert not Path("rows.jsonl").exists()


def test_files_are_made_with_one_frame_too(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--csv", "a.csv", "--jsonl", "a.jsonl"]) == 0
    assert len(Path("a.csv").read_text().splitlines()) == 3
    assert [json.loads(line)["run_step"] for line in Path("a.jsonl").read_text().splitlines()] == [3, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_terminal_lines_are_printed_until_a_signal(number: int, run: RunFolder) -> None:
    command = [*COMMAND, "--every", "0.1", "--csv", "a.csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(number)
        rest, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")
    lines += rest.splitlines()
    assert all(" | a running | step 3/10 | loss 2.5000 | " in line for line in lines)
    assert len({line.partition(" | ")[0] for line in lines}) >= 1
    rows = list(csv.reader(Path("a.csv").read_text().splitlines()))
    assert len(rows) == 1 + 2 * len(lines), "each sample that was shown is kept"
    assert len({len(row) for row in rows}) == 1


def test_lines_end_quietly_when_nobody_reads_them() -> None:
    piped = f"{sys.executable} -m shardwise monitor --every 0.1 | head -n 2; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 2)


def terminal(columns: int, arguments: list[str], *, until: int) -> tuple[int, str]:
    """Exit code and output of `monitor` in a terminal, where Ctrl-C is pressed after `until` frames."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**environment, "TERM": "xterm-256color"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
    )  # fmt: skip
    os.close(theirs)
    output, pressed, ends = b"", False, time.monotonic() + 30
    while time.monotonic() < ends:
        try:
            output += os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not pressed and output.count(b"shardwise monitor") >= until:
            os.write(ours, b"\x03")
            pressed = True
    os.close(ours)
    return process.wait(timeout=10), output.decode()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_a_live_view_that_fits_and_ctrl_c_leaves_the_last_frame(
    columns: int, run: RunFolder
) -> None:
    code, output = terminal(columns, ["--every", "0.2"], until=3)
    assert code == 0
    assert "Traceback" not in output
    live, _, after = output.rpartition("\x1b[?1049l")
    assert live.count("\x1b[?1049h") == 1, "the view has a screen of its own"
    assert after.count("shardwise monitor") == 1, "the last frame stays"
    frames = live.split("\x1b[H")[2:]
    assert len(frames) >= 3
    plain = [re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\^C", "", frame) for frame in [*frames, after]]
    for frame in plain:
        assert max(len(line.rstrip("\r")) for line in frame.split("\n")) <= columns
    full = [frame for frame in plain if "step 3/10 (30%), ETA" in frame]
    assert len(full) >= len(plain) - 1, "Ctrl-C makes the terminal drop what is on its way"
    assert full[-1] is plain[-1]
    assert all(("memory MHz" in frame) is (columns == 120) for frame in full)
    assert re.search(r"\x1b\[[0-9;]*32mrunning", output), "in colour"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(run: RunFolder) -> None:
    command = [
        "bash",
        "-c",
        f"TERM=dumb timeout -s INT 60 {sys.executable} -m shardwise monitor --every 0.2",
    ]
    terminal = ["script", "-qfec", " ".join(map(repr, command)), "/dev/null"]
    with subprocess.Popen(terminal, stdout=subprocess.PIPE, text=True, start_new_session=True) as done:
        assert done.stdout is not None
        lines = [done.stdout.readline() for _ in range(3)]
        done.terminate()
    assert "\x1b" not in "".join(lines)
    assert all("step 3/10" in line for line in lines)


def test_nothing_of_torch_is_loaded() -> None:
    code = "import sys; from shardwise.cli import main; main(['monitor', '--once']); "
    code += "sys.exit(str({'torch', 'transformers', 'numpy'} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() in ("", "{'numpy'}")
    assert "torch" not in done.stderr


def test_a_run_that_starts_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.15)
    samples = app.monitor(every_seconds=0.1)
    assert next(samples)["run"] is None
    for name in ("a", "b"):
        folder = RunFolder.create(Path("runs") / name, job_yaml=f"name: {name}\n", plan={}, environment={})
        seen = [next(samples) for _ in range(4)][-1]["run"]
        assert (seen["name"], seen["status"]) == (name, "starting"), (
            "one that ended gives way to one that runs"
        )
        folder.close()
        assert next(samples)["run"]["status"] == "not started"
    samples.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_run_that_is_being_set_up_is_taken_once_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.0)
    folder = RunFolder.create(Path("runs/a"), job_yaml="name: a\n", plan={}, environment={})
    content = (folder.path / "plan.json").read_text()
    (folder.path / "plan.json").write_text("{")
    samples = app.monitor(every_seconds=0.1)
    first = next(samples)
    assert (first["run"], first["run_unavailable"][:9]) == (None, "plan.json")
    (folder.path / "plan.json").write_text(content)
    assert next(samples)["run"]["status"] == "starting"
    samples.close()
    folder.close()


def test_samples_keep_their_times() -> None:
    samples = app.monitor(every_seconds=0.1)
    times = []
    for _ in range(5):  # the first one takes a tenth of a second
        times.append(next(samples)["time"])
        time.sleep(0.03)
    samples.close()
    assert times[-1] - times[1] == pytest.approx(0.3, abs=0.05), "what is done with a sample delays no other"


def test_a_bad_interval_is_an_error_before_anything_is_asked() -> None:
    with pytest.raises(JobError, match="so often"):
        next(app.monitor(every_seconds=0.01))
