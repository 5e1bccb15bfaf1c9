"""What a script says in addition to a Trainer's arguments: data, optimizer, loop, DeepSpeed settings."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import Document, Mark, line_at
from shardwise.lint.schema import names
from shardwise.lint.script_text import LORA, assigned_once, literal, name_as_imported, name_of

CONFIGURATIONS = ("config", "config_params", "deepspeed")  # arguments that take DeepSpeed's settings
_KEYS = {"r": LORA, "model": "model_name_or_path"}  # of LoraConfig and TRL's trainers
_PART = {"DataLoader": "dataset", "load_dataset": "split"}
_HELD_OUT = re.compile(r"(?i)(?<![a-z])(eval|val|test|dev)")
_BUILDERS = ("json", "parquet", "text", "csv", "arrow")  # load_dataset's words for kinds of files
_LABELS = re.compile(r"labels\W{0,4}[=:][^=\n]*input_ids")


class Settings:
    """The first value of each setting, `call.argument`, and its line; only the line of what a run knows."""

    def __init__(self, document: Document, calls: Mapping[str, str]) -> None:
        self.document, self.calls = document, calls
        self.values, self.marks = dict[str, Any](), dict[Key, Mark]()
        self.configurations = list[ast.Dict]()
        name_as_imported(program := ast.parse(document.text))
        self.known = _known(program)
        for node in sorted(ast.walk(program), key=lambda node: getattr(node, "lineno", 0)):
            self._take(node)
        if labels := _LABELS.search(document.text):
            masked = "labels(-100)" if "-100" in document.text else "labels()"
            self._put((masked,), ast.Constant(True), line_at(document.text, labels.start()))

    def documents(self) -> Iterator[Document]:
        """The script with these settings, and each DeepSpeed configuration that is written in it."""
        one = self.document
        given = {
            key: v for key, v in one.values.items() if not isinstance(v, Mapping) and (key,) not in self.marks
        }
        marks = {key: mark for key, mark in one.marks.items() if key[0] in given} | self.marks
        yield replace(one, values={**given, **self.values}, marks=marks)
        for node in self.configurations:
            self.values, self.marks = {}, {}
            self._put((), node)
            yield replace(one, values=self.values, marks=self.marks, kind="deepspeed", uses=frozenset())

    def _take(self, node: ast.AST) -> None:
        """Calls, `for epoch in range(3)`, and `if (i + 1) % 8 == 0: optimizer.step()`, which accumulates."""
        match node:
            case ast.Call():
                self._call(node, name_of(node.func).rpartition(".")[2])
            case ast.For(target=ast.Name(id=name), iter=ast.expr() as over) if "epoch" in name:
                for call in ast.walk(over):
                    if isinstance(call, ast.Call) and name_of(call.func) == "range" and len(call.args) == 1:
                        self._put(("range(epochs)",), call.args[0])
            case ast.If(test=test, body=body) if ".step()" in "".join(map(ast.unparse, body)):
                for one in ast.walk(test):
                    if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                        self._put(("accumulation",), one.right)

    def _call(self, call: ast.Call, last: str) -> None:
        given = {one.arg or "**": one.value for one in call.keywords}
        if last == "from_pretrained" and "Model" in (place := ast.unparse(call.func)) and call.args:
            self._put(("model_name_or_path",), call.args[0])
            if task := re.search(r"For(?!CausalLM)[A-Z]\w+", place):
                self._put(("model_class",), ast.Constant(task[0]), call.lineno)
        for name, node in given.items() if last in names("calls") else ():
            if name in CONFIGURATIONS and isinstance(found := self._resolved(node), ast.Dict):
                self.configurations.append(found)
            elif name == "**":
                self._put((name, last), ast.Constant(True), call.lineno)
            elif last != "initialize" or name in CONFIGURATIONS:
                self._put((_KEYS.get(name, name),), node)
        if last not in self.calls and "max_length" in given and {"truncation", "padding"} & given.keys():
            last = "tokenizer"
        given = dict(zip(self.calls.get(last, "").split(), call.args, strict=False)) | given
        part = given.get(_PART.get(last, ""))
        if last not in self.calls or (part is not None and _HELD_OUT.search(ast.unparse(part))):
            return
        if last == "load_dataset" and "path" in given and literal(given["path"]) in _BUILDERS:
            del given["path"]
            if part is not None and literal(given.pop("split")) != "train":
                given["part"] = part  # which a job has not of files
        self._put((f"{last}()",), ast.Constant(True), call.lineno)
        for name, node in given.items():
            self._put((last, name), node)

    def _put(self, key: Key, node: ast.expr, line: int | None = None) -> None:
        """Keep the value of a key, or of each key in a mapping; of several calls the first counts."""
        found, mark = self._resolved(node), Mark(line=line or node.lineno)
        # `args.lr`, which only a run knows, and not `torch.float16`.
        run = isinstance(found, ast.Attribute) and not re.match("torch|[A-Z]", ast.unparse(found))
        value = None if run or isinstance(found, ast.Dict) else literal(found)
        self.marks.setdefault(key, mark)
        if isinstance(found, ast.Dict):  # the last of a key counts
            pairs = {literal(k): (k.lineno, v) for k, v in zip(found.keys, found.values, strict=True) if k}
            for name, (at, inner) in pairs.items():
                self._put((*key, str(name)), inner, at)
        elif value is not None:
            holder = self.values
            for above in key[:-1]:
                holder = holder.setdefault(above, {})
            self.marks[key] = self.marks[key] if key[-1] in holder else mark
            holder.setdefault(key[-1], list(value) if isinstance(value, tuple) else value)

    def _resolved(self, node: ast.expr) -> ast.expr:
        """The value of a name, or of `args.name` (`.name`), and of a name of a name."""
        for _ in range(3):
            name = node.id if isinstance(node, ast.Name) else f".{getattr(node, 'attr', '')}"
            node = self.known.get(name, node)
        return node


def _known(program: ast.Module) -> dict[str, ast.expr]:
    """What names stand for that get one value: variables, a parser's flags by default, fields of classes."""
    known, fields = assigned_once(program), defaultdict[str, list[ast.expr]](list)
    for node in ast.walk(program):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=key)], value=value):
                if isinstance(held := known.get(name), ast.Dict):
                    held.keys.append(key)
                    held.values.append(value)
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[*_, ast.Constant(value=flag)]):
                name = f".{str(flag).lstrip('-').replace('-', '_')}"
                fields[name] += [one.value for one in node.keywords if one.arg == "default"]
            case ast.ClassDef(body=body):
                for one in body:
                    if isinstance(one, ast.Assign | ast.AnnAssign) and one.value:
                        target = one.targets[0] if isinstance(one, ast.Assign) else one.target
                        made = one.value.keywords if isinstance(one.value, ast.Call) else []
                        inner = [part.value for part in made if part.arg == "default"]  # of `field(...)`
                        fields[f".{ast.unparse(target)}"] += inner or [one.value]
    return known | {name: values[0] for name, values in fields.items() if len(values) == 1}
