"""Formats: detected by their fields, converted to one shape, refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.data.formats import EXPECTED, Conversation, Reader, SampleError, convert, detect
from shardwise.data.sources import Text, open_sources
from shardwise.errors import DataError, render
from shardwise.job.schema import Data

USER = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"from": "function_call", "value": '{"name": "f"}'}
BAD_CALL = {"role": "assistant", "tool_calls": [{"function": "f"}]}
HALF_CALL = {"from": "function_call", "value": '{"name": "f", "arguments": {"a": "\\ud800"}}'}


def messages_of(fields: dict[str, Any], format_: Any, system: str | None = None) -> list[dict[str, Any]]:
    sample = convert(("f:1", fields), format_, system=system)
    assert isinstance(sample, Conversation)
    return sample.messages


@pytest.mark.parametrize(
    ("fields", "format_"),
    [
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"prompt": "a", "completion": "b"}, "prompt-completion"),
        ({"prompt": [USER], "completion": [ANSWER], "id": 7}, "prompt-completion"),
        ({"prompt": "a", "completion": "b", "instruction": None, "messages": None}, "prompt-completion"),
        ({"messages": None, "conversations": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"conversations": [{"from": "human", "value": "a"}], "tools": "[]"}, "sharegpt"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"conversations": [{"role": "user", "content": "a"}]}, "messages"),
        ({"text": "a", "url": "b", "timestamp": "c"}, "text"),
    ],
)
def test_the_format_is_detected(fields: dict[str, Any], format_: str) -> None:
    assert detect(("f:1", fields)) == format_


def test_fields_of_two_formats_are_ambiguous() -> None:
    with pytest.raises(
        DataError, match="as alpaca or as text; fields found: instruction, output, text"
    ) as caught:
        detect(("f:1", {"instruction": "a", "output": "b", "text": "c"}))
    assert caught.value.problems[0].fix == "say which: data.format: alpaca"


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ({"instruction": "Answer briefly."}, "alpaca"),
        ({"output": "WRONG"}, "alpaca"),
        ({"input": "more"}, "alpaca"),
        ({"history": [["a", "b"]]}, "alpaca"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"text": "a"}, "text"),
    ],
)
@pytest.mark.parametrize(
    "pair", [{"prompt": "2+2?", "completion": "4"}, {"prompt": [USER], "completion": [ANSWER]}]
)
def test_prompt_and_completion_next_to_fields_of_another_format_are_ambiguous(
    json_lines: Any, pair: dict[str, Any], more: dict[str, Any], other: str
) -> None:
    """Only one of the two was trained, without a word."""
    with pytest.raises(DataError, match=f"as prompt-completion or as {other}; fields found: ") as caught:
        detect(("f:1", pair | more))
    fix = "say which: data.format: prompt-completion"
    assert caught.value.problems[0].fix == fix
    data = Data(train=json_lines([pair | more]), format="prompt-completion")
    (sample,) = Reader(open_sources(data.train, split="train", key="k"), data)
    assert isinstance(sample, Conversation)
    assert [message["content"].replace(" ", "") for message in sample.messages] == ["2+2?", "4"]


def test_a_null_is_no_field_and_is_named() -> None:
    with pytest.raises(DataError, match=r"fields found: completion \(null\), prompt\n"):
        detect(("f:1", {"prompt": "a", "completion": None}))


def test_what_is_no_text_is_named_and_token_ids_are_answered_with_what_is_read() -> None:
    fields = {"text": ["a", "b"], "input_ids": [1, 2], "id": 3, "meta": {}}
    found = r"fields found: id \(number\), input_ids \(list\), meta \(object\), text \(list\)\n"
    with pytest.raises(DataError, match=found) as caught:
        detect(("f:1", fields))
    assert str(caught.value.problems[0].fix).startswith("give the texts: ")


@pytest.mark.parametrize("fields", [{"question": "a", "answer": "b"}, {}, {"messages": []}, {"text": None}])
def test_unknown_fields_are_listed(fields: dict[str, Any]) -> None:
    with pytest.raises(
        DataError, match="no known format; fields found: " + (", ".join(sorted(fields)) or "none")
    ):
        detect(("f:1", fields))


@pytest.mark.parametrize(
    ("fields", "columns"),
    [
        ({"question": "a", "answer": "b"}, "{prompt: question, completion: answer}"),
        ({"prompt": "a", "Response": "b"}, "{completion: Response}"),
        ({"instruction": "a", "input": "", "response": "b"}, "{output: response}"),
        ({"Instruction": "a", "Input": "c", "answer": "b"},
         "{instruction: Instruction, input: Input, output: answer}"),
        ({"dialogue": [{"role": "user", "content": "a"}]}, "{messages: dialogue}"),
        ({"the chat": [{"from": "human", "value": "a"}]}, '{messages: "the chat"}'),
        ({"content": "a", "url": "b"}, "{text: content}"),
        ({"q": "a", "a": "b"}, "{prompt: FIELD, completion: FIELD}"),
    ],
)  # fmt: skip
def test_names_of_fields_are_proposed_where_a_format_is_unknown(fields: dict[str, Any], columns: str) -> None:
    with pytest.raises(DataError) as caught:
        detect(("f:1", fields))
    assert caught.value.problems[0].fix.endswith(f"; or name the file's fields: data.format: {columns}")


@pytest.mark.parametrize("fields", [{}, {"text": None}, {"prompt": "a", "chosen": "b"}, {"messages": []}])
def test_nothing_is_proposed_where_names_are_not_the_reason(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        detect(("f:1", fields))
    assert caught.value.problems[0].fix == f"known are {EXPECTED}"


def reader_of(path: str, **data: Any) -> Reader:
    return Reader(open_sources(path, split="train", key="data.train"), Data(train=path, **data))


def failed(reader: Reader) -> DataError:
    with pytest.raises(DataError) as caught:
        list(reader)
    return caught.value


@pytest.mark.parametrize(
    ("columns", "record", "messages"),
    [
        ({"prompt": "q", "completion": "a"}, {"q": "x", "a": "y", "id": 1}, ["x", "y"]),
        ({"instruction": "q", "output": "a", "system": "s"}, {"q": "x", "a": "y", "s": "z"}, ["z", "x", "y"]),
        ({"messages": "chat"}, {"chat": [USER, ANSWER]}, ["2 + 2?", "4"]),
        ({"conversations": "c"}, {"c": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
         ["x", "y"]),
        ({"prompt": "completion", "completion": "prompt"}, {"prompt": "y", "completion": "x"}, ["x", "y"]),
        ({"completion": "better"}, {"prompt": "x", "completion": "worse", "better": "y"}, ["x", "y"]),
        ({"prompt": "q", "completion": "a"}, {"q": "x", "a": "y", "text": "z", "output": "w"}, ["x", "y"]),
    ],
)  # fmt: skip
def test_columns_serve_every_format(
    json_lines: Any, columns: dict[str, str], record: dict[str, Any], messages: list[str]
) -> None:
    (sample,) = reader_of(json_lines([record]), format=columns)
    assert isinstance(sample, Conversation)
    assert [message["content"] for message in sample.messages] == messages
    (text,) = reader_of(json_lines([{"body": "b"}]), format={"text": "body"})
    assert isinstance(text, Text)
    assert text.text == "b"


def test_a_column_that_some_rows_have_is_right_and_one_that_none_has_an_error(json_lines: Any) -> None:
    rows = [{"q": "x", "a": "y"}, {"q": "x", "a": "y", "who": "z"}]
    columns = {"prompt": "q", "completion": "a", "system": "who"}
    assert len(list(reader_of(json_lines(rows), format=columns))) == 2
    for more in ({}, {"skip_bad": True}):
        error = failed(reader_of(json_lines(rows), format={**columns, "system": "whom"}, **more))
        assert error.problems[0].what == "data.format: no sample has a field whom"
        assert error.problems[0].fix == "did you mean who? fields found: q, a, who"
    typo = failed(reader_of(json_lines(rows), format={"prompt": "q", "completion": "answer"}))
    assert typo.problems[0].what == "data.format: no sample has a field answer"
    first = {**columns, "system": "whom"}
    assert len(list(reader_of(json_lines(rows), format=first, max_samples=1))) == 1, "it may come later"


@pytest.mark.parametrize(
    "first",
    [
        {"text": "SECRET", "q": "x", "a": None},
        {"messages": [{"role": "user", "content": "SECRET"}], "q": "x"},
        {"q": "x", "completion": "SECRET"},
    ],
)
def test_a_row_without_a_columns_value_is_bad_and_is_not_read_as_another(
    json_lines: Any, first: dict[str, Any]
) -> None:
    rows, columns = [first, {"q": "x", "a": "y"}], {"prompt": "q", "completion": "a"}
    assert "1 sample cannot be used" in render(failed(reader_of(json_lines(rows), format=columns)))
    (sample,) = reader_of(json_lines(rows), format=columns, skip_bad=True)
    assert "SECRET" not in str(sample)


@pytest.mark.parametrize(
    ("fields", "columns"),
    [
        ("instruction context response category", "{input: context, output: response}"),
        ("question context answer", "{instruction: question, input: context, output: answer}"),
        ("Question Context Answer", "{instruction: Question, input: Context, output: Answer}"),
        ("question input answer", "{instruction: question, output: answer}"),
        ("query response system_prompt", "{prompt: query, completion: response, system: system_prompt}"),
    ],
)
def test_what_is_proposed_leaves_no_part_of_the_question_out(
    json_lines: Any, fields: str, columns: str
) -> None:
    said = render(failed(reader_of(json_lines([dict.fromkeys(fields.split(), "x")]))))
    assert said.endswith(f"data.format: {columns}")


def test_where_all_samples_are_bad_to_leave_them_out_is_no_advice(json_lines: Any, tmp_path: Any) -> None:
    pairs = [{"question": "a", "answer": "b"}] * 7
    said = render(failed(reader_of(json_lines(pairs), format="prompt-completion")))
    assert "7 samples cannot be used" in said
    assert said.endswith("data.format: {prompt: question, completion: answer}")
    alpaca = [{"instruction": "a", "output": "b"}] * 2
    said = render(failed(reader_of(json_lines(alpaca), format="messages")))
    assert said.endswith("fix: they look like data.format: alpaca")
    said = render(failed(reader_of(json_lines([{"instruction": "a", "output": ""}] * 2))))
    assert said.endswith("fix: correct them: no sample can be used")
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n{\n")
    assert "skip_bad" not in render(failed(reader_of(str(broken))))
    broken.write_text('{\n{"instruction": "a", "output": "b"}\n{\n')
    assert "skip_bad" in render(failed(reader_of(str(broken)))), "one is good"


def test_alpaca_becomes_a_conversation() -> None:
    fields = {
        "instruction": "Translate.",
        "input": "Hund",
        "output": "dog",
        "system": "Be brief.",
        "history": [["Hello", "Hi"]],
    }
    assert messages_of(fields, "alpaca", system="unused") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Translate.\nHund"},
        {"role": "assistant", "content": "dog"},
    ]
    assert messages_of({"instruction": "a", "input": None, "output": "b"}, "alpaca", system="s")[0] == {
        "role": "system",
        "content": "s",
    }


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_conversation_that_is_a_string_is_said(name: str) -> None:
    with pytest.raises(DataError, match="the conversation is a string, not a list") as caught:
        detect(("f:1", {name: '[{"role": "user", "content": "a"}]', "id": 7}))
    assert caught.value.problems[0].fix.startswith("write the list itself")


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"train": False}, {"train": 0}, {"weight": False, "train": None}]
)
@pytest.mark.parametrize("roles", [("role", "content"), ("from", "value")])
def test_the_first_answers_can_be_marked_not_to_be_trained(
    mark: dict[str, Any], roles: tuple[str, str]
) -> None:
    role, content = roles
    user = {role: "user", content: "2 + 2?", "train": False}
    plain = {role: "assistant", content: "4", "weight": 1, "train": True}
    sample = convert(("f:1", {"messages": [user, plain | mark, user, plain]}), "messages", system="s")
    assert isinstance(sample, Conversation)
    assert sample.messages == [{"role": "system", "content": "s"}, USER, ANSWER, USER, ANSWER]
    assert sample.asked == 3
    for turns, what in (
        ([user, plain, user, plain | mark], "message 4 is marked not to be trained, an answer before it"),
        ([user, plain | mark], "all answers are marked"),
    ):
        with pytest.raises(SampleError, match=what):
            convert(("f:1", {"messages": turns}), "messages")


@pytest.mark.parametrize("key", ["weight", "train"])
@pytest.mark.parametrize("mark", ["0", "false", -1, 0.5, float("nan"), [], "no" * 99])
def test_a_mark_that_says_neither_yes_nor_no_is_refused(key: str, mark: Any) -> None:
    """It was trained in full, without a word."""
    with pytest.raises(
        SampleError, match=r"weight or train of a message is .{1,40}, not 0, 1, false or true"
    ):
        convert(("f:1", {"messages": [USER, {**ANSWER, key: mark}, USER, ANSWER]}), "messages")


def test_prompt_and_completion_become_a_conversation_whose_prompt_is_counted() -> None:
    talk = [USER, ANSWER, USER]
    turns = [
        {"from": "human", "value": "2 + 2?"},
        {"from": "gpt", "value": "4"},
        {"from": "human", "value": "2 + 2?"},
    ]
    both = ("a", [{"role": "user", "content": "a"}], 1), (talk, talk, 3), (turns, talk, 3)
    for prompt, messages, asked in both:
        for completion in ("4", [ANSWER], [{"from": "gpt", "value": "4"}]):
            sample = convert(("f:1", {"prompt": prompt, "completion": completion}), "prompt-completion")
            assert isinstance(sample, Conversation)
            assert (sample.messages, sample.asked) == ([*messages, ANSWER], asked)
    fields = {"prompt": "a", "completion": "b"}
    sample = convert(("f:1", fields), "prompt-completion", system="s")
    assert isinstance(sample, Conversation)
    assert (len(sample.messages), sample.asked) == (3, 2)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    fields = {"prompt": [USER, call], "completion": [{"role": "tool", "content": "4"}, ANSWER]}
    sample = convert(("f:1", fields), "prompt-completion")
    assert isinstance(sample, Conversation)
    assert sample.messages[2]["tool_call_id"] == "call00001"
    assert sample.asked == 2


def test_sharegpt_with_calls_becomes_what_templates_take() -> None:
    fields = {
        "conversations": [
            {"from": "human", "value": "Add."},
            {"from": "gpt", "value": "I will."},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "It is 2."},
        ],
        "tools": '[{"name": "add", "parameters": {}}]',
    }
    sample = convert(("f:1", fields), "sharegpt")
    assert isinstance(sample, Conversation)
    assert sample.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "call00001"}
    assert sample.messages == [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "I will.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "It is 2."},
    ]


def test_messages_with_arguments_as_text_parts_and_nulls() -> None:
    fields = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]},
            {"role": "assistant", "content": None, "name": None,
             "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
            {"role": "tool", "content": "4", "tool_call_id": "x", "tool_calls": None},
            ANSWER,
        ]
    }  # fmt: skip
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert messages_of(fields, "messages") == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "x"},
        ANSWER,
    ]


@pytest.mark.parametrize(
    ("fields", "format_", "message"),
    [
        ({"instruction": "a", "output": ""}, "alpaca", "the answer is empty"),
        ({"prompt": "a"}, "prompt-completion", "the field completion is missing; found are prompt"),
        ({"prompt": "a", "completion": None}, "prompt-completion", "has to be a string, it is null"),
        ({"prompt": 7, "completion": "b"}, "prompt-completion", "prompt has to be a string, it is int"),
        ({"prompt": "a", "completion": " \n"}, "prompt-completion", "the field completion is empty"),
        ({"prompt": "", "completion": "b"}, "prompt-completion", "the field prompt is empty"),
        ({"prompt": [], "completion": [ANSWER]}, "prompt-completion", "the field prompt is empty"),
        ({"prompt": ["a"], "completion": ["b"]}, "prompt-completion", "prompt and completion: a message has"),
        ({"prompt": [USER, ANSWER], "completion": [CALL]}, "prompt-completion", "the prompt ends with"),
        ({"prompt": [USER], "completion": [USER]}, "prompt-completion", "message 2 is of role user"),
        ({"prompt": "a", "completion": "b"}, "messages", "messages has to be a list"),
        ({"instruction": "a", "output": " \n"}, "alpaca", "the answer is empty"),
        ({"instruction": "", "input": "", "output": "b"}, "alpaca", "instruction and input are empty"),
        ({"instruction": "a", "output": None}, "alpaca", "output has to be a string, it is null"),
        ({"instruction": "a"}, "alpaca", "the field output is missing; found are instruction"),
        ({"instruction": 7, "output": "b"}, "alpaca", "instruction has to be a string, it is int"),
        ({"instruction": "a\0", "output": "b"}, "alpaca", "holds a NUL character"),
        ({"instruction": "\ud800", "output": "b"}, "alpaca", "half a surrogate pair"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "alpaca", "history has to be"),
        ({"instruction": "a", "output": "b", "history": 5}, "alpaca", "history has to be"),
        ({"text": "  "}, "text", "the text is empty"),
        ({"messages": None}, "messages", "has to be a list"),
        ({"messages": ["a"]}, "messages", "a message has to be an object, not str"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages", "unknown role 'bot'"),
        ({"messages": [ANSWER]}, "messages", "message 1 is of role assistant, after the start"),
        ({"messages": [USER, USER, ANSWER]}, "messages", "message 2 is of role user, after user"),
        ({"messages": [USER, ANSWER, ANSWER]}, "messages", "wrong role order: message 3"),
        ({"messages": [USER, {"role": "system", "content": "s"}, ANSWER]}, "messages", "role order"),
        ({"messages": [USER, {"role": "tool", "content": "4"}, ANSWER]}, "messages", "role order: message 2"),
        ({"messages": [USER, ANSWER, USER]}, "messages", "ends with role user, not with an answer"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "messages", "not text"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "sharegpt", "call is not JSON"),
        ({"conversations": [{"from": "function_call", "value": "[]"}]}, "sharegpt", "calls is empty"),
        ({"conversations": [{"from": "function_call", "value": '{"name": 1}'}]}, "sharegpt", "needs a name"),
        ({"messages": [USER, BAD_CALL]}, "messages", "the function of a call has to be an object"),
        ({"conversations": [HALF_CALL]}, "sharegpt", "a function call holds half a surrogate pair"),
        ({"messages": [USER, ANSWER], "tools": [{"name": "\ud800"}]}, "messages", "half a surrogate pair"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "messages", "tools is not JSON"),
        ({"messages": [USER, ANSWER], "tools": ["a"]}, "messages", "tools has to be a list of objects"),
    ],
)  # fmt: skip
def test_bad_samples_are_refused_with_the_reason(fields: dict[str, Any], format_: Any, message: str) -> None:
    with pytest.raises(SampleError) as caught:
        convert(("f:1", fields), format_)
    assert message in str(caught.value)


def test_bad_samples_are_counted_and_the_first_five_named(json_lines: Any) -> None:
    good, bad = {"instruction": "a", "output": "b"}, {"instruction": "a", "output": ""}
    path = json_lines([good, *[bad] * 3, good, *[bad] * 5])
    reader = Reader(open_sources(path, split="train", key="data.train"), Data(train=path))
    with pytest.raises(DataError) as caught:
        list(reader)
    assert caught.value.headline == "8 samples cannot be used; the first 5:"
    assert [p.where.rpartition(":")[2] for p in caught.value.problems] == ["2", "3", "4", "6", "7"]
    assert render(caught.value).count("data.skip_bad: true") == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
def test_bad_samples_are_left_out_on_request(json_lines: Any, order: tuple[int, ...]) -> None:
    """Wherever they stand: the first decides the format only if it has one."""
    samples = [{"text": "a"}, {"text": None}, {"text": "b"}]
    path = json_lines([samples[number] for number in order])
    reader = Reader(open_sources(path, split="train", key="data.train"), Data(train=path, skip_bad=True))
    assert [sample.text for sample in reader if isinstance(sample, Text)] == ["a", "b"]
    assert (reader.formats, reader.read, reader.bad.count) == (["text"], 3, 1)


def test_each_file_has_its_own_format_and_the_number_of_samples_is_limited(json_lines: Any) -> None:
    paths = [
        json_lines([{"text": "a"}, {"text": "b"}], "a.jsonl"),
        json_lines([{"instruction": "a", "output": "b"}] * 9, "b.jsonl"),
    ]
    reader = Reader(open_sources(paths, split="train", key="data.train"), Data(train=paths, max_samples=5))
    assert [type(sample) for sample in reader] == [Text, Text, Conversation, Conversation, Conversation]
    assert (reader.formats, reader.read) == (["text", "alpaca"], 5)


def test_a_named_format_is_not_guessed(json_lines: Any) -> None:
    path = json_lines([{"instruction": "a", "output": "b", "text": "c"}])
    (sample,) = Reader(open_sources(path, split="train", key="k"), Data(train=path, format="text"))
    assert sample == Text(f"{path}:1", "c")
