"""What a script makes of the rows: their text, and the tokens that the loss counts; for a job."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

from shardwise.folders import packaged
from shardwise.lint.document import line_at
from shardwise.lint.script_inputs import name_of
from shardwise.lint.script_names import Said
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.script_values import Values

_MOST_CALLED = 40  # functions that are read with one
_LONGEST = 90  # characters of a text that are shown
_FIELD = re.compile(r"(?<![.\w])\w+\['(\w+)'\](?! =)")  # `row['question']`
_CHATS = {"messages", "conversations", "text"}  # fields of rows that need no change
_LENGTH = re.compile("(?i)len|block|seq")  # in names of settings
_EMPTY = re.compile(r"empty|['\"]meta['\"]")  # make a model without weights
_CONFIG = re.compile(r"Config\.from_pretrained$")
_HELD_OUT = re.compile(r"(?i)(?<![a-z])(eval|val|test|dev)")
_FILES = ("from_json", "from_csv", "from_parquet", "from_text")
_ROWS = re.compile(r"(?i)(self\.)?(\w*_)?(data|data_?set|rows|examples|samples|records|ds)(_?(list|rows))?")
_PAIR = {"prompt", "completion"}  # as a job reads them
_OF_CHATS = _CHATS | {"role", "content", "from", "value", "input_ids", "attention_mask", "labels"}
_SHAPE = {"d_model", "n_layer", "n_layers", "n_heads", "n_head", "n_embd", "hidden_size", "vocab_size"}
_SEEN = {name: re.compile(words) for name, words in packaged("lint/foreign.toml")["seen"].items()}
_WORDS = packaged("lint/foreign.toml")["row_words"]
_TOKENS, _CUT = re.compile(_WORDS["tokens"]), re.compile(_WORDS["cut"])
_TEMPLATE, _PROMPT, _NO_TEXT, _PRINTS, _IGNORED, _PART, _MODEL, _LOADED, _MOVED, _BUILT, _MAKES, _PLACE = (
    re.compile(_WORDS[name]) for name in (
        "template", "prompt", "no_text", "prints", "ignored", "part", "model", "loaded", "moved", "built",
        "makes_prompt", "place",
    )
)  # fmt: skip
_OPEN = (
    "pieces()",
    "scheduler()",
    "eval_dataset",
    "loss_mask()",
    "labels by value",
)  # of these, those that say no more


class Rows:
    """`nodes`: all of a script, in the order of lines."""

    def __init__(self, nodes: Sequence[ast.AST], known: Values) -> None:
        self._nodes, self._known = nodes, known
        self.learn = True  # whether the script, or another one that is named, trains
        inner = [one for held in nodes if isinstance(held, ast.ClassDef) for one in held.body]
        self._methods = {f"self.{one.name}": one for one in inner if isinstance(one, ast.FunctionDef)}

    def _function(self, node: ast.AST) -> ast.AST:
        """What a name, a method of the script's own, or a `partial` of one stands for."""
        made = self._known.meant(node)
        if isinstance(made, ast.Call) and name_of(made.func).endswith("partial") and made.args:
            return self._function(made.args[0])
        return self._methods.get(name_of(made), made)

    def _with_called(self, made: ast.AST) -> list[ast.AST]:
        """A function, and the functions of the script that it calls, directly or not."""
        parts = [made]
        for part in islice(parts, _MOST_CALLED):  # which grows
            called = [self._function(one.func) for one in ast.walk(part) if isinstance(one, ast.Call)]
            parts += [one for one in called if isinstance(one, ast.FunctionDef) and one not in parts]
        return parts

    def text_by(self, node: ast.AST, kind: str) -> Said:
        """What text a function makes of a row, or of which field it is; or that it is a filter of rows."""
        made = self._function(node)
        if not isinstance(made, ast.FunctionDef | ast.Lambda):
            return {}
        parts = self._with_called(made)
        inner = [one for part in parts for one in ast.walk(part)]
        calls = [one for one in inner if isinstance(one, ast.Call)]
        text = _PRINTS.sub("", "\n".join(map(ast.unparse, parts)))
        alone = {*_FIELD.findall(text)} <= _OF_CHATS and "'role': " not in text
        chats = "apply_chat_template(" in text and (alone or kind == "filter")
        made_here = _TEMPLATE.search(text.replace("'text': ", "") if chats else text)
        if kind == "filter" or made_here or (not chats and "apply_chat_template(" in text):
            texts = [ast.unparse(one) for one in inner if isinstance(one, ast.JoinedStr)]
            made_of = [one.func for one in calls if isinstance(one.func, ast.Attribute)]
            texts += [str(self._known.value(one.value)) for one in made_of if one.attr == "format"]
            longest = max((one for one in texts if one in text or one[:2] != "f'"), key=len, default="")
            return _by(kind, parts[1] if isinstance(made, ast.Lambda) and parts[1:] else made, longest)
        fields = dict[str, int]()
        for one in calls:
            match one.args[:1]:
                case [ast.Subscript(slice=ast.Constant(value=str(field)))]:
                    if re.search("tok(?!.*template)", name_of(one.func).lower()):
                        fields.setdefault(field, one.lineno)
        if len(fields) > 1:  # a prompt and its answer, joined as tokens
            return {} if {*fields} == _PAIR else _by("text", made, " + ".join(fields))
        fields.pop("text", None)
        return {("tokenised field",): (line, field) for field, line in fields.items()}  # noqa: B035 - one

    def cut(self, marks: Collection[str]) -> Said:
        """The length of the pieces of tokens, where no setting is one: `ids[i : i + length]`.

        Of what is not packed, the tokens that are left of a row: `ids[:length]`.
        """
        if any(map(_LENGTH.search, marks)):
            return {}
        if "packed()" not in marks:
            return self._first_tokens()
        found = dict[Any, int]()
        for one in self._nodes:
            match one:
                case ast.Slice(lower=ast.Name(id=at), upper=ast.BinOp(ast.Name(id=to), ast.Add(), size)):
                    if at == to and "batch" not in ast.unparse(size):
                        found[self._known.value(size)] = size.lineno
        rows = [(line, length) for length, line in found.items()]
        return {("[i:i+n]",): rows[0]} if {*map(type, found)} == {int} and len(rows) == 1 else {}

    def of_file(self, call: ast.Call, last: str) -> Said:
        """Of `Dataset.from_json(path)` the file, which is held out where its name says so.

        `Dataset.from_pandas(frame)` has that of the frame, which nothing changes after `read_json(path)`.
        """
        if last == "from_pandas" and call.args:
            made: Any = self._known.meant(call.args[0])
            parts = (one for one in self._nodes if isinstance(one, ast.Subscript | ast.Attribute))
            changed = (one.value for one in parts if isinstance(one.ctx, ast.Store))
            if ast.unparse(call.args[0]) in map(ast.unparse, changed) or not isinstance(made, ast.Call):
                return {}
            read = re.search(r"\bread_(json|parquet)$", ast.unparse(made.func))
            return self._of_file(made, f"from_{read[1]}") if read else {}
        return self._of_file(call, last) if ast.unparse(call.func).endswith(f"Dataset.{last}") else {}

    def _of_file(self, call: ast.Call, last: str) -> Said:
        named = ("path_or_paths", "path_or_buf", "path")
        given = [one.value for one in call.keywords if one.arg in named] + call.args[:1]
        if last not in _FILES or not given:
            return {}
        text = f"{ast.unparse(given[0])} {self._known.value(given[0])}"
        held_out = _HELD_OUT.search(text) and "train" not in text.lower()
        return self._known.entries(given[0], ("eval_dataset" if held_out else last,))

    def drawn(self) -> Said:
        """How many rows a batch has that is drawn by chance: `torch.randint(len(data) - length, (rows,))`."""
        for one in (one for one in self._nodes if isinstance(one, ast.Call) and self._known.runs(one)):
            match one:
                case ast.Call(func=ast.Attribute(attr="randint"), args=[end, ast.Tuple(elts=[rows])]):
                    if "len(" in ast.unparse(end) and self.learn:
                        return self._known.entries(rows, ("randint(rows)",))
        return {}

    def _first_tokens(self) -> Said:
        """How many tokens a row keeps; not known where slices differ."""
        found = dict[Any, int]()
        for one in (one for one in self._nodes if isinstance(one, ast.Subscript)):
            if isinstance(one.ctx, ast.Store):
                continue  # `labels[:length] = -100`
            end = one.slice.upper if isinstance(one.slice, ast.Slice) and not one.slice.lower else None
            if end is not None and _TOKENS.search(ast.unparse(one.value)) and _CUT.search(ast.unparse(end)):
                found |= {self._known.value(end): end.lineno} if self._known.runs(one) else {}
        rows = [(line, length if type(length) is int else UNKNOWN) for length, line in found.items()]
        return {("[:n]",): rows[0] if len(rows) == 1 else (rows[0][0], UNKNOWN)} if rows else {}

    def prompts(self, after: Collection[ast.AST]) -> Said:
        """Text around the fields of rows, where no call shows which function makes it."""
        flow, unparsed = self._known.flow, cache(ast.unparse)
        for one in self._nodes:
            if not isinstance(one, ast.Constant) or not _PROMPT.search(str(one.value)) or one in after:
                continue
            statement = flow.statement(one)
            function = next((s for s in flow.scopes(one) if isinstance(s, ast.FunctionDef)), statement)
            text, around = unparsed(statement), unparsed(function)
            joined = "\n" in str(one.value) or _TEMPLATE.search(text)
            used = joined and not isinstance(statement, ast.Expr | ast.ClassDef) and self._known.runs(one)
            if used and not _NO_TEXT.search(text) and "{%" not in text and ".generate(" not in around:
                return _by("text", function, str(one.value))
        for call in (one for one in self._nodes if isinstance(one, ast.Call) and one not in after):
            given, statement = [*call.args, *(one.value for one in call.keywords)], flow.statement(call)
            rows = any(
                isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Constant) for one in given
            )
            made = isinstance(statement, ast.Assign | ast.Return) and self._known.runs(call)
            if rows and made and _MAKES.search(name_of(call.func)):  # of a file that is not named, too
                function = next((s for s in flow.scopes(call) if isinstance(s, ast.FunctionDef)), statement)
                if ".generate(" not in unparsed(function):
                    return _by("text", function, unparsed(call))
        return {}

    def chosen(self, node: ast.AST) -> Said:
        """Of `ds.select(range(100))` how many rows; of `load_dataset(x)["validation"]` the split."""
        match node:
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(str(part))):
                text = ast.unparse(self._known.flow.statement(node)).replace(f"'{part}'", "")
                plain = name_of(call.func) == "load_dataset" and self._known.runs(node)
                named = {one.arg for one in call.keywords} & {"data_files", "split"} or part == "train"
                if plain and not (named or _HELD_OUT.search(text) or self._trains_on("train")):
                    return {("load_dataset", "split"): (node.lineno, part)}
            case ast.Assign(value=value) | ast.Return(value=value) | ast.keyword(value=value):
                match value:
                    case ast.Call(func=ast.Attribute(attr="select"), args=[ast.Call() as rows]) if rows.args:
                        inner = rows.args[0] if name_of(rows.func) == "list" else rows
                        if isinstance(inner, ast.Call) and name_of(inner.func) == "range":
                            return self._selected(node, inner) if self._known.runs(node) else {}
                    case ast.Subscript(
                        value=held, slice=ast.Slice(lower=None, upper=ast.expr() as end, step=None)
                    ):
                        return self._first(node, held, end)
        return {}

    def _first(self, node: ast.AST, held: ast.expr, end: ast.expr) -> Said:
        """How many rows `rows[:n]` takes, where a number or an argument says it, and no share of them."""
        made = ast.unparse(self._known.meant(held))
        rows = _ROWS.fullmatch(ast.unparse(held)) or re.search(r"json\.loads?\(|open\(", made)
        count = self._known.value(end)
        shares = "len(" in ast.unparse(self._known.meant(end)) or not isinstance(count, int | str)
        if (
            not (rows and self.learn)
            or shares
            or (isinstance(count, int) and count < 1)
            or not self._known.runs(node)
        ):
            return {}
        key = "evaluation rows" if _HELD_OUT.search(ast.unparse(node)) else "select.range"
        return self._known.entries(end, (key,), held.lineno)

    def _trains_on(self, part: str) -> bool:
        """Whether a line that may run takes a part of the rows by this name."""
        parts = (one for one in self._nodes if isinstance(one, ast.Subscript) and self._known.runs(one))
        return any(isinstance(one.slice, ast.Constant) and one.slice.value == part for one in parts)

    def _selected(self, node: ast.AST, rows: ast.Call) -> Said:
        first, end = ([ast.Constant(0), *rows.args] if len(rows.args) == 1 else rows.args)[:2]
        held_out, text = _HELD_OUT.search(ast.unparse(node)), ast.unparse(end)
        if "%" in text:
            return {}  # `len(rows) - len(rows) % 8`: all but a rest
        if isinstance(end, ast.Call) and name_of(end.func) == "min":  # `min(1000, len(rows))`
            end = next((one for one in end.args if "len(" not in ast.unparse(one)), end)
        if self._known.value(first) == 0 and len(rows.args) < 3 and "len(" not in ast.unparse(end):
            key = "evaluation rows" if held_out else "select.range"
            return self._known.entries(end, (key,), rows.lineno)
        key = "evaluation rows" if held_out else "rows by number"
        return {(key,): (rows.lineno, ast.unparse(rows).replace("$", ""))}

    def splits(self) -> Said:
        """The shares of the rows where a part of a split is split again, so that some train nothing."""
        parts = dict[str, tuple[float, float, bool]]()  # its share, that of the others, whether held out
        for one in (one for one in self._nodes if isinstance(one, ast.Assign)):
            made, to = ast.unparse(one.value).removeprefix("train_test_split("), one.targets[0]
            part = next((v for k, v in parts.items() if re.match(rf"{re.escape(k)}(?!\w)", made)), None)
            given = [k.value for k in getattr(one.value, "keywords", []) if k.arg == "test_size"]
            size = self._known.value(given[0]) if given and self._known.runs(one) else 0
            names = [ast.unparse(name) for name in getattr(to, "elts", [to])]
            if isinstance(size, float) and 0 < size < 1:
                if part:
                    shares = [part[0] * (1 - size), part[0] * size]
                    shares = [part[1], *shares] if part[2] else [*shares, part[1]]
                    return {("split within a split",): (one.lineno, ", ".join(f"{s:.0%}" for s in shares))}
                train, test = names if len(names) == 2 else [f"{names[0]}['{k}']" for k in ("train", "test")]
                parts |= {train: (1 - size, size, False), test: (size, 1 - size, True)}
            elif part and len(names) == 1:
                parts[names[0]] = part
        return {}

    def held_out(self) -> Said:
        """The share that slices hold out: `n = int(0.8 * len(rows))`, then `rows[:n]` and `rows[n:]`."""
        made = [one for one in self._nodes if isinstance(one, ast.Assign) and self._known.runs(one)]
        pairs = [(ast.unparse(one.targets[0]), one.value) for one in made]
        for one in made:
            given = zip(*(getattr(side, "elts", ()) for side in (one.targets[0], one.value)), strict=False)
            pairs += [(ast.unparse(to), value) for to, value in given]
        for one in (one for one in made if self.learn and "len(" in ast.unparse(one.value)):
            cut, whose = ast.unparse(one.targets[0]), dict[bool, bool]()  # is the first part held out
            for to, value in pairs:
                for part in (part for part in ast.walk(value) if isinstance(part, ast.Slice)):
                    ends = [end and ast.unparse(end) for end in (part.lower, part.upper)]
                    if cut in ends and None in ends and ("train" in to) is not bool(_HELD_OUT.search(to)):
                        whose[ends[1] == cut] = "train" not in to
            if whose.keys() == {True, False} and whose[True] is not whose[False]:
                sides = [side for sum_ in ast.walk(one.value) for side in _factors(sum_)]
                shares = [v for v in map(self._known.value, sides) if isinstance(v, float) and 0 < v < 1]
                share = round(shares[0] if whose[True] else 1 - shares[0], 9) if len(shares) == 1 else UNKNOWN
                return {("rows held out",): (one.lineno, share)}
        return {}

    def scratch(self) -> Said:
        """The model, where the script makes it with random weights and certainly loads no others."""
        parts = [one for one in self._nodes if isinstance(one, ast.Call | ast.Assign)]
        parts = [one for one in parts if self._known.runs(one) and self._known.flow.certain(one)]
        if any(_LOADED.match(ast.unparse(one)) for one in parts):
            return {}
        held = [one for one in self._nodes if isinstance(one, ast.With)]
        held = [one for one in held if _EMPTY.search(" ".join(map(ast.unparse, one.items)))]
        empty = {inner for one in held for inner in ast.walk(one)}
        for one in parts:
            made = one.value if isinstance(one, ast.Assign) and _MODEL.search(ast.unparse(one)) else None
            while isinstance(made, ast.Call) and _MOVED.search(ast.unparse(made.func)):
                made = getattr(made.func, "value", None)
            if isinstance(made, ast.Call) and self._is_built(made):
                said = Said()  # of a model without weights, which are loaded part by part
                if made not in empty:
                    said = {("random weights",): (made.lineno, True), ("own shape",): (made.lineno, UNKNOWN)}
                config = self._known.meant(made.args[0]) if made.args else made
                configs = [config, *(parts if made in empty else ())]
                configs = [
                    one for one in configs if isinstance(one, ast.Call) and _CONFIG.search(name_of(one.func))
                ]
                if configs and len({self._known.value(one.args[0]) for one in configs}) == 1:
                    said |= self._known.entries(configs[0].args[0], ("model_name_or_path",))
                return said
        return {}

    def _is_built(self, call: ast.Call) -> bool:
        """Whether a call makes a model of a library's class, or of one of the script's own."""
        own = self._known.meant(call.func)
        bases = " ".join(map(ast.unparse, own.bases)) if isinstance(own, ast.ClassDef) else ""
        made = [one for one in getattr(own, "body", []) if getattr(one, "name", "") == "__init__"] or [own]
        net = re.search(r"Module\b|PreTrainedModel", bases) and "from_pretrained(" not in ast.unparse(made[0])
        if name_of(call.func) == "instantiate" and call.args:  # Hydra's
            place = ast.Attribute(call.args[0], "_target_", ast.Load())
            target = str(self._known.value(ast.copy_location(place, call)))
            return bool(re.fullmatch(r"[\w.]+\.[A-Z]\w*", target))
        shape = len(_SHAPE & {one.arg for one in call.keywords}) > 1  # of a class that no script shows
        return bool(net or shape or _BUILT.search(name_of(call.func)))

    def labels(self, text: str, values: Mapping[str, Any], uses: Collection[str], *, loops: bool) -> Said:
        """What the words of a script show, without being an argument; `loops`: no Trainer is used."""
        text = re.sub(r"^[ \t]*#.*", "", text, flags=re.MULTILINE)
        ignored = [*self._ignored()]
        masks = any("pad" not in one.replace("attention_mask", "pad") or _PART.search(one) for one in ignored)
        by_loss = "SFTTrainer" in text and values.get("completion_only_loss") is None
        counts = {"completion()": by_loss, "masked()": masks, "eval_dataset": loops}
        found = {name: one.search(text) for name, one in _SEEN.items() if counts.get(name, True)}
        lines = {name: line_at(text, one.start()) for name, one in found.items() if one}
        lines.pop("pieces()" if "packed()" in lines else "", 0)
        for one in ("system prompt", "conversation template"):
            lines.pop(one if any(name.startswith("text by") for name in values) else "", 0)
        padded = bool((values.get("tokenizer") or {}).get("padding"))
        again = any(one.endswith("DataCollatorForLanguageModeling") for one in uses)  # and makes them
        lines.pop("masked()" if again else "", 0)
        own = _IGNORED.search(text) if masks and not again else None
        labels = lines.pop("labels()", 0) or (line_at(text, own.start()) if own else 0)
        if labels and not {"masked()", "loss_mask()"} & lines.keys():
            lines["labels(-100)" if masks and not again else "labels()"] = labels
            lines |= {"labels(padding)": labels} if padded and not (ignored or again) else {}
        if by_value := [] if again else [*self._by_value()]:
            lines = {key: line for key, line in lines.items() if key not in ("masked()", "labels(-100)")}
            lines["labels by value"] = by_value[0]
        return {(name,): (line, UNKNOWN if name in _OPEN else True) for name, line in lines.items()}

    def _by_value(self) -> Iterator[int]:
        """The lines that leave tokens out of the loss by a number of each: `labels[losses > 2] = -100`."""
        for one in self._nodes:
            match one:
                case ast.Assign(targets=[ast.Subscript(slice=which)], value=value):
                    pass
                case ast.Call(
                    func=ast.Attribute(attr="where" | "masked_fill" | "masked_fill_"), args=[which, *_]
                ):
                    value = one
                case _:
                    continue
            parts = [part for part in ast.walk(which) if isinstance(part, ast.Compare)]
            parts = [part for part in parts if isinstance(part.ops[0], ast.Gt | ast.GtE | ast.Lt | ast.LtE)]
            places = any(_PLACE.search(ast.unparse(part)) for part in parts)
            if parts and not places and _IGNORED.search(ast.unparse(value)) and self._known.runs(one):
                yield one.lineno

    def _ignored(self) -> Iterator[str]:
        """The statements that may run and leave tokens out of the loss."""
        plain = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr
        for one in (one for one in self._nodes if isinstance(one, plain)):
            text = ast.unparse(one)
            defines = re.search(r"^[\w: ]+ = (-100|[\w.]+)$|ignore_index=|[!=]= -100", text)
            if _IGNORED.search(text) and not defines and self._known.runs(one):
                yield text


def _factors(node: ast.AST) -> list[ast.expr]:
    """The two sides of a product."""
    times = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    return [node.left, node.right] if times else []  # type: ignore[attr-defined]


def _by(kind: str, made: ast.AST, text: str) -> Said:
    name = getattr(made, "name", "a lambda" if isinstance(made, ast.Lambda) else "the script")
    return {(f"{kind} by {name}",): (getattr(made, "lineno", 1), text[:_LONGEST].replace("$", ""))}
