"""Options that several verbs share, and what they do with stdout and stderr."""

import contextlib
import os
import select
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import JobError

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Changes = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job; may be repeated.")
]
MemoryCap = Annotated[str | None, typer.Option(metavar="SIZE", help="Use no more of each GPU, e.g. 16GiB.")]
QLora = Annotated[bool, typer.Option("--qlora", help="Train LoRA adapters on a base in NF4.")]
PAGE = " · shardwise</title>"  # In the head of each of our pages of HTML
QLORA = "model.quantization=nf4"
Margin = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Leave so much of the memory free.  [default: 5%]")
]
RowLength = Annotated[int | None, typer.Option(min=2, metavar="N", help="Tokens in a row.")]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Another one needs a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0 takes a free one.")]
Token = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        envvar="SHARDWISE_TOKEN",
        show_envvar=False,
        help="The key that clients must send.  [env: SHARDWISE_TOKEN]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")]


def write_text(path: Path, text: str, flag: str, ours: str | None = None) -> None:
    """Writes the file of a flag, or in place of one that has `ours` near its beginning; else JobError."""
    with placed(path, flag):
        if ours is not None and path.is_file() and path.stat().st_size:
            with path.open(encoding="utf-8", errors="replace") as file:
                if ours not in file.read(2000):
                    what = f"{path} is there, and is no earlier result of this command"
                    raise JobError(what, where=flag, fix="name another file, or remove it first")
        path.write_text(text, encoding="utf-8")


def unread() -> bool:
    """Whether nobody reads stdout or stderr any more: `head` has seen enough, say."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it is no file
            poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def write_no_more() -> None:
    """The reader of stdout, `head` say, has seen enough: what is still written goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def placed(path: Path, flag: str) -> Iterator[None]:
    """What is written within goes to `path`; JobError where it cannot be there."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        what = f"{path} cannot be written: {error.strerror}"
        raise JobError(what, where=flag, fix="name another place, in a folder that exists") from None


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What libraries and child processes print goes to stderr: stdout is for the verb's own result."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextlib.contextmanager
def progress(first: str, *, every: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows `first` and then what the yielded function is given: one line that changes, on a terminal.

    Elsewhere stderr gets `first` alone, and the rest a line each with `every`.
    """
    if not sys.stderr.isatty():
        say(first)
        yield say if every else lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield status.update


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """While a plan is made: what libraries print goes to stderr, and a terminal shows the progress."""
    from shardwise.planner.search import reporting

    with stdout_to_stderr(), progress("planning: building the model, without its weights") as show:

        def decided(done: int, strategies: int) -> None:
            show(f"planning: {done} of {strategies} strategies simulated or skipped")

        with reporting(decided):
            yield


def say_to_dos(job: Path | None) -> None:
    """Warn where a job file of `init --from` still asks something of its user."""
    from shardwise.job.paths import read_bounded
    from shardwise.job.source import LARGEST_FILE_BYTES, to_dos

    if job is None or not job.is_file():
        return
    with contextlib.suppress(OSError):
        text = read_bounded(job, LARGEST_FILE_BYTES).decode(errors="replace")
        if count := len([*to_dos(text)]):
            left = f"{count} to do{'s' * (count > 1)} of `shardwise init --from` left"
            say(f"warning: {job}: {left}; `shardwise check {shlex.quote(str(job))}` shows each")


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)
