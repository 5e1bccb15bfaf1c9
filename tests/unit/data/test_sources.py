"""Reading files: every kind, every fault with its place, and bounded memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.sources import PART_CHARS, FileSource, Findings, Text, _hub, open_sources
from shardwise.errors import DataError

RECORDS = [{"text": f"sample {number}: ünïcödé 😀", "n": number} for number in range(5)]


def findings() -> Findings:
    return Findings("bad", "mend")


def read(path: Path) -> list[Any]:
    bad = findings()
    items = list(FileSource(path).read(bad))
    assert bad.count == 0, bad.first
    return items


def faults(path: Path) -> list[tuple[str, str]]:
    bad = findings()
    list(FileSource(path).read(bad))
    return [(problem.where.removeprefix(str(path)), problem.what) for problem in bad.first]


@pytest.mark.parametrize("indent", [None, 0, 3])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_json_list_gives_records_with_the_line_they_start_on(
    tmp_path: Path, indent: int | None, bom: bytes
) -> None:
    path = tmp_path / "a.json"
    text = json.dumps(RECORDS, indent=indent, ensure_ascii=False)
    path.write_bytes(bom + b"\n " + text.encode())
    items = read(path)
    assert [fields for _, fields in items] == RECORDS
    lines = path.read_text(encoding="utf-8").split("\n")
    for where, fields in items if indent is not None else ():
        line = int(where.rpartition(":")[2])
        assert f"sample {fields['n']}" in lines[line]  # the line after the one with the brace


def test_other_kinds_of_files(tmp_path: Path) -> None:
    lines = "\r\n\n".join(json.dumps(record) for record in RECORDS)
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text(lines, newline="")
        items = read(tmp_path / name)
        assert [fields for _, fields in items] == RECORDS
        assert items[2][0] == f"{tmp_path / name}:5"
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    assert [fields for _, fields in read(tmp_path / "a.parquet")] == RECORDS
    assert read(tmp_path / "a.parquet")[4][0] == f"{tmp_path}/a.parquet:5"
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read(tmp_path / "a.txt") == [Text(f"{tmp_path}/a.txt:1", "one\n\ntwo\n")]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pieces")


@settings(max_examples=25, deadline=None)
@given(
    value=st.lists(
        st.dictionaries(
            st.text(max_size=5), st.none() | st.text(max_size=9) | st.lists(st.integers(), max_size=3)
        ),
        max_size=4,
    ),
    chunk=st.integers(1, 40),
)
def test_a_json_list_is_read_the_same_in_pieces_of_any_size(
    pieces: Path, value: list[Any], chunk: int
) -> None:
    path = pieces / "a.json"
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.data.sources._Window.CHUNK", chunk)
        assert [fields for _, fields in read(path)] == value


GBK = "not UTF-8: byte 0xd6 at column 8; if it is GB18030: iconv -f GB18030 -t UTF-8"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1}\n{"a": \n{"a": 2}\n', [(":2", "not JSON")]),
        (b'{"a": 1}\n[1]\n', [(":2", "a sample has to be an object, this is list")]),
        (b'{"a": 1}\n{"a": "\xff"}\n', [(":2", "not UTF-8: byte 0xff at column 8")]),
        ('{"a": "\u4e2d\u6587"}\n'.encode("gbk"), [(":1", GBK)]),
        (b'{"a": "b\n{"a": "c"}\n', [(":1", "not JSON: Unterminated string")]),
        (b"[" * 100_000 + b"\n", [(":1", "not JSON")]),
        (b'{"a": ' + b"1" * 5000 + b"}\n", [(":1", "not JSON: Exceeds the limit")]),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, expected: list[tuple[str, str]]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    found = faults(path)
    assert [where for where, _ in found] == [where for where, _ in expected]
    assert all(what.startswith(start) for (_, what), (_, start) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("content", "message", "line"),
    [
        (b'[{"a": 1},\n {"a": 2}\n {"a": 3}]', "expected , or ], found {", 3),
        (b'[{"a": 1},\n {"a": ]', "not JSON: Expecting value", 2),
        (b'[{"a": 1},\n {"a": 2}', "found the end of the file", 2),
        (b'[{"a": 1},\n\n {"a": "\xff"}]', "not UTF-8", 3),
        (b'[{"a": 1}]\n[{"a": 2}]', "the list has ended, and '[' follows", 2),
        (b'[{"a": 1}]\0', "the list has ended", 1),
        (b"[" * 100_000, "nested too deeply", 1),
        (b'[{"a": 1},\n {"a": ' + b"1" * 5000 + b"}]", "not JSON: Exceeds the limit", 2),
    ],
)
def test_a_broken_list_is_an_error_with_its_line(
    tmp_path: Path, content: bytes, message: str, line: int
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r".") as caught:
        list(FileSource(path).read(findings()))
    assert message in caught.value.problems[0].what
    assert caught.value.problems[0].where == f"{path}:{line}"


def test_a_damaged_parquet_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(RECORDS), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(FileSource(path).read(findings()))


def test_faults_of_a_document_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nbad \xe9\nnul \x00 here\n")
    assert faults(path) == [
        (":2", "not UTF-8: byte 0xe9 at column 5"),
        (":3", "a NUL byte at column 5"),
    ]
    path.write_bytes(b" \n\n")
    assert faults(path) == [("", "the document is empty")]


def test_a_long_document_comes_in_parts_that_make_up_the_whole(tmp_path: Path) -> None:
    text = "A line of text that is not very long.\n   indented\n\n" * (3 * PART_CHARS // 52)
    path = tmp_path / "a.txt"
    path.write_text(text)
    parts = read(path)
    assert len(parts) >= 3
    assert "".join(part.text for part in parts) == text
    assert [(part.begins, part.ends) for part in parts] == [
        (number == 0, number == len(parts) - 1) for number in range(len(parts))
    ]
    assert all(part.text[0] == "A" for part in parts)  # cut only where a line starts with a letter


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_memory_stays_bounded_by_parts_not_by_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    line = json.dumps({"text": "x" * 20_000}) if name != "a.txt" else "x" * 20_000
    separator = ",\n" if name == "a.json" else "\n"
    with path.open("w") as file:
        file.write("[" if name == "a.json" else "")
        for number in range(3000):
            file.write(line + (separator if number < 2999 else ""))
        file.write("]" if name == "a.json" else "")
    tracemalloc.start()
    count = sum(1 for _ in FileSource(path).read(findings()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == (3000 if name != "a.txt" else -(-3000 * 20_001 // (PART_CHARS + 20_001)))
    assert peak < 20 * 2**20 < path.stat().st_size / 2


def test_a_folder_is_read_in_sorted_order_without_foreign_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "sub/c.txt", ".hidden/d.txt", "README.md", "sub/.e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    names = [str(source.path) for source in open_sources(str(tmp_path), split="train", key="data.train")]
    assert names == [str(tmp_path / name) for name in ("a.jsonl", "b.txt", "sub/c.txt")]
    both = open_sources([str(tmp_path / "b.txt"), str(tmp_path / "sub")], split="train", key="data.train")
    assert [str(source.path) for source in both] == [str(tmp_path / "b.txt"), str(tmp_path / "sub/c.txt")]


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.ndjson", "sub/c.csv", "more"])
def test_a_folder_with_data_that_is_not_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "sub").mkdir()
    if name == "b.jsonl":
        (tmp_path / name).symlink_to(tmp_path / "gone.jsonl")
    elif name == "more":
        (tmp_path / name).symlink_to(tmp_path / "sub", target_is_directory=True)
    else:
        (tmp_path / name).write_text("a,b")
    os.mkfifo(tmp_path / "z.jsonl")
    with pytest.raises(DataError, match=f"{name} cannot be read, nor 1 more of that folder") as caught:
        open_sources(str(tmp_path), split="train", key="data.train")
    assert "name the files" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("make", "message", "fix"),
    [
        (lambda tmp: str(tmp / "no" / "x.json"), "there is no file", "which exists"),
        (str, "holds no data", ".jsonl"),
        (lambda tmp: str(tmp / "x.csv"), "of an unknown kind (.csv)", ".parquet"),
    ],
)
def test_what_cannot_be_opened_is_said_with_a_way_out(
    tmp_path: Path, make: Callable[[Path], Any], message: str, fix: str
) -> None:
    if message.startswith("of an"):
        (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(DataError) as caught:
        open_sources(make(tmp_path), split="train", key="data.train")
    problem = caught.value.problems[0]
    assert message in problem.what
    assert fix in problem.fix
    assert problem.where == "data.train"


def test_a_hub_dataset_that_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="neither a local path nor a hub dataset") as caught:
        open_sources("nobody/no-such-dataset", split="train", key="data.train")
    assert "download it first" in caught.value.problems[0].fix


def test_a_hub_dataset_with_several_configurations_needs_its_subset(tmp_path: Path) -> None:
    """A folder with the hub's own description of configurations, read by the datasets library."""
    folder = tmp_path / "set"
    for name, text in {"one": "first", "two": "second"}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("one", "two"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    sources = [_hub(str(folder), split="train", subset=name, key="data.train") for name in ("one", "two")]
    records = [fields for source in sources for _, fields in source.read(Findings("", ""))]  # type: ignore[misc]
    assert records == [{"text": "first"}, {"text": "second"}]
    assert sources[0].fingerprint() != sources[1].fingerprint()
    with pytest.raises(DataError, match="Config name is missing") as raised:
        _hub(str(folder), split="train", subset=None, key="data.train")
    assert "data.subset (None)" in raised.value.problems[0].fix
