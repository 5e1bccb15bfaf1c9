"""Where samples come from: local files (json, jsonl, parquet, txt) and hub datasets, read as a stream.

A source gives records `(where, fields)`, or for a txt file the parts of its one document. Nothing
here holds more than one record, one parquet batch or one part of a document in memory. What cannot
be read is handed to `Findings`, which counts it and remembers the first few places.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from shardwise.errors import DataError, Problem

SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
PART_CHARS = 4 << 20
"""A longer document is read in parts of about this many characters."""

Record = tuple[str, dict[str, Any]]
"""Where the record stands (`file:line`), and its fields."""


@dataclass(frozen=True, slots=True)
class Text:
    """A document, or one part of a long one: `begins` and `ends` say which parts are its outer ones."""

    where: str
    text: str
    begins: bool = True
    ends: bool = True


@dataclass
class Findings:
    """Samples with the same kind of fault: how many, and the first few places."""

    headline: str
    fix: str
    tolerated: bool = False
    """Count and go on, instead of raising at the end of the reading."""
    shown: int = 5
    count: int = 0
    first: list[Problem] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        self.count += 1
        if len(self.first) < self.shown:
            self.first.append(Problem(what=what, where=where))

    @property
    def fatal(self) -> bool:
        return self.count > 0 and not self.tolerated

    def raise_if_fatal(self) -> None:
        if self.fatal:
            more = f"; the first {len(self.first)}" if self.count > len(self.first) else ""
            last = self.first[-1]
            problems = [*self.first[:-1], Problem(what=last.what, where=last.where, fix=self.fix)]
            raise DataError(f"{self.count} {self.headline}{more}:", problems=problems)


class Source(Protocol):
    @property
    def name(self) -> str: ...

    def fingerprint(self) -> str:
        """Changes whenever the content does."""

    def read(self, bad: Findings) -> Iterator[Record | Text]:
        """The records in order."""


@dataclass(frozen=True)
class FileSource:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def fingerprint(self) -> str:
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return f"{self.path.suffix.lower()}:{digest}"  # the suffix decides how the bytes are read

    def read(self, bad: Findings) -> Iterator[Record | Text]:
        suffix = self.path.suffix.lower()
        if suffix == ".txt":
            return _document(self.path, bad)
        if suffix == ".parquet":
            return _parquet(self.path)
        if suffix == ".json" and _first_byte(self.path) == b"[":
            return _json_list(self.path, bad)
        return _json_lines(self.path, bad)


@dataclass(frozen=True)
class HubSource:
    name: str
    split: str
    rows: Any
    """A `datasets.Dataset`, memory-mapped by that library."""

    def fingerprint(self) -> str:
        return f"hub:{self.name}:{self.split}:{self.rows._fingerprint}"

    def read(self, bad: Findings) -> Iterator[Record | Text]:  # noqa: ARG002 (a protocol's argument)
        for number, row in enumerate(self.rows, 1):
            yield f"{self.name}[{self.split}]:{number}", dict(row)


def open_sources(spec: str | list[str], *, split: str, key: str) -> list[Source]:
    """Files, folders or one hub dataset. `key` is the job's key that names them, for error messages."""
    entries = [spec] if isinstance(spec, str) else spec
    if not entries:
        raise DataError("no data is named", where=key, fix="name a file, a folder or a hub dataset")
    if len(entries) == 1 and not Path(entries[0]).exists() and _looks_like_hub_id(entries[0]):
        return [_hub(entries[0], split=split, key=key)]
    return [FileSource(path) for entry in entries for path in _local(Path(entry), key=key)]


def _looks_like_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)) and not name.lower().endswith(SUFFIXES)


def _local(path: Path, *, key: str) -> list[Path]:
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file() and _is_data(p.relative_to(path)))
        if not inside:
            raise DataError(
                f"the folder {path} holds no data", where=key, fix=f"put files into it: {', '.join(SUFFIXES)}"
            )
        return inside
    if not path.exists():
        parent = next(p for p in path.absolute().parents if p.exists())
        raise DataError(f"there is no file {path}", where=key, fix=f"look into {parent}, which exists")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{path} is of an unknown kind ({path.suffix or 'no suffix'})",
            where=key,
            fix=f"use one of {', '.join(SUFFIXES)}",
        )
    return [path]


def _is_data(relative: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and relative.suffix.lower() in SUFFIXES


def _hub(name: str, *, split: str, key: str) -> HubSource:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # a dozen unrelated kinds: network, permission, split, format
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{name} is neither a local path nor a hub dataset that could be loaded: {reason[0]}",
            where=key,
            fix=f"check the name and data.split ({split}); without a network, download it first "
            f"(hf download --repo-type dataset {name}) and name the folder",
        ) from error
    return HubSource(name=name, split=split, rows=rows)


