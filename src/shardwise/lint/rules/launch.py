"""Launch commands."""

from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit
from shardwise.lint.rules.training import training_rule
from shardwise.lint.setup import Setup
from shardwise.lint.shell_text import LOST_FLAGS, UNKNOWN_FLAG

_RUNNER = "deepspeed/launcher/runner.py"


@training_rule("error", "bash: a command ends at its line, unless the last character is a backslash")
def lost_flags(document: Document, _: Setup) -> Iterator[Hit]:
    """A line break ends the command: the flags below it are a command of their own."""
    if document.has(LOST_FLAGS):
        what = f"the command ends in {document.get(LOST_FLAGS)} and what follows do not reach it, and the "
        what += "shell says `command not found`"
        yield Hit((LOST_FLAGS,), what, "a backslash as the last character of each line but the last")


@training_rule("error", f"{_RUNNER}: parse_args; torch/distributed/run.py; accelerate/commands/launch.py")
def unknown_launcher_flag(document: Document, _: Setup) -> Iterator[Hit]:
    """A flag before the script is the launcher's, which stops at flags that it does not have."""
    if document.has(UNKNOWN_FLAG):
        name = document.get("launcher") + " launch" * (document.get("launcher") == "accelerate")
        fix = "after the script's name if it is the script's, else remove it"
        yield Hit((UNKNOWN_FLAG,), f"`{name}` has no flag `{document.get(UNKNOWN_FLAG)}`: it stops", fix)


@training_rule("error", f"{_RUNNER}: Num nodes is >1 but no extra nodes available via hostfile; --node_rank")
def nodes_without_hostfile(document: Document, _: Setup) -> Iterator[Hit]:
    """The deepspeed launcher knows other machines from a hostfile only, and starts them all by itself."""
    if document.get("launcher") != "deepspeed":
        return
    if (document.number("num_nodes") or 1) > 1 and not (document.has("hostfile") or document.has("H")):
        what = "--num_nodes without --hostfile: unless /job/hostfile exists, deepspeed stops with `Num nodes "
        what += "is >1 but no extra nodes available via hostfile`"
        yield Hit(("num_nodes",), what, "--hostfile FILE with a line `HOST slots=GPUS` for each node")
    if document.has("node_rank") and not document.has("no_ssh"):
        what = "--node_rank is ignored without --no_ssh: each command starts all nodes over ssh"
        yield Hit(("node_rank",), what, "--no_ssh and --hostfile, and the command on each node; or remove it")


@training_rule("error", "deepspeed/launcher/launch.py: -m")
def module_flag_and_file(document: Document, _: Setup) -> Iterator[Hit]:
    """The launcher imports the script as a module."""
    script = document.get("script")
    if document.get("module") in (True, "true") and isinstance(script, str):
        what = f"`--module` requires a module's name, and {script} is a file: ModuleNotFoundError"
        yield Hit(("module",), what, "remove --module")


@training_rule("warning", f"{_RUNNER}: CUDA_VISIBLE_DEVICES")
def visible_devices(document: Document, _: Setup) -> Iterator[Hit]:
    """The launcher sets the variable itself."""
    if document.get("launcher") != "deepspeed" or not document.has("CUDA_VISIBLE_DEVICES"):
        return
    flags = [name for name in ("include", "exclude", "num_gpus", "num_nodes") if document.has(name)]
    if flags:
        what = f"the deepspeed launcher overwrites it if --{flags[0]} is given"
        fix = "--include localhost:0,1 names the GPUs; remove CUDA_VISIBLE_DEVICES"
        yield Hit(("CUDA_VISIBLE_DEVICES",), what, fix)
