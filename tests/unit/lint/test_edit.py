"""Texts are read with the place of every key, and changed in no other place than asked for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import JobError
from shardwise.lint.check import check, load, write
from shardwise.lint.document import UnreadableError
from shardwise.lint.edit import CannotEditError, Change, Drop, Put, Rename, Strict, edited, in_words
from shardwise.lint.read import read
from shardwise.lint.setup import Setup
from shardwise.lint.text import read_json, read_yaml

TEXT = """{
  // whole batch
  "a": 1,  /* one */
  "b": {"c": [1, 2], "d": "x // no comment"},
  "e": 5e8   # last
}
"""


def test_every_key_has_its_line_and_comments_are_no_values() -> None:
    document = read_json(TEXT, "t")
    assert document.values == {"a": 1, "b": {"c": [1, 2], "d": "x // no comment"}, "e": 5e8}
    assert [document.line(key) for key in (("a",), ("b", "d"), ("e",), ("b", "gone"))] == [3, 4, 5, 4]
    assert len(document.comments) == 3


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ('{\n "a": True}', 2, "'True' is not a JSON value"),
        ('{\n "a": 1\n "b": 2}', 3, "no comma"),
        ('{"a": 1', 1, "never closed"),
        ("{'a': 1}", 1, "double quotes"),
        ('{"a": 1} x', 1, "after the closing brace"),
        ('{"a": 01}', 1, "not a JSON value"),
    ],
)
def test_what_is_no_json_is_said_with_its_line(text: str, line: int, what: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_json(text, "t")
    assert caught.value.line == line
    assert what in caught.value.what


def test_changes_leave_the_rest_of_a_json_text() -> None:
    document = read_json(TEXT, "t")
    assert edited(document, [Put(key=("a",), value=2)]).text == TEXT.replace('"a": 1', '"a": 2')
    assert edited(document, [Rename(key=("b", "c"), name="k")]).text == TEXT.replace('"c"', '"k"')
    dropped = edited(document, [Drop(key=("e",))])
    assert dropped.text == TEXT.replace('},\n  "e": 5e8   # last\n', "}\n")
    added = edited(document, [Put(key=("f", "g"), value=True)])
    assert added.text == TEXT.replace('"e": 5e8', '"e": 5e8,\n  "f": {"g": true}')
    strict = edited(document, [Strict()])
    assert json.loads(strict.text) == document.values
    assert strict.text.splitlines()[1] == '  "a": 1,'


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5),
    lambda inner: st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=4), VALUES, min_size=1, max_size=5), st.randoms())
def test_any_json_is_read_as_python_reads_it_and_edits_hit_their_key(
    values: dict[str, object], chance: random.Random
) -> None:
    text = json.dumps(values, indent=chance.choice([None, 2]), ensure_ascii=chance.random() < 0.5)
    document = read_json(text, "t")
    assert document.values == values
    key = chance.choice(sorted(key for key in document.marks if document.marks[key].key))
    holder: object = json.loads(text)
    whole = holder
    for part in key[:-1]:
        holder = holder[part]  # type: ignore[index]
    assert isinstance(holder, dict)
    holder[key[-1]] = 7
    assert json.loads(edited(document, [Put(key=key, value=7)]).text) == whole
    del holder[key[-1]]
    assert json.loads(edited(document, [Drop(key=key)]).text) == whole


YAML = "# mine\nmixed_precision: no\ndeepspeed_config:\n  zero_stage: 3  # sharded\n  zero3_init_flag: true\n"


def test_changes_leave_the_rest_of_a_yaml_text() -> None:
    document = read_yaml(YAML, "t")
    assert document.values["mixed_precision"] is False
    assert edited(document, [Put(key=("mixed_precision",), value="no")]).text == YAML.replace(
        "no\n", "'no'\n", 1
    )
    inside = ("deepspeed_config", "zero_stage")
    assert edited(document, [Drop(key=inside)]).text == YAML.replace("  zero_stage: 3  # sharded\n", "")
    added = edited(document, [Put(key=("deepspeed_config", "x"), value="none")])
    assert yaml.safe_load(added.text)["deepspeed_config"]["x"] == "none"
    with pytest.raises(CannotEditError):
        edited(read_yaml("a: {b: 1, c: 2}\n", "t"), [Drop(key=("a", "b"))])


def test_a_file_is_written_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"a": 1}')
    file.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    before = read_json(link.read_text(), str(link))
    document = edited(before, [Put(key=("a",), value=2)])
    write(document, before)
    assert file.read_text() == '{"a": 2}'
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "link.json"]
    with pytest.raises(JobError, match="changed after"):
        write(document, before)  # the file holds 2 by now
    file.chmod(0o440)
    with pytest.raises(JobError, match="read-only"):
        write(before, document)
    assert file.read_text() == '{"a": 2}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "link.json"]


ALIASED = "base: &d\n  stage: 2\n  device: none\ndeepspeed_config: *d\nmore:\n  <<: *d\nown: 1\n"


@pytest.mark.parametrize(
    "change",
    [
        Drop(key=("deepspeed_config", "device")),
        Drop(key=("base", "device")),
        Put(key=("deepspeed_config", "stage"), value=3),
        Put(key=("deepspeed_config", "x"), value=3),
        Rename(key=("base", "stage"), name="zero_stage"),
        Drop(key=("deepspeed_config",)),
    ],
)
def test_text_that_two_keys_share_is_not_edited(change: Change) -> None:
    document = read_yaml(ALIASED, "t")
    with pytest.raises(CannotEditError):
        edited(document, [change])
    assert "own: 2" in edited(document, [Put(key=("own",), value=2)]).text


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, ' + "////// ZeRO ////// " * 20 + "\n}",
        '{"a": 1, ' + "#" * 40 + "\n}",
        '{"a": 1, ' + "#\n" * 40_000 + "}",
        '{"a": 1, ' + "/* " * 20_000 + "*/ }",
    ],
)
def test_comments_of_any_length_are_read_at_once(text: str) -> None:
    began = time.process_time()
    document = read_json(text, "t")
    assert (dict(document.values), document.trailing_commas) == ({"a": 1}, (7,))
    assert json.loads(edited(document, [Strict()]).text) == {"a": 1}
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "text", ['{"a": 1, ' + "/* " * 100_000, '{"a": ' + '"\\"' * 100_000, "{" + "," * 100_000]
)
def test_broken_text_of_any_length_is_refused_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(UnreadableError):
        read_json(text, "t")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"zero_optimization": {"stage": 2}}', "deepspeed"),
        ('// pasted\n{"zero_optimisation": {"stage": 2}}', "deepspeed"),
        ('{"version": 2, "reshard_after_forward": true}', "training"),
        ('{"output_dir": "o", "deepspeed": "ds.json"}', "training"),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "accelerate"),
        ("model: {source: x}\ndata: {train: y}\n", "job"),
        ("output_dir: o\nload_in_8bit: true\n", "training"),
        ("import torch\nmodel = 1\n", "training"),
        ("#!/bin/bash\nsrun torchrun --nproc_per_node 4 train.py\n", "training"),
    ],
)
def test_a_file_is_known_by_its_content(text: str, kind: str) -> None:
    assert read(text, "t").kind == kind


def test_what_is_not_known_or_not_there_is_a_finding(tmp_path: Path) -> None:
    file = tmp_path / "notes.yaml"
    file.write_text("groceries: [milk]\n")
    other = tmp_path / "package.json"
    other.write_text('{"private": true}')
    documents, broken = load([file, other, file])
    assert documents == ()
    assert [(one.rule, one.severity) for one in check(Setup(), broken).findings] == [
        ("unreadable", "error")
    ] * 2
    (tmp_path / "data.json").write_bytes(b"\xff\xfe")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    documents, broken = load([tmp_path / name for name in ("gone.json", "data.json", "ds.json")])
    assert [Path(one.name).name for one in documents] == ["ds.json"]
    assert [one.what.partition(str(tmp_path))[0] for one in broken] == [
        "there is no file ",
        "it is not UTF-8 text",
    ]
    assert {one.severity for one in broken} == {"error"}


TEXTS = [path.read_text() for path in sorted((Path(__file__).parent / "examples").iterdir())] + [YAML, TEXT]


@settings(deadline=None)
@given(st.sampled_from(TEXTS), st.randoms())
def test_a_damaged_file_is_a_finding_and_never_a_crash(text: str, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice([0, 1, 1, 5, 40]))
        text = text[:start] + chance.choice(["", "", "{", "]", '"', ":", "\n", "&a *a", "1e999"]) + text[end:]
    try:
        document = read(text, "t")
    except UnreadableError:
        return
    if document.kind != "job":
        check(Setup(documents=(document,)))


LETTERS = "abcdefghijklmnopq"
ALIASES = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise(LETTERS))


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: 2001-99-99\n",
        ALIASES,
        "a: " + "[" * 5000,
        '{"zero_optimization": ' + "9" * 5000 + "}",
        '{"a":' * 2000,
        "import x\n" + "(" * 5000,
    ],
)
def test_what_would_take_for_ever_is_refused(text: str) -> None:
    with pytest.raises(UnreadableError):
        read(text, "t")


def test_the_page_of_rules_is_current() -> None:
    """Made again by `python docs/check_page.py > docs/check.md`."""
    docs = Path(__file__).parents[3] / "docs"
    made = subprocess.run(
        [sys.executable, docs / "check_page.py"], capture_output=True, text=True, check=True
    )
    assert (docs / "check.md").read_text(encoding="utf-8") == made.stdout


def test_keys_of_characters_that_yaml_does_not_print_are_kept_apart() -> None:
    document = read_json('{"\x7f": 1,\t"\x80": 2}', "a.json")
    assert document.duplicates == ()
    assert [*document.marks] == [("\x7f",), ("\x80",)]


@pytest.mark.parametrize(
    ("text", "change", "said"),
    [
        ('{"a": {"b": "1"}}', Put(("a", "b"), 1), '`a.b`: "1" -> 1'),
        ('{"a": {"b": "1"}}', Put(("a", "c"), True), "`a.c`: absent -> true"),
        ('{"a": {"b": null}}', Drop(("a", "b")), "`a.b`: null -> removed"),
        ('{"a": {"b": 1}}', Rename(("a", "b"), "c"), "`a.b` -> `a.c`"),
        ('{"a": 1,} // old', Strict(), "1 comments, 1 trailing commas -> removed"),
    ],
)
def test_a_change_is_said_with_its_key_and_both_values(text: str, change: Change, said: str) -> None:
    assert in_words(read_json(text, "a.json"), [change]) == said
