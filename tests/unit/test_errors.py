"""What an error shows."""

import errno
import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import (
    JobError,
    MachineError,
    Problem,
    ShardwiseError,
    known,
    not_installed,
    printable,
    render,
    unwritten,
    what_of,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\x9b2Jb", "a\\x9b2Jb"),
        ("\x1b]8;;http://x\x07link", "\\x1b]8;;http://x\\x07link"),
        ("up\rdown", "up\\rdown"),
        ("txt\u202egpj.exe", "txt\\u202egpj.exe"),
        ("\ud800", "\\ud800"),
        ("lines\n\tand tabs, 漢字, é, 👩‍💻", "lines\n\tand tabs, 漢字, é, 👩‍💻"),
    ],
)
def test_text_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert render(JobError(text, where=text)) == f"error: {shown}\n  at:  {shown}"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("torch.nn", "pip install shardwise"),
        ("deepspeed", "pip install 'shardwise[train]'"),
        ("liger_kernel", "pip install 'shardwise[train]'"),
        ("bitsandbytes", "pip install 'shardwise[train]'"),
        ("hypothesis", "pip install hypothesis"),  # of `dev`, which is not for users
        ("yaml", "pip install shardwise"),
        ("einops", "pip install einops"),  # what the code of a model imports
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(module: str, line: str) -> None:
    error = not_installed(ModuleNotFoundError(name=module))
    assert isinstance(error, MachineError)
    assert error.problems[0].fix == line


def test_an_error_caught_in_python_says_where_and_how_to_fix_it() -> None:
    error = JobError("no such key", where="job.yaml:3: stpes", fix="did you mean `steps`?")
    assert str(error) == "no such key\n  at:  job.yaml:3: stpes\n  fix: did you mean `steps`?"
    assert what_of(error) == "no such key"
    assert "".join(traceback.format_exception_only(error)).count("did you mean") == 1
    several = JobError("job.yaml has 2 problems", problems=(error.problems[0], Problem(what="x", fix="y")))
    assert str(several).splitlines()[3:] == ["    fix: did you mean `steps`?", "  - x", "    fix: y"]
    assert str(pickle.loads(pickle.dumps(several))) == str(several)


def test_a_missing_module_of_our_own_is_a_bug() -> None:
    assert not_installed(ModuleNotFoundError(name="shardwise.gone")) is None


def failing(folder: Path, call: str) -> Exception:
    """The error of a function of a file, which another file may call."""
    folder.mkdir(parents=True)
    source = f"def forward(work):\n    return {call}\n"
    names: dict[str, Any] = {"torch": torch}
    exec(compile(source, folder / "modeling_odd.py", "exec"), names)
    with pytest.raises(RuntimeError) as caught:
        names["forward"](lambda: torch.ones(2) @ torch.ones(3))
    return caught.value


def test_an_error_of_a_models_own_code_is_no_bug_of_ours(tmp_path: Path) -> None:
    error = failing(tmp_path / "transformers/models/odd", "torch.ones(2) @ torch.ones(3)")
    shown = known(error, fix="report it")
    assert isinstance(shown, JobError)
    assert shown.problems[0].where == "model.source, modeling_odd.py:2 in forward"
    assert shown.problems[0].what.startswith("the model's own code fails: RuntimeError: ")


def test_an_error_of_what_the_models_code_calls_is(tmp_path: Path) -> None:
    shown = known(failing(tmp_path / "transformers/models/odd", "work()"), where="rank 0", fix="report it")
    assert type(shown) is ShardwiseError
    assert (shown.problems[0].where, shown.problems[0].fix) == ("rank 0", "report it")


@pytest.mark.parametrize(
    ("number", "what", "fix"),
    [
        (errno.EACCES, "opened: Permission denied", "give permission"),
        (errno.ENOSPC, "written: No space left", "make room"),
        (errno.EROFS, "written: Read-only file system", "mount it writable"),
    ],
)
def test_a_file_without_permission_may_have_been_for_reading(number: int, what: str, fix: str) -> None:
    shown = unwritten(OSError(number, os.strerror(number), "there"))
    assert shown.problems[0].what.startswith(f"it cannot be {what}")
    assert shown.problems[0].fix == f"{fix}, or name another place"
