"""The command line as a user meets it: help, exit codes, what reaches the workers."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwise import __version__
from shardwise.app.jobs import size_in_bytes
from shardwise.cli import generate, main
from shardwise.cli.options import write_text
from shardwise.emit.files import Target
from shardwise.errors import CheckpointError, JobError, StoppedError
from shardwise.launch.spec import LaunchSpec

*_FIRST, _LAST = get_args(Target)
ALL_TARGETS = f"{', '.join(_FIRST)} or {_LAST}"

SAMPLING = {
    "--system", "--base", "--max-new-tokens", "--temperature", "--top-p", "--top-k",
    "--repetition-penalty", "--stop", "--seed",
}  # fmt: skip
VERBS = {
    "demo": {"--out"},
    "init": {"--from", "--out", "--list", "--models", "--qlora"},
    "config": {"--set", "--json"},
    "plan": {"--scale", "--straggler", "--documents", "--qlora",
        "--gpus", "--model", "--lora", "--full", "--sequence", "--global-batch", "--objective",
        "--max-slowdown", "--pareto", "--all", "--html",
        "--explain", "--json", "--out", "--set", "--memory-cap", "--margin",
    },
    "tables": {
        "--models", "--gpus", "--modes", "--sequence", "--format", "--out", "--set", "--memory-cap",
        "--margin",
    },
    "train": {
        "--qlora",
        "--processes", "--nodes", "--node-rank", "--rendezvous", "--hostfile", "--workdir", "--resume",
        "--resume-or-start", "--resume-from", "--trust-checkpoint", "--max-steps", "--dry-run", "--set",
        "--memory-cap", "--on-oom", "--simulate-power",
            "--supervise", "--json",
    },
    "monitor": {"--every", "--csv", "--jsonl", "--once", "--json"},
    "bench": {
        "--strategies", "--sweep", "--processes", "--steps", "--warmup", "--timeout", "--profile", "--out",
        "--set", "--memory-cap", "--json",
    },
    "check": {
        "--gpus", "--model", "--sequence", "--reader", "--fix", "--run-tiny", "--errors-only", "--strict",
            "--json",
    },
    "emit": {"--to", "--run", "--gpus", "--preset", "--out", "--set"},
    "report": {"--html", "--json"},
    "checkpoint": {"--step", "--out", "--json"},
    "export": {"--merge", "--out", "--gguf", "--push", "--json"},
    "generate": {"--prompt", *SAMPLING},
    "chat": SAMPLING,
    "serve": {"--host", "--port", "--token"},
    "board": {"--host", "--port", "--token"},
    "doctor": {"--calibrate", "--json"},
    "power": {"--force", "--json"},
}  # fmt: skip


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("qa.jsonl").write_text("{}\n")
    path = Path("job.yaml")
    path.write_text("name: run\nmodel: {source: org/model}\ndata: {train: qa.jsonl}\n")
    return path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """What the launcher is asked for, instead of worker processes."""
    specs: list[LaunchSpec] = []

    def launch(spec: LaunchSpec, **_: object) -> int:
        specs.append(spec)
        os.write(1, b"a worker speaks\n")
        return 0

    monkeypatch.setattr("shardwise.app.train.launch", launch)
    return specs


def test_the_verbs_and_flags_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    """Growing the command line is a decision, not an accident."""
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:\n")[1].split("\n\n")[0]
    assert {line.split()[0] for line in listed.splitlines()} == set(VERBS)
    for verb, flags in VERBS.items():
        assert main([verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE)) - {"--help"} == flags, verb


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_has_no_cut_sentence_and_no_types(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([verb, "--help"] if verb else ["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"\w\.\.\.$|<(?:int|str|path|float|list\[)|<=|>=", text, re.MULTILINE) == []


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from shardwise.cli import main; main(['--help']); "
        "heavy = {'torch', 'transformers', 'pydantic', 'rich', 'numpy', 'yaml'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "shardwise demo" in done.stdout


def test_no_verb_shows_the_help_and_version_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: shardwise" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardwise {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "block"),
    [
        (JobError("bad", where="job.yaml:1", fix="mend"), 2, "error: bad\n  at:  job.yaml:1\n  fix: mend\n"),
        (CheckpointError("torn"), 5, "error: torn\n"),
        (StoppedError("on request", fix="go on"), 75, "stopped: on request\n  fix: go on\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_end_in_one_block_and_their_code(
    error: BaseException,
    code: int,
    block: str,
    job_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch(spec: LaunchSpec, **_: object) -> int:
        raise error

    monkeypatch.setattr("shardwise.app.train.launch", launch)
    assert main(["train", str(job_file)]) == code
    assert capsys.readouterr().err == block


def test_a_bug_is_called_a_bug_and_debug_shows_where(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(spec: LaunchSpec, **_: object) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("shardwise.app.train.launch", launch)
    assert main(["train", str(job_file)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ZeroDivisionError: division by zero\n")
    assert "--debug" in err
    assert "Traceback" not in err
    for arguments in (["--debug", "train", str(job_file)], ["train", str(job_file), "--debug"]):
        assert main(arguments) == 1
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan job.yaml --gpus 8xH100", "generate runs/x --prompt a"])
def test_without_torch_its_install_line_is_shown(job_file: Path, command: str) -> None:
    script = "import sys; sys.modules['torch'] = None; from shardwise.cli import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert done.stderr.endswith("error: torch is not installed\n  fix: pip install shardwise\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("shardwise mo", "monitor\n"),
        ("shardwise plan --objective e", "energy\n"),
        ("shardwise emit --to sl", "slurm\n"),
    ],
)
def test_the_shell_completes_verbs_and_choices(
    words: str, answers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SHARDWISE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out == answers


def test_train_hands_the_launcher_what_was_asked(
    job_file: Path, launched: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.app.train.gpu_count", lambda: 2)
    flags = [
        "--processes",
        "2",
        "--max-steps",
        "7",
        "--memory-cap",
        "16GiB",
        "--dry-run",
        "--set",
        "train.seed=3",
    ]
    assert main(["train", str(job_file), *flags]) == 0
    (spec,) = launched
    assert (spec.processes, spec.max_steps, spec.memory_cap_bytes) == (2, 7, 16 * 2**30)
    assert (spec.dry_run, spec.resume, spec.run_dir) == (True, False, "runs/run")
    assert spec.job["train"]["seed"] == 3
    json.dumps(spec.to_json())


def test_the_record_gets_the_command_as_it_was_typed(
    job_file: Path, launched: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["/home/me/.venv/bin/shardwise", "train", "job.yaml", "--processes", "1"]
    )
    assert main() == 0
    assert launched[0].command == ["shardwise", "train", "job.yaml", "--processes", "1"]


def test_a_memory_cap_without_a_gpu_is_refused_not_ignored(
    job_file: Path,
    launched: list[LaunchSpec],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardwise.app.train.gpu_count", lambda: 0)
    assert main(["train", str(job_file), "--memory-cap", "16GiB"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err
    assert launched == []


@pytest.mark.parametrize(
    ("typed", "meant"), [("--steps", "--max-steps"), ("--step", "--max-steps"), ("--resum", "--resume")]
)
def test_an_unknown_option_is_answered_with_the_closest(
    typed: str, meant: str, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(job_file), typed, "3"]) == 2
    assert f"fix: did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "what", "choices"),
    [
        (["emit", "job.yaml", "--to", "trainer"], "--to", ALL_TARGETS),
        (["plan", "job.yaml", "--objective", "speed"], "--objective", "throughput, memory or energy"),
    ],
)
def test_a_word_that_is_no_choice_is_answered_with_all_of_them(
    typed: list[str], what: str, choices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0] == f"error: invalid value for '{what}': '{typed[-1]}' is not a valid choice"
    assert error[-1] == f"  fix: write {choices}"


def test_the_readme_names_what_emit_takes() -> None:
    readme = " ".join((Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8").split())
    assert f"`--to` {ALL_TARGETS}." in readme


def test_one_process_is_all_that_single_is_advised(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(job_file), "--processes", "3", "--set", "strategy=single"]) == 2
    _, _, fix = capsys.readouterr().err.splitlines()
    assert fix == "  fix: --processes 1, or a strategy that shards: zero2, zero3, fsdp2"


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        ([], "train.global_batch: 15 or 18, or --processes 2"),
        (["--set", "train.micro_batch=4"], "train.global_batch: 12 or 24, or --processes 2"),
    ],
)
def test_rows_that_cannot_be_shared_are_told_with_the_nearest_numbers(
    more: list[str], fix: str, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(job_file), "--processes", "3", *more]) == 2
    what, _, mend = capsys.readouterr().err.splitlines()
    assert what == "error: the 16 rows of a step (train.global_batch) cannot be shared equally by 3 processes"
    assert mend == f"  fix: {fix}"


def test_processes_default_to_the_visible_gpus(
    job_file: Path, launched: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.app.train.gpu_count", lambda: 4)
    main(["train", str(job_file)])
    main(["train", str(job_file), "--set", "strategy=single"])
    monkeypatch.setattr("shardwise.app.train.gpu_count", lambda: 0)
    main(["train", str(job_file)])
    assert [spec.processes for spec in launched] == [4, 1, 1]


def test_json_leaves_stdout_to_one_object(
    job_file: Path,
    launched: list[LaunchSpec],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardwise.report.compare.summary", lambda run: {"run": str(run)})
    assert main(["train", str(job_file), "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"run": "runs/run"}
    assert "a worker speaks" in err


def test_the_plan_of_a_dry_run_stays_on_stdout_with_json(
    job_file: Path, launched: list[LaunchSpec], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(job_file), "--json", "--dry-run"]) == 0
    assert capfd.readouterr().out == "a worker speaks\n"


def test_stdout_is_for_the_result_not_for_what_libraries_print(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def act(*_: object, **__: object) -> Any:
        os.write(1, b"a library speaks\n")
        return {"kind": "model", "dtype": "float32", "step": 3, "out": "mine", "best": False}

    Path("plan.json").write_text("{}")
    Path("environment.json").write_text('{"schema": 1}')
    monkeypatch.setitem(sys.modules, "shardwise.training.afterwards", types.SimpleNamespace(export_run=act))
    assert main(["export", ".", "--out", "mine"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("wrote the model of step 3, in float32, to mine\n")
    assert "a library speaks" in err


def test_a_terminal_without_a_sign_gets_another_one() -> None:
    code = "from shardwise import cli; cli.main = lambda: print('a \N{RIGHTWARDS ARROW} b') or 0; cli.run()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "a ? b\n", "")


def test_a_reader_that_has_seen_enough_is_no_error(job_file: Path) -> None:
    for arguments in (["config", str(job_file)], ["--help"], ["init", "--list"]):
        command = [sys.executable, "-m", "shardwise", *arguments]
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_of_the_verb_s_own_that_breaks_is_an_error(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(spec: LaunchSpec, **_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("shardwise.app.train.launch", launch)
    assert main(["train", str(job_file)]) != 0
    assert "Broken pipe" in capsys.readouterr().err


def test_a_full_disk_is_the_machine_s_fault(job_file: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "shardwise", "config", str(job_file)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("error: it cannot be written: No space left on device\n  at:  stdout\n")


@pytest.mark.parametrize("arguments", [["demo", "--out"], ["export", "runs/run", "--out"]])
def test_a_place_that_is_taken_is_said(
    arguments: list[str], job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, str(job_file)]) == 2
    assert "new folder" in capsys.readouterr().err


def test_a_seed_is_one_that_torch_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "runs/run", "--prompt", "a", "--seed", str(2**63)]) == 2
    assert "--seed" in capsys.readouterr().err


def test_config_prints_value_and_origin(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(job_file), "--set", "train.steps=5"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["name", '"run"', "job.yaml:1"] in lines
    assert ["train.steps", "5", "--set", "train.steps=5"] in lines
    assert ["train.seed", "42", "default"] in lines
    assert main(["config", str(job_file), "--json"]) == 0
    settings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["settings"]
    assert {"key": "name", "value": "run", "origin": "job.yaml:1"} in settings


def test_init_elsewhere_says_where_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "lora", "--out", "mine/first.yaml"]) == 0
    assert capsys.readouterr().out.endswith("next: shardwise train mine/first.yaml\n")
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["config", "first.yaml"]) == 0


def test_init_lists_presets_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    presets = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "llama-2-7b-lora" and "24 GB" in line for line in presets)
    assert main(["init", "--models"]) == 0
    shapes = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["llama-2-7b", "6.74B", "meta-llama/Llama-2-7b-hf"] in shapes
    assert ["gemma-3-1b", "1B", "google/gemma-3-1b-pt"] in shapes, "not 1e+03M"


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 * 2**30), ("500MB", 500 * 10**6), ("1.5 gib", 3 * 2**29), ("10b", 10)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text, "--memory-cap") == size


@pytest.mark.parametrize("text", ["16", "GiB", "-1GiB", "0GiB", "0.1b", "16 gigs", f"{'9' * 400}GiB"])
def test_what_is_not_a_size_names_the_flag(text: str) -> None:
    with pytest.raises(JobError) as caught:
        size_in_bytes(text, "--memory-cap")
    assert caught.value.problems[0].where == "--memory-cap"


@pytest.mark.parametrize("place", ["none/there", "file/below", "."])
def test_a_file_that_cannot_be_written_names_its_flag(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError) as caught:
        write_text(tmp_path / place, "text", "--out")
    assert caught.value.problems[0].where == "--out"
    assert "cannot be written" in caught.value.problems[0].what


def test_generate_without_a_prompt_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(generate.__globals__, "_open", lambda *_: None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["generate", "runs/a"]) == 2
    assert "there is no prompt: stdin is empty" in capsys.readouterr().err


def test_an_empty_line_does_not_end_a_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Echo:
        def answers(self, asked: str) -> list[tuple[str, str]]:
            return [("", asked)]

    monkeypatch.setitem(generate.__globals__, "_open", lambda *_: Echo())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\n  \ntwo\n")))
    assert main(["generate", "runs/a"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["one", "two"]
    assert err.count("note: an empty line is not answered") == 2


def test_a_disk_that_is_full_leaves_nothing_in_the_way_of_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, done = Path.write_text, list[Path]()

    def full(path: Path, text: str, **options: Any) -> int:
        done.append(path)
        if len(done) == 2:
            write(path, text[:9], **options)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, text, **options)

    out = tmp_path / "job.yaml"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert main(["init", "lora", "--out", str(out)]) == 4
    assert f"at:  {done[1]}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["init", "lora", "--out", str(out)]) == 0
