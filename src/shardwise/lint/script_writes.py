"""The files that a script writes, as far as its text shows their names."""

import ast
from collections.abc import Callable, Iterator

from shardwise.lint.script_inputs import name_of

_SAVES = ("save", "copy", "copyfile", "copy2", "move")  # OmegaConf's and shutil's: to their last argument
_NAMED_PATHS = ("with_suffix", "with_name", "joinpath", "join", "Path", "str", "abspath", "expanduser", "format")


def endings(program: ast.Module, meant: Callable[[ast.AST], ast.AST]) -> Iterator[str]:
    """How the names of these files end; empty where only a run knows."""
    for call in (one for one in ast.walk(program) if isinstance(one, ast.Call)):
        last, by = name_of(call.func).rpartition(".")[2], getattr(call.func, "value", None)
        path = (*call.args[:1], None)[0] if isinstance(call.func, ast.Name) else by
        modes = [*call.args, *(one.value for one in call.keywords)]
        texts = [one.value for one in modes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        opens = last == "open" and any(one[:1] in "wxa" and one.strip("wxab+t") == "" for one in texts if one)
        if (opens or last in ("write_text", "write_bytes")) and path:
            yield _ending(path, meant)
        elif last in _SAVES and len(call.args) > 1 and (end := _ending(call.args[-1], meant)):
            yield end  # of weights most paths are not known


def _ending(node: ast.AST, meant: Callable[[ast.AST], ast.AST]) -> str:
    """The end of the text that an expression makes."""
    match meant(node):
        case ast.Constant(value=str(text)):
            return text.rpartition("/")[2]
        case ast.JoinedStr(values=[*_, last]) | ast.BinOp(op=ast.Add() | ast.Div(), right=last):
            return _ending(last, meant)
        case ast.Call(func=ast.Attribute(attr="format", value=ast.Constant(value=str(text)))):
            return text.rpartition("}")[2]
        case ast.Call(func=called, args=[*_, last]) if name_of(called).rpartition(".")[2] in _NAMED_PATHS:
            return _ending(last, meant)
    return ""
