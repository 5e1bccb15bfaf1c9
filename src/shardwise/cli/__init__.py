"""The `shardwise` command: finds the verb, runs it, turns every error into one block and an exit code.

Verbs import what they need when they run: `shardwise --help` loads neither pydantic nor rich nor torch.
"""

import contextlib
import difflib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from shardwise.cli.bench import bench
from shardwise.cli.board import board
from shardwise.cli.chat import chat, generate, serve
from shardwise.cli.check import check
from shardwise.cli.checkpoint import checkpoint
from shardwise.cli.demo import demo
from shardwise.cli.doctor import doctor
from shardwise.cli.emit import emit
from shardwise.cli.jobs import config, init
from shardwise.cli.models import export
from shardwise.cli.monitor import monitor
from shardwise.cli.options import unread, write_no_more
from shardwise.cli.plan import plan
from shardwise.cli.power import power
from shardwise.cli.report import report
from shardwise.cli.tables import tables
from shardwise.cli.train import train
from shardwise.errors import JobError, ShardwiseError, known, render

INTERRUPTED = 130
_QUOTES = "?.)'"
# The parent of typer's public BadParameter: every mistake on the command line, in every version of typer.
_UsageError = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="shardwise",
    help="Train language models on DeepSpeed and FSDP2. Start with `shardwise demo`.",
    epilog="Exit codes: 0 done, 1 a bug, 2 wrong job, data or command line, 3 does not fit, "
    "4 machine not able, 5 damaged checkpoint, 75 stopped with its state saved.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_VERBS: list[Callable[..., Any]] = [demo, init, config, plan, tables, train, monitor, bench, check]
_VERBS += [emit, report, checkpoint, export, generate, chat, serve, board, doctor, power]


class _Verb(TyperCommand):
    """Its help leaves out types and ranges: a metavar says what is meant, and an error what is allowed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            changed: dict[str, Any] = {"_get_number_range_help_str": lambda: ""}
            if parameter.param_type_name == "argument" and getattr(parameter, "metavar", None):
                changed["display_type_rich"] = lambda **_: None
            vars(parameter).update(changed)


for _verb in _VERBS:
    app.command(cls=_Verb)(_verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"shardwise {version('shardwise')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; allowed after a verb too.")
    ] = False,
) -> None:
    """Holds what is true for every verb; `main` acts on --debug before the verb is found."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; nothing but a finished verb prints to stdout."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    try:
        code = app(args=arguments, prog_name="shardwise", standalone_mode=False, obj=debug)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):  # some versions of typer end with 130 themselves
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:  # some versions of typer end with 1 themselves
        broken = error if isinstance(error, BrokenPipeError) else error.__context__
        if not isinstance(broken, BrokenPipeError):
            raise
        if not unread():  # a pipe of the verb's own
            return _reported(broken, debug=debug)
        write_no_more()
        return 0
    except Exception as error:
        return _reported(error, debug=debug)
    return int(code or 0)


def _reported(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    shown = _shown(error)
    print(render(shown), file=sys.stderr)
    return shown.exit_code


def run() -> NoReturn:
    """The command, as a process: `main`, and its exit code.

    After a plan the process ends without Python's own end, which would take down one by one the millions of
    objects that planning made: a second and a half. Everything is written by then, and no process is left.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without an arrow gets a question mark
    code = main()
    if "shardwise.planner.planning" in sys.modules and sys.argv[1] == "plan":
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _shown(error: Exception) -> ShardwiseError:
    """The error as a block can show it; what is not the user's is a bug, exit code 1."""
    if isinstance(error, _UsageError):
        return _usage(error)
    return known(error, fix="this is a bug in shardwise: run again with --debug and report what it shows")


def _usage(error: Exception) -> JobError:
    """A mistake on the command line, in typer's words, with its suggestion as the fix."""
    message = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "shardwise"
    message = " ".join(message.split()).replace("Value error, ", "")
    what, *suggestion = re.split(r"[\s.(]*(?:Did you mean|Possible options:) ", message)
    choices = re.search(r" is not one of ('.*')", what)
    if choices:
        what, words = f"{what[: choices.start()]} is not a valid choice", choices[1].replace("'", "")
        fix = f"write {' or '.join(words.rsplit(', ', 1))}"
    elif suggestion:
        # typer lists what is similar by the alphabet; what was typed is the last word of `what`.
        words = [word.strip(_QUOTES) for word in suggestion[0].split(", ")]
        fix = f"did you mean {_closest(what.split()[-1].strip(_QUOTES), words)}?"
    else:
        fix = f"`{command} --help` shows what it takes"
    return JobError(what[:1].lower() + what[1:].rstrip("."), where=command, fix=fix)


def _closest(typed: str, words: Sequence[str]) -> str:
    """The word that holds what was typed (`--steps`: `--max-steps`), else the most similar one."""
    part = typed.strip("-")
    return max(words, key=lambda word: (part in word, difflib.SequenceMatcher(None, typed, word).ratio()))