def _json_lines(path: Path, bad: Findings) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield from _record(where, json.loads(line), bad)
            except UnicodeDecodeError as error:
                bad.add(where, f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}")
            except (ValueError, RecursionError) as error:  # ValueError alone: an integer of 5000 digits
                hint = " (a .json file holds a list of objects, or one object a line)" if number == 1 else ""
                bad.add(where, f"not JSON: {error}{hint}")


def _record(where: str, value: Any, bad: Findings) -> Iterator[Record]:
    if isinstance(value, dict):
        yield where, value
    else:
        bad.add(where, f"a sample has to be an object, this is {type(value).__name__}")


def _json_list(path: Path, bad: Findings) -> Iterator[Record]:
    with path.open("rb") as file:
        window = _Window(path, file)
        window.expect("[")
        if window.peek() == "]":
            return
        while True:
            window.peek()  # moves to the element's first character
            where = f"{path}:{window.line}"
            yield from _record(where, window.value(), bad)
            if window.expect(",]") == "]":
                return


class _Window:
    """The part of a JSON text that is being parsed; grows only while a value does not end in it."""

    CHUNK = 1 << 20

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._line = 1  # of the character `_text[_counted]`
        self._counted = 0
        self._ended = False

    @property
    def line(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def peek(self) -> str:
        """The next character that is not white space, unread; "" at the end."""
        while True:
            rest = len(self._text)
            while self._at < rest and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < rest:
                return self._text[self._at]
            if not self._grow():
                return ""

    def expect(self, choices: str) -> str:
        found = self.peek()
        if not found or found not in choices:
            what = f"expected {' or '.join(choices)}, found {found or 'the end of the file'}"
            raise self._broken(what, self._at)
        self._at += 1
        return found

    def value(self) -> Any:
        while True:
            try:
                value, self._at = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._grow():
                    raise self._broken(error.msg, error.pos) from None
            except ValueError as error:  # valid JSON that Python refuses: an integer of 5000 digits
                raise self._broken(str(error), self._at) from None
            except RecursionError:
                raise self._broken("nested too deeply", self._at) from None
            else:
                return value

    def _grow(self) -> bool:
        """Drop what is read, append as much again as is left (at least a chunk); False at the end."""
        if self._ended:
            return False
        line = self.line
        self._text, self._at, self._counted = self._text[self._at :], 0, 0
        raw = self._file.read(max(self.CHUNK, len(self._text)))
        self._ended = not raw
        try:
            self._text += self._decoder.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            line += self._text.count("\n") + error.object[: error.start].count(b"\n")
            raise DataError(
                "not UTF-8", where=f"{self.path}:{line}", fix=f"convert it: iconv -t utf-8 {self.path}"
            ) from None
        return True

    def _broken(self, what: str, position: int) -> DataError:
        line = self.line + self._text.count("\n", self._at, position)
        return DataError(
            f"not JSON: {what}",
            where=f"{self.path}:{line}",
            fix="mend the file; a broken list cannot be skipped over",
        )


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(codecs.BOM_UTF8)
    return head.lstrip()[:1]


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"not a readable parquet file: {error}",
            where=f"{path}:{number}",
            fix="write or download the file again",
        ) from error


def _document(path: Path, bad: Findings) -> Iterator[Text]:
    """The whole file is one document, given in parts that end before a line starting with a letter.

    A byte-level tokenizer splits there anyway, so that the parts give the tokens of the whole. A line
    that cannot be read counts as one bad sample.
    """
    lines: list[str] = []
    size, part_line, begins = 0, 1, True
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = _document_line(path, number, raw, bad)
            if size >= PART_CHARS and line[:1].isalnum():
                yield Text(f"{path}:{part_line}", "".join(lines), begins=begins, ends=False)
                lines, size, part_line, begins = [], 0, number, False
            lines.append(line)
            size += len(line)
    text = "".join(lines)
    if begins and not text.strip():
        bad.add(str(path), "the document is empty")
    else:
        yield Text(f"{path}:{part_line}", text, begins=begins, ends=True)


def _document_line(path: Path, number: int, raw: bytes, bad: Findings) -> str:
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        bad.add(f"{path}:{number}", f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}")
        return ""
    if "\0" in line:
        bad.add(f"{path}:{number}", f"a NUL byte at column {line.index(chr(0)) + 1}")
        return ""
    return line
