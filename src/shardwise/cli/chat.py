"""`shardwise chat`, `generate` and `serve`: a run, an exported folder or a published model answers."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import Host, Port, Token, progress, say, stdout_to_stderr
from shardwise.errors import JobError, ShardwiseError, printable, render
from shardwise.inference.sampling import Sampling

if TYPE_CHECKING:
    from shardwise.inference.conversation import Conversation

NAME = typer.Argument(
    metavar="RUN|FOLDER|MODEL", help="A run, an exported model or adapter, or a hub id.", show_default=False
)
PROMPT = typer.Option(metavar="TEXT", help="What is asked.  [default: each line of stdin]")
ANY_SEED = typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of the sampling.  [default: any]")

Name = Annotated[str, NAME]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System message.  [default: the run's]", show_default=False)
]
Base = Annotated[bool, typer.Option("--base", help="Show the base's answer, too: without the adapter.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens of an answer.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token; more varies.")
]
TopP = Annotated[
    float,
    typer.Option(min=1e-6, max=1.0, metavar="P", help="Sample from the likeliest, up to this probability."),
]
TopK = Annotated[int, typer.Option(min=0, metavar="N", help="Sample from so many of the likeliest; 0: all.")]
Penalty = Annotated[float, typer.Option(min=1e-6, metavar="R", help="Above 1 avoids what was said before.")]
Stop = Annotated[list[str], typer.Option(metavar="TEXT", help="Ends the answer; may be repeated.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of the sampling.")]


def generate(
    model: Name,
    prompt: Annotated[str | None, PROMPT] = None,
    system: System = None,
    base: Base = False,
    max_new_tokens: MaxNewTokens = 100,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = [],
    seed: Seed = 0,
) -> None:
    r"""Let a model answer a prompt, or each line of stdin by itself.

    An answer to a line is one line: its line breaks are written as \n. A model without a chat
    template continues the text.
    """
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, tuple(stop), seed)
    conversation = _open(model, sampling, system, base)
    asked = prompt
    for asked in [prompt] if prompt is not None else _lines():
        if prompt is None and not asked.strip():
            say("note: an empty line is not answered")
            continue
        for label, answer in conversation.answers(asked):
            with stdout_to_stderr():
                text = printable("".join(answer)).rstrip()
            if not text:
                _explain_silence(answer.tokens, sampling)
            print(label + (text if prompt is not None else text.replace("\n", "\\n")), flush=True)
    if asked is None:
        fix = "--prompt TEXT, or a prompt in each line of stdin"
        raise JobError("there is no prompt: stdin is empty", where="shardwise generate", fix=fix)


def chat(
    model: Name,
    system: System = None,
    base: Base = False,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = [],
    seed: Annotated[int | None, ANY_SEED] = None,
) -> None:
    """Talk to a model. It hears what was said before, as far as its length allows.

    /reset forgets it, /system TEXT changes the system message, /base shows the base's answers,
    too, /exit or Ctrl-D ends. Ctrl-C ends an answer. Where stdin is no terminal, each line is a
    message.
    """
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, tuple(stop), seed)
    conversation = _open(model, sampling, system, base)
    terminal = sys.stdin.isatty()
    if terminal:
        say(f"{model}: /reset, /system TEXT, /base, /exit; Ctrl-C ends an answer")
    for line in _typed() if terminal else _lines():
        try:
            if line.startswith("/"):
                if line.split()[0] == "/exit":
                    return
                say(conversation.command(line))
            elif line.strip():
                _speak(conversation, line)
        except ShardwiseError as error:
            if not terminal and not line.startswith("/"):
                raise
            say(render(error))


def serve(model: Name, host: Host = "127.0.0.1", port: Port = 8000, token: Token = None) -> None:
    """Answer programs that speak OpenAI's API, on this machine.

    /v1/chat/completions and /v1/completions, as streams or at once, and /v1/models. Requests are
    answered one after another. Ctrl-C ends it.
    """
    say(f"loading {model}")
    from shardwise.app.models import serve as answer

    answer(model, host=host, port=port, token=token, show=say)


def _open(model: str, sampling: Sampling, system: str | None, compare: bool) -> "Conversation":
    with stdout_to_stderr(), progress(f"loading {model}"):
        from shardwise.app.models import open_conversation

        return open_conversation(model, sampling, system=system, compare=compare, note=say)


def _speak(conversation: "Conversation", asked: str) -> None:
    """Show the answers as they come; Ctrl-C ends the one that comes now."""
    said = ""
    try:
        for label, answer in conversation.answers(asked):
            said = ""
            print(label, end="", flush=True)
            try:
                for piece in answer:
                    said += piece
                    print(printable(piece), end="", flush=True)
            except KeyboardInterrupt:
                answer.close()
            print(flush=True)
    except KeyboardInterrupt:  # before its first word
        print(flush=True)
        return
    conversation.remember(asked, said)


def _typed() -> Iterator[str]:
    """Lines typed at a prompt, with its history; Ctrl-C begins the line again."""
    import readline  # noqa: F401  (gives `input` its keys)

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _lines() -> Iterator[str]:
    """Lines of stdin; bytes that are no text are refused where they are used."""
    if sys.stdin.isatty():
        say("reading lines of stdin; Ctrl-D ends")
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def _explain_silence(tokens: int, sampling: Sampling) -> None:
    what = f"the output contains no visible text (tokens: {tokens})"
    if tokens == 1 < sampling.max_new_tokens:
        what = "the model ended the text at once"
    fix = "try a prompt like the training data, or --temperature 0.8; if neither helps, train longer"
    say(f"note: {what}\n  fix: {fix}")
