"""The formats of samples (prompt-completion, alpaca, sharegpt, messages, text), and their conversion to one.

Each file is in one format, found by the fields of its first record. Every record is checked while it is
converted; a fault is described in one sentence.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.data.columns import Columns, kind, proposal
from shardwise.data.sources import Findings, Record, Source, Text
from shardwise.errors import DataError, what_of
from shardwise.job.schema import Data

Format = Literal["prompt-completion", "alpaca", "sharegpt", "messages", "text"]
Message = dict[str, Any]

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    "function_call": "call",
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
}
MESSAGES_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MESSAGES_ROLES |= dict.fromkeys(("tool", "function"), "tool")
BEFORE = {
    "system": ("the start",),
    "user": ("the start", "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("call", "tool"),
}
"""What may come before a message of each role; `call` is an assistant's message that calls functions."""
SHARED_FIELDS = {"system", "tools"}
OWN_FIELDS: dict[Format, set[str]] = {
    "prompt-completion": {"prompt", "completion"},
    "alpaca": {"instruction", "input", "output", "history"},
    "sharegpt": {"conversations", "messages"},
    "messages": {"conversations", "messages"},
    "text": {"text"},
}
EXPECTED = (
    "prompt-completion: prompt, completion; alpaca: instruction, output (input, system, history); sharegpt: "
    "conversations of {from, value}; messages: messages of {role, content}; text: text"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them: role, content, and for tools `tool_calls`, `tool_call_id`."""

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None  # JSON schemas of the functions that the assistant may call
    asked: int = 0  # so many messages at the beginning are the prompt: their answers are not trained


Sample = Conversation | Text


class SampleError(Exception):
    """Says in one sentence why a record is not a sample."""


class UnknownFormatError(DataError):
    """A record's fields fit no format."""


def detect(record: Record, given: Record | None = None, named: Iterable[str] = ()) -> Format:
    """Return the format of a record. UnknownFormatError for no known fields, DataError for ambiguous ones.

    `given`: the record with the names that its file has, for messages; `named`: fields that the job names for
    its columns, which decide.
    """
    where, fields = record[0], {name: value for name, value in record[1].items() if value is not None}
    pair = {"prompt", "completion"} <= fields.keys()
    alpaca = {"instruction", "output"} | ({"input", "history"} if pair else set())
    turns = fields.get("messages", fields.get("conversations"))
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
    signs: dict[Format, bool] = {
        "prompt-completion": pair,
        "alpaca": len(alpaca & fields.keys()) > (0 if pair else 1),
        "sharegpt": "from" in first and "value" in first,
        "messages": "role" in first,
        "text": isinstance(fields.get("text"), str),
    }
    meant = [name for name, own in OWN_FIELDS.items() if {*named} - SHARED_FIELDS <= own]
    if len(meant) == 1:
        return meant[0]  # whatever else the record could be: what it lacks makes it a bad sample
    fits = [name for name, fit in signs.items() if fit and name in meant]
    if len(fits) == 1:
        return fits[0]
    own = (given or record)[1]
    names = sorted(f"{name}{kind(value)}" for name, value in own.items())
    found = f"fields found: {', '.join(names) or 'none'}"
    if fits:
        what = f"the samples could be read as {' or as '.join(fits)}; {found}"
        raise DataError(what, where=where, fix=f"say which: data.format: {fits[0]}")
    what = f"the samples are of no known format; {found}"
    fix, columns = f"known are {EXPECTED}", proposal(own)
    fix += f"; or name the file's fields: {columns}" if columns else ""
    if isinstance(turns, str):
        what += "; the conversation is a string, not a list"
        fix = "write the list itself, as json.loads gives it"
    if "input_ids" in own:
        fix = f"give the texts: tokens are made by the model's own tokenizer; {fix}"
    raise UnknownFormatError(what, where=where, fix=fix)


class Reader:
    """Iterates over the samples of several sources, and counts them in `bad`, `read` and `formats`.

    Without `data.skip_bad` a bad sample does not end the reading, so that the error at its end counts all
    of them; the samples after the first bad one are of no use.
    """

    def __init__(self, sources: Sequence[Source], data: Data, *, key: str = "data.train") -> None:
        """`key`: the job's key that names them; samples to evaluate on may have the formats' own names."""
        self.sources, self.data, self.key, self.read = sources, data, key, 0
        self.formats: list[Format] = []
        self._columns = Columns({**data.format} if isinstance(data.format, dict) else {})
        self._unread = 0  # faults of the files
        self._misfit: Record | None = None  # the first record that does not fit, with its own names
        fix = "correct them, or leave them out with data.skip_bad: true"
        self.bad = Findings("samples cannot be used", fix, tolerated=data.skip_bad)

    def __iter__(self) -> Iterator[Sample]:
        for samples in self.each():
            yield from samples

    def each(self) -> Iterator[Iterator[Sample]]:
        """The samples of one source after the other."""
        for source in self.sources:
            yield self._read(source)
        if self.key == "data.train" and self.read != self.data.max_samples:
            self._columns.check()
        if self.bad.count == self.read + self._unread:
            self.bad.fix = self._fix_for_all()
        self.bad.raise_if_fatal()

    def _fix_for_all(self) -> str:
        """What to do where no sample can be used: to leave them out would leave nothing."""
        if self._misfit is None:
            return "correct them: no sample can be used"
        try:
            found = self._detect(self._misfit)
        except DataError as error:
            return error.problems[0].fix
        right = found in self.formats
        return "correct them: no sample can be used" if right else f"they look like data.format: {found}"

    def _detect(self, given: Record) -> Format:
        return detect(self._columns.renamed(given), given, self._columns.of(given[1]))

    def _records(self, source: Source) -> Iterator[Record | Text]:
        """The records of a source, and how many it could not read."""
        records = source.read(self.bad)
        while True:
            before = self.bad.count
            record = next(records, None)
            self._unread += self.bad.count - before
            if record is None:
                return
            yield record

    def _read(self, source: Source) -> Iterator[Sample]:
        asked = self.data.format
        format_: Format | None = None if isinstance(asked, dict) or asked == "auto" else asked
        for given in self._records(source):
            item = given if isinstance(given, Text) else self._columns.renamed(given)
            begins = not isinstance(item, Text) or item.begins
            if begins and self.data.max_samples is not None and self.read == self.data.max_samples:
                return
            self.read += begins
            try:
                format_ = "text" if isinstance(given, Text) else format_ or self._detect(given)
                if format_ not in self.formats:
                    self.formats.append(format_)
                yield item if isinstance(item, Text) else convert(item, format_, system=self.data.system)
            except (SampleError, UnknownFormatError) as error:
                if isinstance(given, Text):
                    self.bad.add(given.where, what_of(error))
                    continue
                self._misfit = self._misfit or given
                what = what_of(error) + self._columns.absent(given[1])
                if isinstance(error, UnknownFormatError) and not self.data.skip_bad:
                    raise UnknownFormatError(what, where=given[0], fix=error.problems[0].fix) from None
                self.bad.add(given[0], what)


def convert(record: Record, format_: Format, *, system: str | None = None) -> Sample:
    """The record as a sample, `system` before conversations without one. SampleError where it is none."""
    where, fields = record
    if format_ == "text":
        text = _text(fields, "text")
        if not text.strip():
            raise SampleError("the text is empty")
        return Text(where, text)
    asked = 0
    if format_ == "prompt-completion":
        messages, asked = _pair(fields)
    elif format_ == "alpaca":
        messages = _alpaca(fields)
    else:
        name = "conversations" if fields.get("messages") is None and "conversations" in fields else "messages"
        messages = _turns(fields.get(name), name)
    asked = max(asked, _skipped(messages))
    own = _text(fields, "system", optional=True) or system
    if own and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": own})
        asked += asked > 0
    _check_order(messages)
    return Conversation(where, messages, _tools(fields.get("tools")), asked)


def _pair(fields: dict[str, Any]) -> tuple[list[Message], int]:
    """The messages of `prompt` and `completion`, each a text or a list; how many are the prompt's."""
    both: list[list[Any]] = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        value = fields.get(name)
        turns = value if isinstance(value, list) else [{"role": role, "content": _text(fields, name)}]
        if not turns or (isinstance(value, str) and not value.strip()):
            raise SampleError(f"the field {name} is empty")
        both.append(turns)
    prompt, messages = (_turns(turns, "prompt and completion") for turns in (both[0], [*both[0], *both[1]]))
    if prompt[-1]["role"] == "assistant" and "tool_calls" not in prompt[-1]:
        raise SampleError("the prompt ends with an answer, not with what the completion answers")
    return messages, len(prompt)


def _alpaca(fields: dict[str, Any]) -> list[Message]:
    pairs: list[tuple[str, str]] = []
    history = fields.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise SampleError("history has to be a list of [question, answer]")
        pairs.append((_text({"question": pair[0]}, "question"), _text({"answer": pair[1]}, "answer")))
    parts = (_text(fields, "instruction"), _text(fields, "input", optional=True))
    asked = "\n".join(part for part in parts if part)
    if not asked.strip():
        raise SampleError("instruction and input are empty")
    pairs.append((asked, _text(fields, "output")))
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _turns(turns: Any, name: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise SampleError(f"the field {name} has to be a list that is not empty")
    messages: list[Message] = []
    called = 0
    waiting: list[str] = []  # ids of calls that have no result yet
    for turn in turns:
        if not isinstance(turn, dict):
            raise SampleError(f"{name}: a message has to be an object, not {type(turn).__name__}")
        sharegpt = turn.get("role") is None and turn.keys() & {"from", "value"}
        message = _from_sharegpt(turn) if sharegpt else _from_messages(turn)
        marks = [turn.get(key) for key in ("weight", "train")]
        if wrong := [mark for mark in marks if mark not in (None, 0, 1)]:  # False is 0, True 1
            raise SampleError(f"weight or train of a message is {wrong[0]!r:.40}, not 0, 1, false or true")
        message["skipped"] = 0 in marks
        before = messages[-1] if messages else {}
        if message.pop("merge", False) and before.get("role") == "assistant" and "tool_calls" not in before:
            message["content"] = messages.pop()["content"]  # the text before the call
        for call in message.get("tool_calls", ()):
            call.setdefault("id", f"call{called + 1:05d}")  # some templates require nine characters
            waiting.append(call["id"])
        called += len(message.get("tool_calls", ()))
        if message["role"] == "tool" and waiting:
            message.setdefault("tool_call_id", waiting.pop(0))
        messages.append(message)
    return messages


def _skipped(messages: list[Message]) -> int:
    """So many messages at the beginning are not trained: answers have `weight: 0` or `train: false`."""
    marks = [message.pop("skipped", False) for message in messages]
    answers = [n for n, message in enumerate(messages, 1) if message["role"] == "assistant"]
    left = [n for n in answers if marks[n - 1]]
    if left and left != answers[: len(left)]:
        raise SampleError(f"message {left[-1]} is marked not to be trained, an answer before it is trained")
    if left and left == answers:
        raise SampleError("all answers are marked not to be trained (weight or train)")
    return max(left, default=0)


def _from_sharegpt(turn: dict[str, Any]) -> Message:
    role = _role(turn, "from", SHAREGPT_ROLES)
    content = _text(turn, "value")
    if role == "call":
        calls = _calls(_json(content, "function_call"))
        return {"role": "assistant", "content": "", "tool_calls": calls, "merge": True}
    return {"role": role, "content": content}


def _from_messages(turn: dict[str, Any]) -> Message:
    message: Message = {"role": _role(turn, "role", MESSAGES_ROLES)}
    calls = turn.get("tool_calls")
    message["content"] = "" if calls and turn.get("content") is None else _content(turn)
    if calls:
        message["tool_calls"] = _calls(calls)
    for key in ("name", "tool_call_id", "reasoning_content"):
        if turn.get(key) is not None:
            message[key] = _text(turn, key)
    return message


def _content(turn: dict[str, Any]) -> str:
    """Return `content` as one string, also where it is a list of parts of type text."""
    parts = turn.get("content")
    if not isinstance(parts, list):
        return _text(turn, "content")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise SampleError("content holds parts that are not text")
    return "".join(_text(part, "text") for part in parts)


def _calls(value: Any) -> list[dict[str, Any]]:
    """Return function calls as chat templates take them: arguments are an object, not a string of JSON."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(function, dict):
            raise SampleError("the function of a call has to be an object")
        name, arguments = function.get("name"), function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments, f"the arguments of {name}")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise SampleError("a function call needs a name and an object of arguments")
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        _check_characters([identity, name, arguments], "a function call")
        calls.append({**identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    if not calls:
        raise SampleError("the list of function calls is empty")
    return calls


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _json(value, "tools") if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    _check_characters(tools, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SampleError("tools has to be a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _check_order(messages: list[Message]) -> None:
    """Require (system) user assistant …, tool results only after calls, and an answer that is not empty."""
    before = "the start"
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if before not in BEFORE[role]:
            raise SampleError(f"wrong role order: message {number} is of role {role}, after {before}")
        called = "tool_calls" in message
        if role == "assistant" and not called and not message["content"].strip():
            raise SampleError(f"the answer is empty (message {number})")
        before = "call" if called else role
    if before not in ("assistant", "call"):
        raise SampleError(f"the conversation ends with role {before}, not with an answer")


def _role(turn: dict[str, Any], key: str, roles: dict[str, str]) -> str:
    name = _text(turn, key)
    if name not in roles:
        raise SampleError(f"unknown role {name!r}; known are {', '.join(roles)}")
    return roles[name]


def _text(fields: dict[str, Any], key: str, *, optional: bool = False) -> str:
    if optional and fields.get(key) is None:
        return ""
    if key not in fields:
        raise SampleError(f"the field {key} is missing; found are {', '.join(sorted(map(str, fields)))}")
    value = fields[key]
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise SampleError(f"the field {key} has to be a string, it is {kind}")
    if "\0" in value:
        raise SampleError(f"the field {key} holds a NUL character")
    _check_characters(value, f"the field {key}")
    return value


def _check_characters(value: Any, what: str) -> None:
    """Refuse half a surrogate pair, which JSON can escape and no tokenizer takes, also inside objects."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SampleError(f"{what} holds half a surrogate pair, which is no character") from None


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{what} is not JSON: {error}") from None
