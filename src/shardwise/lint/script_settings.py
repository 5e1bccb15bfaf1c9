"""What a script says: arguments of calls; for a job also of its data, optimizer and loop."""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document, Mark, line_at
from shardwise.lint.schema import deepspeed_schema, names
from shardwise.lint.script_values import UNKNOWN, Said, Values, fields, name_as_imported, name_of, nested

LORA = "lora_rank"  # the key for `LoraConfig(r=...)`
CONFIGURATIONS = ("config", "config_params", "deepspeed", "hf_ds_config")  # take DeepSpeed's settings
_INITIALIZE = ("args", "model", "optimizer", "model_parameters", "training_data")  # in the order of its call
_KEYS = {"r": LORA, "model": "model_name_or_path"}  # of LoraConfig and TRL's trainers
_OWN = ("TrainingArguments", "SFTConfig")
_PART = {"DataLoader": "dataset", "load_dataset": "split"}
_HELD_OUT = re.compile(r"(?i)(?<![a-z])(eval|val|test|dev)")
_BUILDERS = ("json", "parquet", "text", "csv", "arrow")  # load_dataset's words for kinds of files
_LABELS = re.compile(r"labels\W{0,4}[=:][^=\n]*input_ids")
_SCHEDULE = re.compile(r"(?i)sched\w*(\.step\(|\s*=\s*[\w.]+\()")
_PAIRS = re.compile(r"[\"']completion[\"']\s*:|rename_columns?\([^)]*[\"']completion[\"']")


