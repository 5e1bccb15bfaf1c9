"""What a script says: arguments of calls; for a job also of its data, optimizer and loop."""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document, Mark
from shardwise.lint.schema import deepspeed_schema, names
from shardwise.lint.script_inputs import Inputs, fields, name_of
from shardwise.lint.script_loops import of_loop
from shardwise.lint.script_names import Said, derived_of, name_as_imported, nested, never_read
from shardwise.lint.script_optimizers import BY_STEP, OWN_GROUPS, of_all, of_groups, prepared
from shardwise.lint.script_rates import is_constant, of_rates
from shardwise.lint.script_rows import Rows
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.script_values import ARGUMENTS, Values

LORA = "lora_rank"  # the key for `LoraConfig(r=...)`
CONFIGURATIONS = ("config", "config_params", "deepspeed", "hf_ds_config")  # take DeepSpeed's settings
_INITIALIZE = ("args", "model", "optimizer", "model_parameters", "training_data")  # in the order of its call
_KEYS = {"r": LORA, "model": "model_name_or_path"}  # of LoraConfig and TRL's trainers
_COPIES = ("copy", "deepcopy", "replace")
_OWN = ("TrainingArguments", "SFTConfig")
_CALLS = frozenset(names("calls"))
ARGUMENT_CLASSES = (*names("trainers_arguments"), *names("trl_arguments"))
"""Of the Trainer's arguments, and of TRL's."""
_PART = {"DataLoader": "dataset", "load_dataset": "split"}
_DDP = "DistributedDataParallel()"
_SHARDED = ("FullyShardedDataParallel()", "fully_shard()")
_HELD_OUT = re.compile(r"(?i)(?<![a-z])(eval|val|test|dev)")
LEARNS = re.compile(r"\.backward\(|rainer\w*\b.*\.(train|fit)\(")  # what a script does that trains
_SEEDS_ALL = re.compile(r"(torch\.(\w+\.)?)?manual_seed")
_STEPS = {"num_warmup_steps", "num_training_steps"}  # of a schedule
_LIBRARIES = sys.stdlib_module_names | {*names("libraries")}
_BUILDERS = ("json", "parquet", "text", "csv", "arrow")  # load_dataset's words for kinds of files
_MODEL = re.compile(r"Model|For[A-Z]\w*\.")  # a class of models, and not of tokenizers
_FIELD = re.compile(r"(?<![.\w])\w+\['(\w+)'\](?! =)")  # `row['question']`


