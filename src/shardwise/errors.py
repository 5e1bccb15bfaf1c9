"""Every error a user can cause or meet, and the exit code each one ends with.

ShardwiseError
├── JobError            2   the job file, the data or the command line is wrong
│   ├── DataError       2   a sample, a file or the tokenised data is wrong
│   └── DivergedError   2   the loss or the gradient norm is not finite
├── DoesNotFitError     3   the job does not fit; `fix` names the nearest change that would
├── MachineError        4   the machine is not able: driver, port, permission, disk, missing package
│   └── PowerBusyError  4   another run controls the power limits of these GPUs
├── CheckpointError     5   a checkpoint is damaged or belongs to another job
└── StoppedError       75   stopped on request, state saved, `--resume` goes on

Anything else that reaches the command line is a bug in shardwise and ends with exit code 1.
"""

import errno
import re
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem: what is wrong, where it is, how to fix it."""

    what: str
    where: str = ""
    fix: str = ""


class ShardwiseError(Exception):
    """An error with a cause the user can act on; printed as one block, without a traceback."""

    exit_code = 1
    title = "error"
    """Heads the block."""

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", problems: Sequence[Problem] = ()
    ) -> None:
        """`problems` lists several findings at once; `what` is then their headline."""
        super().__init__(what)
        self.problems: tuple[Problem, ...] = tuple(problems) or (Problem(what=what, where=where, fix=fix),)
        self.headline = what if problems else ""

    def to_json(self) -> dict[str, Any]:
        """For another process, which `restored` shows it in."""
        problems = [asdict(problem) for problem in self.problems]
        return {"exit_code": self.exit_code, "headline": self.headline, "problems": problems}

    def __str__(self) -> str:
        return render(self).removeprefix(f"{self.title}: ")


class JobError(ShardwiseError):
    exit_code = 2


class DataError(JobError):
    pass


class DivergedError(JobError):
    pass


class DoesNotFitError(ShardwiseError):
    exit_code = 3


class MachineError(ShardwiseError):
    exit_code = 4


class PowerBusyError(MachineError):
    pass


class CheckpointError(ShardwiseError):
    exit_code = 5


class StoppedError(ShardwiseError):
    exit_code = 75
    title = "stopped"  # nothing is wrong: it was asked for


def restored(values: Mapping[str, Any]) -> ShardwiseError:
    """The error of another process, as `to_json` gave it."""
    problems = [Problem(**problem) for problem in values["problems"]]
    kind = StoppedError if values["exit_code"] == StoppedError.exit_code else ShardwiseError
    error = kind(problems[0].what, problems=problems)
    error.exit_code, error.headline = values["exit_code"], values["headline"]
    return error


def what_of(error: BaseException) -> str:
    """What is wrong, on one line: without where and fix."""
    return str(error.args[0]) if isinstance(error, ShardwiseError) else str(error)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM)
WRITE_ERRORS = (*FULL, *_DENIED, errno.EROFS, errno.EISDIR)
"""Numbers of an OSError that say the machine does not let a file be written."""


def unwritten(error: OSError) -> MachineError:
    """One of WRITE_ERRORS as an error for the user."""
    done = "opened" if error.errno in _DENIED else "written"  # to read it, perhaps
    what = f"it cannot be {done}: {error.strerror}"
    remedies = {errno.EROFS: "mount it writable"} | dict.fromkeys(_DENIED, "give permission")
    fix = f"{remedies.get(error.errno or 0, 'make room')}, or name another place"
    return MachineError(what, where=str(error.filename or "stdout"), fix=fix)


def not_installed(error: ModuleNotFoundError) -> MachineError | None:
    """A missing package, and what installs it: our extra if one brings it. None for a module of our own."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "shardwise"):
        return None
    wanted = package = {"yaml": "pyyaml"}.get(module, module)
    with suppress(PackageNotFoundError):  # started from a folder of sources
        for line in requires("shardwise") or ():
            extra = re.search(r"extra == ['\"](?!all|dev)(\w+)", line)
            if re.split(r"[^\w-]", line)[0].replace("-", "_") == package and (extra or ";" not in line):
                wanted = f"'shardwise[{extra[1]}]'" if extra else "shardwise"
    return MachineError(f"{package} is not installed", fix=f"pip install {wanted}")


_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What steers a terminal or turns the direction of text: control characters but tab and newline."""


def printable(text: str) -> str:
    """Text of data, files or models as a terminal may show it: with codes in place of control characters."""
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def render(error: ShardwiseError) -> str:
    """The block shown to the user, one `error:` line per problem with `at` and `fix` below it."""
    lines = [f"{error.title}: {error.headline}"] if error.headline else []
    for problem in error.problems:
        lines.append(f"{'  - ' if error.headline else f'{error.title}: '}{problem.what}")
        indent = "    " if error.headline else "  "
        if problem.where:
            lines.append(f"{indent}at:  {problem.where}")
        if problem.fix:
            lines.append(f"{indent}fix: {problem.fix}")
    return printable("\n".join(lines))


def known(error: Exception, *, where: str = "", fix: str) -> ShardwiseError:
    """Make the error that is shown; `where` and `fix` are for one that nobody expected, a bug."""
    if isinstance(error, ShardwiseError):
        return error
    if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
        return unwritten(error)
    if isinstance(error, ModuleNotFoundError) and (missing := not_installed(error)):
        return missing
    what, place = f"{type(error).__name__}: {error}", model_code(error)
    if not place or "CUDA error" in what:  # which comes later than what caused it
        return ShardwiseError(what, where=where, fix=fix)
    fix = "correct model.config, or train it with transformers alone; --debug prints the traceback"
    return JobError(f"the model's own code fails: {what}", where=f"model.source, {place}", fix=fix)


def model_code(error: BaseException) -> str:
    """`modeling_dbrx.py:292 in forward`, if a model's code raised the error, or a library that it called."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if re.search(r"/transformers(/models|_modules)/", path.as_posix()):
            return f"{path.name}:{frame.lineno} in {frame.name}"
        if not re.search(r"/torch/|/transformers/|/shardwise/trace/", path.as_posix()):
            break
    return ""