class Settings:
    """The first value of each setting and its line; only the line of what a run knows.

    `calls`: with the names of their first arguments, those whose arguments are settings `call.argument`
    of a job. With them, flags and fields have their defaults.
    """

    def __init__(self, text: str, calls: Mapping[str, str] = MappingProxyType({})) -> None:
        name_as_imported(program := ast.parse(text))
        self.calls, self.known = calls, Values(program, defaults=bool(calls))
        self.values, self.marks, self.uses = dict[str, Any](), dict[Key, Mark](), set[str]()
        self.configurations = list[Document]()  # of DeepSpeed, in dicts
        self.tokenizer = Said()  # where only it names the model
        self.plugins = list[tuple[int, dict[str, Any]]]()  # of Accelerate, and their lines
        for node in sorted(ast.walk(program), key=lambda node: getattr(node, "lineno", 0)):
            self._take(node)
        self._put(self.tokenizer)
        trl = "SFTTrainer" in text and "completion_only_loss" not in self.values
        if calls and trl and (pairs := _PAIRS.search(text)):
            self._put({("completion()",): (line_at(text, pairs.start()), True)})
        if calls and (labels := _LABELS.search(text)):
            masked = "labels(-100)" if "-100" in text else "labels()"
            self._put({(masked,): (line_at(text, labels.start()), True)})
        if calls and (schedule := _SCHEDULE.search(text)):
            self._put({("scheduler()",): (line_at(text, schedule.start()), UNKNOWN)})

    def _take(self, node: ast.AST) -> None:
        """Calls, `for epoch in range(3)`, and `if (i + 1) % 8 == 0: optimizer.step()`, which accumulates."""
        match node:
            case ast.Call():
                self._call(node, name_of(node.func).rpartition(".")[2])
            case ast.For(target=ast.Name(id=name), iter=ast.expr() as over) if "epoch" in name:
                for call in ast.walk(over):
                    if isinstance(call, ast.Call) and name_of(call.func) == "range" and len(call.args) == 1:
                        self._put(self.known.entries(call.args[0], ("range(epochs)",)))
            case ast.If(test=test, body=body) if ".step()" in "".join(map(ast.unparse, body)):
                for one in ast.walk(test):
                    if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                        self._put(self.known.entries(one.right, ("accumulation",)))
            case ast.ClassDef(bases=bases) if any(ast.unparse(one).endswith(_OWN) for one in bases):
                for field, value in fields(node) if self.calls else ():  # which HfArgumentParser fills in
                    self._put(self.known.entries(value, (field,)))

    def _call(self, call: ast.Call, last: str) -> None:
        self.uses.add(called := name_of(call.func))
        given = dict(zip(self.calls.get(last, "").split(), call.args, strict=False))
        said = self.known.arguments(call)
        for name in given.keys() - {key[0] for key in said}:
            said |= self.known.entries(given[name], (name,))
        if more := said.pop(("**",), None):
            self.uses |= {f"{called}(**)"} if last in names("calls") else set()
            self._put({("**", last): more} if self.calls else {})
        own = called == "deepspeed.initialize" or last == "DeepSpeedStrategy"
        ours = CONFIGURATIONS[2:] if last.endswith(("Arguments", "Config", "Plugin")) else ()
        ours = CONFIGURATIONS[:2] if own else ours
        for name in (one for one in ours if said.get((one,), (0, None))[1] == {}):
            held = {key[1:]: v for key, v in said.items() if key[0] == name}
            made = _configuration(held, of_a_job=bool(self.calls))
            self.configurations += [made] if made and made not in self.configurations else []
            if self.calls:
                open_ = {} if made else {(name,): (said[name,][0], UNKNOWN)}
                said = {key: v for key, v in said.items() if key[0] != name} | open_
        if last in names("calls") or last in ("Trainer", "Seq2SeqTrainer"):
            self._arguments(call, called, said)
            return
        flat = {key[0] for key in said}
        if last not in self.calls and "max_length" in flat and {"truncation", "padding"} & flat:
            last = "tokenizer"
        given |= {one.arg: one.value for one in call.keywords if one.arg}
        part = given.get(_PART.get(last, ""))
        held_out = part is not None and _HELD_OUT.search(ast.unparse(part))
        if held_out and self.calls:
            self._put({("eval_dataset",): (call.lineno, UNKNOWN)})
        if held_out or last not in {"tokenizer": "", **self.calls}:
            return
        if last == "load_dataset" and said.get(("path",), (0, ""))[1] in _BUILDERS:
            del said["path",]
            if part is not None and (split := said.pop(("split",)))[1] != "train":
                said["part",] = split  # which a job has not of files
        self._put({(f"{last}()",): (call.lineno, True)} | {(last, *key): v for key, v in said.items()})

    def _arguments(self, call: ast.Call, called: str, said: Said) -> None:
        """Of the calls whose arguments are settings of their own."""
        last, place = called.rpartition(".")[2], ast.unparse(call.func)
        self.marks.setdefault((last,), Mark(line=call.lineno))
        if last == "from_pretrained" and call.args:
            one = self.known.entries(call.args[0], ("model_name_or_path",))
            said |= one if "Model" in place or not self.calls else {}
            self.tokenizer = self.tokenizer or one
            task = re.search(r"For(?!CausalLM)[A-Z]\w+", place)
            said |= {("model_class",): (call.lineno, task[0])} if task else {}
        known = last in names("calls") or self.calls
        given = {key[0] for key in said if known or key == ("tokenizer",)}
        given |= {*_INITIALIZE[: len(call.args)]} if called == "deepspeed.initialize" else set()
        self.uses |= {f"{called}({name})" for name in given}
        if self.calls and last == "DeepSpeedPlugin" and all(value != UNKNOWN for _, value in said.values()):
            self.plugins.append((call.lineno, nested(said)))
            return
        for (name, *below), (line, value) in said.items():
            unnamed = name == "model" and last.endswith("Trainer") and value == UNKNOWN
            if name in given and not unnamed and (last != "initialize" or name in CONFIGURATIONS):
                self._put({(_KEYS.get(name, name), *below): (line, value)})

    def _put(self, given: Said) -> None:
        """Keep the value of each key; of several calls the first counts."""
        for key, (line, value) in given.items():
            holder: Any = self.values
            for above in key[:-1]:
                holder = holder.setdefault(above, {}) if isinstance(holder, dict) else None
            first = key[-1] in holder if isinstance(holder, dict) else True
            if first or (self.calls and (value is None or key in self.marks)):
                continue
            if value in (None, UNKNOWN):
                self.marks.setdefault(key, Mark(line=line))
            else:
                self.marks[key], holder[key[-1]] = Mark(line=line), {} if value == {} else value


def _configuration(said: Said, *, of_a_job: bool) -> Document | None:
    """DeepSpeed's, of a mapping; None where only a run knows its keys, or for a job its stage."""
    sections, zero = deepspeed_schema().sections.keys(), "zero_optimization"
    lines = {key: line for key, (line, value) in said.items() if value == UNKNOWN}
    unknown = {key: (at, {"enabled": AUTO} if key in sections else AUTO) for key, at in lines.items()}
    if unknown.keys() & ({(), (zero,), (zero, "stage")} if of_a_job else sections):
        return None
    first, marks = said[()][0], {key: Mark(line=line) for key, (line, _) in said.items() if key}
    made = Document(name="", text="", syntax="python", values=nested(said | unknown), marks=marks)
    return replace(made, first=first, unknown=frozenset(unknown))