class Settings:
    """The first value of each setting and its line; only the line of what a run knows.

    `calls`: with the names of their first arguments, those whose arguments are settings `call.argument`
    of a job. With them, flags and fields have their defaults, and `keys` are attributes that are settings.
    """

    def __init__(
        self,
        text: str,
        calls: Mapping[str, str] = MappingProxyType({}),
        keys: Collection[str] = (),
        inputs: Inputs | None = None,
    ) -> None:
        name_as_imported(program := ast.parse(text))
        self.calls = calls
        self._inputs = inputs or Inputs()
        self.known = Values(program, self._inputs if calls else None)
        self.values, self.marks, self.uses = dict[str, Any](), dict[Key, Mark](), set[str]()
        self.configurations = list[Document]()  # of DeepSpeed, in dicts
        self.plugins = list[tuple[int, dict[str, Any]]]()  # of Accelerate, and their lines
        self._branch, self._maybe = False, dict[Key, Any]()  # what only branches say
        self._node, self._nodes = ast.AST(), defaultdict[Key, list[ast.AST]](list)  # of the calls that do
        self.trainings = list[int]()  # the lines of several
        nodes = sorted(ast.walk(program), key=lambda node: getattr(node, "lineno", 0))
        made = [one for one in nodes if isinstance(one, ast.Call)]
        given = (k for one in made if _last(one) in ("Trainer", "Fabric") for k in one.keywords)
        self.strategies = {self.known.meant(k.value) for k in given if k.arg == "strategy"}  # Lightning's
        self.rows = Rows(nodes, self.known)
        self.rows.learn = bool(self._inputs.others or LEARNS.search(text) or "Trainer(" in text)
        own = {one.name for one in nodes if isinstance(one, ast.ClassDef)}
        # a job is of no other method of TRL's than SFT
        trainers = {*ARGUMENT_CLASSES, *derived_of(program, ARGUMENT_CLASSES)} if not calls else set[str]()
        self._arguments_of = _CALLS | trainers
        froms = [one for one in nodes if isinstance(one, ast.ImportFrom)]
        froms = [one for one in froms if one.level or str(one.module).partition(".")[0] not in _LIBRARIES]
        self._theirs = {alias.name for one in froms for alias in one.names}  # which a file makes
        trainers = {*names("trainers")} - own if calls else set[str]()
        self._prepared = bool(calls) and BY_STEP.search(text) is not None
        self._loops = not trainers & {*map(_last, made)}  # else those of a callback train nothing
        if calls:
            self._put(self._later_arguments(keys))
        trains = [one for one in made if calls and _trains(one) and self.known.runs(one)]
        after = self.known.flow.after(trains)
        scopes = [[*self.known.flow.scopes(one)] for one in trains]
        functions = {one[0] for one in scopes if not any(isinstance(part, ast.ClassDef) for part in one)}
        if after & {*trains} or len(functions) > 1:
            self.trainings = [one.lineno for one in trains]
        others = map(ast.unparse, self._inputs.others.values() if LEARNS.search(text) else ())
        idle = {*never_read(nodes, " ".join(others))} if calls and LEARNS.search(text) else set[ast.Call]()
        self._put({(f"idle {_last(one)}",): (one.lineno, True) for one in idle})
        after |= idle
        for node in nodes:
            if node not in after:  # what follows the training decides nothing of it
                self._take(node)
        if (_DDP,) in self._maybe and not any((one,) in self._maybe for one in _SHARDED):
            self.values[_DDP] = True  # the branch is that of several processes
        scratch = self.rows.scratch() if calls and ("model_name_or_path",) not in self.marks else {}
        self._put(scratch)
        if calls:
            self._put(of_rates(nodes, self.known) | self.rows.drawn())
            self._put(self.rows.splits() or self.rows.held_out())
            self._put(self.rows.labels(text, self.values, self.uses, loops=self._loops))
            self._put(self.rows.cut({one[0] for one in self.marks}))
            if not any(one[0].startswith("text by") or one == ("formatting_func",) for one in self.marks):
                self._put(self.rows.prompts(after))

    def _later_arguments(self, keys: Collection[str]) -> Said:
        """Settings of arguments that a parser or a function elsewhere makes: `training_args.bf16 = True`."""
        said = Said()
        for name, line, value in self.known.stored(ARGUMENTS):
            if name in keys:
                said |= self.known.entries(value, (name,), line) if value else {(name,): (line, UNKNOWN)}
        return said

    def _take(self, node: ast.AST) -> None:
        """Calls, `for epoch in range(3)`, and `if (i + 1) % 8 == 0: optimizer.step()`, which accumulates."""
        match node:
            case ast.Call() if self.calls and not (self.known.runs(node) and self._of_a_library(node)):
                pass
            case ast.Call() if self.calls and is_constant(node):
                self._put({("lr_scheduler_type",): (node.lineno, "constant")})
            case ast.Call():
                self._branch = bool(self.calls) and not self.known.flow.certain(node)
                self._node = node
                self._call(node, self._called(node))
                self._branch = False
            case ast.Assign() | ast.Return() | ast.keyword() | ast.Subscript() if self.calls:
                self._put(self.rows.chosen(node))
            case ast.For() | ast.While() if self._loops:
                self._put(of_loop(node, self.known, of_a_job=bool(self.calls)))
            case ast.If(test=test, body=body) if self._loops and ".step()" in "".join(map(ast.unparse, body)):
                for one in ast.walk(test):
                    if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                        self._put(self.known.entries(one.right, ("accumulation",)))
            case ast.ClassDef(name=name, bases=bases) if any(
                ast.unparse(b).endswith("Dataset") for b in bases
            ):
                read = dict.fromkeys(_FIELD.findall(ast.unparse(node))).keys() - {*names("shape_fields")}
                made_of = (node.lineno, ", ".join(sorted(read)))  # the class makes a text of them
                self._put({(f"text by {name}",): made_of} if read and self.calls else {})
            case ast.ClassDef(bases=bases) if any(ast.unparse(one).endswith(_OWN) for one in bases):
                fields_ = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
                used = self.calls and self.known.used(node)  # as HfArgumentParser's
                for field, value in (one for one in fields(node) if used and one[0] in fields_):
                    self._put(self.known.entries(self._inputs.flag([field]) or value, (field,), value.lineno))

    def _called(self, call: ast.Call) -> str:
        """The last part of a call's name; for a job also what a name of the script's own stands for."""
        last = _last(call)
        if not self.calls or last in self.calls or not isinstance(call.func, ast.Name):
            return last
        made = self.known.meant(call.func)
        either = [made.body, made.orelse] if isinstance(made, ast.IfExp) else [made]
        names_ = [name_of(one).rpartition(".")[2] for one in either]
        return next((one for one in names_ if one in self.calls), last)

    def _of_a_library(self, call: ast.Call) -> bool:
        """Whether a class of the script's own is not called; a subclass of a trainer is one."""
        made = self.known.meant(call.func)
        bases = made.bases if isinstance(made, ast.ClassDef) else []
        own = isinstance(made, ast.ClassDef) and name_of(call.func).endswith("Trainer")
        return not own or any(ast.unparse(one).endswith("Trainer") for one in bases)

    def _call(self, call: ast.Call, last: str) -> None:
        self.uses.add(called := name_of(call.func))
        formats = [one.value for one in call.keywords if one.arg == "formatting_func"]
        for one in call.args[:1] if last in ("map", "filter") else formats:
            if self.calls:
                self._put(self.rows.text_by(one, "filter" if last == "filter" else "text"))
        makers = [one.value for one in call.keywords if last == "DataLoader" and one.arg == "collate_fn"]
        makers += call.args[:1] if last == "map" else []
        if self.calls and any(map(self._unseen, makers)):
            self._put({("unseen_function()",): (call.lineno, UNKNOWN)})
        if last in names("trainers") and self.calls:
            self._collator(call)
            self._made_elsewhere(call, "SFTConfig" if last.startswith("SFT") else "TrainingArguments")
        said = self._given(call, last)
        if more := said.pop(("**",), None):
            self.uses |= {f"{called}(**)"} if last in self._arguments_of else set()
            self._put({("**", last): more} if self.calls else {})
        said = self._configured(called, said)
        if last == "get_peft_model" and re.match(r"Fast\w*Model\.", called):
            said.setdefault(("r",), (call.lineno, 16))
        if self.calls and last == "get_peft_model" and ("r",) in said:  # Unsloth's, with LoRA's arguments
            self.marks.setdefault(("LoraConfig",), Mark(line=call.lineno))
            self._put({(_KEYS.get(name, name), *below): v for (name, *below), v in said.items()})
        elif last in self._arguments_of or last in ("Trainer", "Seq2SeqTrainer", "Fabric"):
            self._arguments(call, called, said)
        else:
            self._of_a_job(call, last, said)

    def _collator(self, call: ast.Call) -> None:
        """Of a trainer: one of the script's own decides which tokens the loss counts."""
        given = next((one.value for one in call.keywords if one.arg == "data_collator"), None)
        made = self.known.meant(given) if given else None
        name = name_of(made.func) if isinstance(made, ast.Call) else getattr(made, "name", "")
        if not isinstance(made, ast.Constant | None) and name.rpartition(".")[2] not in names("collators"):
            self._put({("own_collator()",): (call.lineno, UNKNOWN)})

    def _unseen(self, given: ast.expr) -> bool:
        """Whether a function that no file shows makes the rows: `collate_fn=make_collator(tok)`."""
        made = self.known.meant(given)
        called = [one for one in ast.walk(made) if isinstance(one, ast.Name) and one.id in self._theirs]
        return any(self.known.meant(one) is one for one in called)

    def _made_elsewhere(self, call: ast.Call, kind: str) -> None:
        """Of a trainer: arguments that a function makes which no script shows."""
        given = next((one.value for one in call.keywords if one.arg == "args"), [*call.args, None, None][1])
        made = self.known.meant(given) if given else None
        name = self.known.meant(made.func) if isinstance(made, ast.Call) else None
        if isinstance(name, ast.Name) and name.id[:1].islower() and name.id not in _COPIES:
            self._put({("**", kind): (call.lineno, UNKNOWN)})

    def _given(self, call: ast.Call, last: str) -> Said:
        """The arguments of a call, by name and by place, and those that are set later."""
        places = self.calls.get(last, "").split()
        if last == "clip_grad_norm_" and len(call.args) == 1:  # FSDP's own: `model.clip_grad_norm_(1.0)`
            places = places[1:]
        if last == "manual_seed" and not _SEEDS_ALL.fullmatch(ast.unparse(call.func)):
            places = []  # of a generator of the script's own
        said = self.known.arguments(call)
        given = {key[0] for key in said}
        for name, value in zip(places, call.args, strict=False):
            if name not in given and not isinstance(value, ast.Starred):
                said |= self.known.entries(of_all(value, self.known) if name == "seed" else value, (name,))
        if call.args and places[:1] == ["params"]:
            said |= of_groups(call.args[0], said, self.known)
            self._put({key: said.pop(key) for key in [OWN_GROUPS] if key in said})
        if last in self._arguments_of or last in self.calls:
            for name, after in self.known.later(call):
                said = {key: one for key, one in said.items() if key[0] != name}
                said |= self.known.entries(after, (name,)) if after else {(name,): (call.lineno, UNKNOWN)}
        return said

    def _configured(self, called: str, said: Said) -> Said:
        """Take DeepSpeed's settings, where the arguments have them as a dict."""
        last = called.rpartition(".")[2]
        own = called == "deepspeed.initialize" or last == "DeepSpeedStrategy"
        ours = CONFIGURATIONS[2:] if last.endswith(("Arguments", "Config", "Plugin")) else ()
        ours = CONFIGURATIONS[:2] if own else ours
        for name in (one for one in ours if said.get((one,), (0, None))[1] == {}):
            held = {key[1:]: v for key, v in said.items() if key[0] == name}
            made = _configuration(held, of_a_job=bool(self.calls))
            if made and made not in self.configurations:
                self.configurations.append(made)
            if self.calls:
                open_ = {} if made else {(name,): (said[name,][0], UNKNOWN)}
                said = {key: v for key, v in said.items() if key[0] != name} | open_
                said |= {("configured",): (held[()][0], True)} if made else {}
        return said

    def _of_a_job(self, call: ast.Call, last: str, said: Said) -> None:
        """Of the calls whose arguments are settings `call.argument`."""
        named = said.get(("pretrained",), (0, None))  # of any library's class of models
        if isinstance(named[1], str) and named[1] != UNKNOWN and "Tokenizer" not in last:
            self._put({("model_name_or_path",): named})
        last = "DataModule" if last.endswith("DataModule") else last
        last = "apply_activation_checkpointing" if re.match(r"apply_\w*checkpointing$", last) else last
        flat = {key[0] for key in said}
        if last not in self.calls and "max_length" in flat and {"truncation", "padding"} & flat:
            last = "tokenizer"
        given = dict(zip(self.calls.get(last, "").split(), call.args, strict=False))
        given |= {one.arg: one.value for one in call.keywords if one.arg}
        self._put(self.rows.of_file(call, last) if self.calls else {})
        part = given.get(_PART.get(last, ""))
        if part is not None and _HELD_OUT.search(ast.unparse(part)):
            if self.calls:
                self._put({("eval_dataset",): (call.lineno, UNKNOWN)})
            return
        if last not in {"tokenizer": "", **self.calls}:
            return
        chosen = {one for one in self.strategies if isinstance(one, ast.Call)}
        if last.endswith("Strategy") and chosen and call not in chosen:
            return
        if last == "load_dataset" and said.get(("path",), (0, ""))[1] in _BUILDERS:
            del said["path",]
            if part is not None and (split := said.pop(("split",)))[1] != "train":
                said["part",] = split  # which a job has not of files
        file = said.get(("config",), (0, None))[1]
        if last == "DeepSpeedStrategy" and (("configured",) in said or isinstance(file, str)):
            said = {("config",): said["config",]} if isinstance(file, str) else {}
            self._put(said)  # the file or dict says all; the arguments count for nothing
            return
        if (warmup := given.get("num_warmup_steps")) and (share := self._share(warmup)):
            del said["num_warmup_steps",]
            self._put({("warmup_ratio",): (call.lineno, share)})
        for name in _STEPS & given.keys() if self._prepared else ():
            said |= prepared(given[name], name, self.known, self._inputs.environment)
        wraps = [one for one in said if one[0].startswith("activation_checkpointing")]  # Lightning's classes
        said |= {one: (said[one][0], True) for one in wraps}
        self._put({(f"{last}()",): (call.lineno, True)} | {(last, *key): v for key, v in said.items()})

    def _share(self, warmup: ast.AST) -> float | None:
        """The known share of a number of steps that is not known: `int(0.05 * total)`."""
        sums = [one for one in ast.walk(self.known.meant(warmup)) if isinstance(one, ast.BinOp)]
        open_ = [one for one in sums if isinstance(one.op, ast.Mult) and self.known.value(one) == UNKNOWN]
        sides = [self.known.value(side) for one in open_ for side in (one.left, one.right)]
        return next((one for one in sides if isinstance(one, float) and 0 < one < 1), None)

    def _arguments(self, call: ast.Call, called: str, said: Said) -> None:
        """Of the calls whose arguments are settings of their own."""
        last, place = called.rpartition(".")[2], ast.unparse(call.func)
        said.pop(("configured",), None)
        if self.calls and said.get(("eval_dataset",), (0, UNKNOWN))[1] is None:
            said["eval_strategy",] = said.pop(("eval_dataset",))[0], "no"
        if last == "from_pretrained":
            said.pop(("config",), None)  # the model's
        self.marks.setdefault((last,), Mark(line=call.lineno))
        if last == "from_pretrained" and call.args:
            one = self.known.entries(call.args[0], ("model_name_or_path",))
            said |= one if _MODEL.search(place) or not self.calls else {}
            _, source = one["model_name_or_path",]
            if self.calls and "Tokenizer" in place and isinstance(source, str) and source != UNKNOWN:
                self._put({("tokenizer_name",): (call.lineno, source)})
            task = re.search(r"For(?!CausalLM)[A-Z]\w+", place)
            said |= {("model_class",): (call.lineno, task[0])} if task else {}
        if self.calls and last == "from_pretrained" and re.match(r"Fast\w*Model\.", place):
            self._put({("FastModel()",): (call.lineno, True)})
        known = last in self._arguments_of or self.calls
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
        for key, (line, found) in given.items():
            value, holder = found, cast(Any, self.values)
            for above in key[:-1]:
                holder = holder.setdefault(above, {}) if isinstance(holder, dict) else None
            first = key[-1] in holder if isinstance(holder, dict) else True
            maybe = self._maybe.get(key)
            if maybe is not None and value in (maybe, None, UNKNOWN, {}) and line != self.marks[key].line:
                self._nodes[key].append(self._node)
                all_ = not self._branch or self.known.flow.covered(self._nodes[key])
                first = value != maybe or not all_  # what each branch says, or one and the rest, is certain
            elif not first and self._branch and value not in (None, UNKNOWN, {}) and key not in self.marks:
                self._maybe[key], value = value, UNKNOWN
                self._nodes[key].append(self._node)
            unsaid = value is None and key != ("max_length",)  # without which no row is cut
            if first or (self.calls and (unsaid or (key in self.marks and value != maybe))):
                continue
            if value in (None, UNKNOWN):
                self.marks.setdefault(key, Mark(line=line))
            else:
                self.marks[key], holder[key[-1]] = Mark(line=line), {} if value == {} else value


def _trains(call: ast.Call) -> bool:
    """Whether it is `trainer.train()`, or Lightning's `trainer.fit()`."""
    return isinstance(call.func, ast.Attribute) and bool(
        re.search(r"(?is)trainer\w*(\(.*\))?\.(train|fit)\(", ast.unparse(call))
    )


def _last(call: ast.Call) -> str:
    return name_of(call.func).rpartition(".")[2]


def open_value(key: Key) -> Any:
    """What a key of DeepSpeed has where only a run knows it."""
    section = deepspeed_schema().sections.get(key)
    return {"enabled": AUTO} if section and "enabled" in section.keys else AUTO


def _configuration(said: Said, *, of_a_job: bool) -> Document | None:
    """DeepSpeed's, of a mapping; None where only a run knows its keys, or for a job its stage."""
    sections, zero = deepspeed_schema().sections.keys(), "zero_optimization"
    lines = {key: line for key, (line, value) in said.items() if value == UNKNOWN}
    unknown = {key: (at, open_value(key)) for key, at in lines.items()}
    if unknown.keys() & ({(), (zero,), (zero, "stage")} if of_a_job else sections):
        return None
    first, marks = said[()][0], {key: Mark(line=line) for key, (line, _) in said.items() if key}
    made = Document(name="", text="", syntax="python", values=nested(said | unknown), marks=marks)
    return replace(made, first=first, unknown=frozenset(unknown))
