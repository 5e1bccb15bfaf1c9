"""Samples from local files (json, jsonl, parquet, txt) and hub datasets, read as a stream.

A source yields records `(where, fields)`, or the parts of a txt file's one document. It keeps at most one
record, one parquet batch or one part of a document in memory. Faults are counted in `Findings`.
"""

import codecs
import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import DataError, Problem
from shardwise.job.paths import DATA_SUFFIXES, NOT_READ, is_local

PART_CHARS = 4 << 20  # a longer document is read in parts of about this many characters

Record = tuple[str, dict[str, Any]]  # where the record stands (`file:line`), and its fields


@dataclass(frozen=True, slots=True)
class Text:
    """A document, or one part of a long one: `begins` and `ends` mark the first and the last part."""

    where: str
    text: str
    begins: bool = True
    ends: bool = True


@dataclass
class Findings:
    """Samples with the same kind of fault: how many, and the first few places."""

    headline: str
    fix: str
    tolerated: bool = False  # count and continue, instead of raising at the end of the reading
    count: int = 0
    first: list[Problem] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        self.count += 1
        if len(self.first) < 5:
            self.first.append(Problem(what=what, where=where))

    @property
    def fatal(self) -> bool:
        return self.count > 0 and not self.tolerated

    def raise_if_fatal(self) -> None:
        if self.fatal:
            more = f"; the first {len(self.first)}" if self.count > len(self.first) else ""
            last = Problem(what=self.first[-1].what, where=self.first[-1].where, fix=self.fix)
            one = self.headline.replace("s ", " ", 1).replace(" are ", " is ", 1)
            said = one if self.count == 1 else self.headline
            raise DataError(f"{self.count} {said}{more}:", problems=[*self.first[:-1], last])


@dataclass(frozen=True)
class FileSource:
    path: Path

    def fingerprint(self) -> str:
        """Return a text that changes with the content, and with the suffix that decides how it is read."""
        with self.path.open("rb") as file:
            return f"{self.path.suffix.lower()}:{hashlib.file_digest(file, 'sha256').hexdigest()}"

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
    subset: str | None
    rows: Any  # a `datasets.Dataset`, memory-mapped by that library

    def fingerprint(self) -> str:
        return f"hub:{self.name}:{self.subset}:{self.split}:{self.rows._fingerprint}"

    def read(self, bad: Findings) -> Iterator[Record | Text]:  # noqa: ARG002 (as FileSource has it)
        for number, row in enumerate(self.rows, 1):
            yield f"{self.name}[{self.split}]:{number}", dict(row)


Source = FileSource | HubSource


def open_sources(spec: str | list[str], *, split: str, subset: str | None = None, key: str) -> list[Source]:
    """Open files, folders or hub datasets. `key` is the job's key that names them, for error messages."""
    if not spec:
        raise DataError("no data is named", where=key, fix="name a file, a folder or a hub dataset")
    if not isinstance(spec, str):
        shared: Any = {"split": split, "subset": subset, "key": key}
        return [source for name in spec for source in open_sources(name, **shared)]
    if not is_local(spec) and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", spec):
        return [_hub(spec, split=split, subset=subset, key=key)]
    return [FileSource(path) for path in _local(Path(spec), key=key)]


def _local(path: Path, *, key: str) -> list[Path]:
    kinds = ", ".join(DATA_SUFFIXES)
    if path.is_dir():
        every = sorted(path.rglob("*"))
        seen = [p for p in every if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if unread := [p for p in seen if _unread(p)]:
            more = f", nor {len(unread) - 1} more of that folder" if unread[1:] else ""
            fix = f"unpack, convert or remove it ({kinds} are read), or name the files that are to be read"
            raise DataError(f"{unread[0]} cannot be read{more}", where=key, fix=fix)
        files = [p for p in seen if p.is_file() and p.suffix.lower() in DATA_SUFFIXES]
        if not files:
            raise DataError(f"the folder {path} holds no data", where=key, fix=f"put files into it: {kinds}")
        return files
    if not path.exists():
        parent = next(p for p in path.absolute().parents if p.exists())
        raise DataError(f"there is no file {path}", where=key, fix=f"look into {parent}, which exists")
    if path.suffix.lower() not in DATA_SUFFIXES:
        kind = path.suffix or "no suffix"
        raise DataError(f"{path} is of an unknown kind ({kind})", where=key, fix=f"use one of {kinds}")
    return [path]


def _unread(path: Path) -> bool:
    """Whether an entry of a folder seems to be data, and is not read; nor are links to folders followed."""
    if path.is_dir():
        return path.is_symlink()
    kind = path.suffix.lower()
    return kind in NOT_READ or (kind in DATA_SUFFIXES and not path.is_file())


def _hub(name: str, *, split: str, subset: str | None, key: str) -> HubSource:
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # a dozen unrelated kinds: network, permission, split, format
        reason = str(error).strip().splitlines() or [type(error).__name__]
        what = f"{name} is neither a local path nor a hub dataset that could be loaded: {reason[0]}"
        fix = f"check the name, data.subset ({subset}) and data.split ({split}); without a network, "
        fix += f"download it first (hf download --repo-type dataset {name}) and name the folder"
        raise DataError(what, where=key, fix=fix) from error
    return HubSource(name=name, split=split, subset=subset, rows=rows)


def _lines(path: Path, bad: Findings) -> Iterator[tuple[str, str]]:
    """Yield the place and text of each line; one that is not UTF-8 is added to `bad` and left empty."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                line, place = "", f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
                bad.add(f"{path}:{number}", f"not UTF-8: {place}{_conversion(raw)}")
            yield f"{path}:{number}", line


def _conversion(raw: bytes) -> str:
    """How to convert a line that is text in another encoding."""
    name = "UTF-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "GB18030"
    with suppress(UnicodeDecodeError):
        if name == "UTF-16" or raw.decode(name):
            return f"; if it is {name}: iconv -f {name} -t UTF-8"
    return ""


def _json_lines(path: Path, bad: Findings) -> Iterator[Record]:
    for where, line in _lines(path, bad):
        try:
            if line.strip():
                yield from _record(where, json.loads(line.rstrip("\r\n")), bad)
        except (ValueError, RecursionError) as error:  # ValueError alone: an integer of 5000 digits
            first = where.endswith(":1")
            hint = " (a .json file holds a list of objects, or one object a line)" if first else ""
            bad.add(where, f"not JSON: {error}{hint}")


def _record(where: str, value: Any, bad: Findings) -> Iterator[Record]:
    if isinstance(value, dict):
        yield where, value
    else:
        bad.add(where, f"a sample has to be an object, this is {type(value).__name__}")


def _json_list(path: Path, bad: Findings) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        window = _Window(path, file)
        window.expect("[")
        if closed := window.peek() == "]":
            window.expect("]")
        while not closed:
            window.peek()  # moves to the element's first character
            where = window.where()
            yield from _record(where, window.value(), bad)
            closed = window.expect(",]") == "]"
        if found := window.peek():
            raise window.broken(f"the list has ended, and {found!r} follows")


class _Window:
    """The part of a JSON text that is being parsed; it grows only while a value does not end in it."""

    CHUNK = 1 << 20

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file, self._json = path, file, json.JSONDecoder()
        self._text, self._at, self._counted = "", 0, 0
        self._line = 1  # of the character `_text[_counted]`

    def where(self, ahead: int = 0) -> str:
        """Return the place `file:line` of the character `ahead` of the next one."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return f"{self._path}:{self._line + self._text.count(chr(10), self._at, self._at + ahead)}"

    def peek(self) -> str:
        """Move to the next character that is not white space and return it; "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if not self._grow():
                return ""

    def expect(self, choices: str) -> str:
        found = self.peek()
        if not found or found not in choices:
            raise self.broken(f"expected {' or '.join(choices)}, found {found or 'the end of the file'}")
        self._at += 1
        return found

    def value(self) -> Any:
        while True:
            try:
                value, self._at = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                ahead = error.pos - self._at
                if not self._grow():
                    raise self.broken(error.msg, ahead) from None
            except ValueError as error:  # valid JSON that Python refuses: an integer of 5000 digits
                raise self.broken(str(error)) from None
            except RecursionError:
                raise self.broken("nested too deeply") from None
            else:
                return value

    def _grow(self) -> bool:
        """Drop what is parsed, append as much again as is left (at least a chunk); False at the end."""
        self.where()
        self._text, self._at, self._counted = self._text[self._at :], 0, 0
        try:
            more = self._file.read(max(self.CHUNK, len(self._text)))
        except UnicodeDecodeError:
            faults = Findings("", "")
            deque(_lines(self._path, faults), maxlen=0)
            fix = f"convert it: iconv -t utf-8 {self._path}"
            raise DataError(faults.first[0].what, where=faults.first[0].where, fix=fix) from None
        self._text += more
        return bool(more)

    def broken(self, what: str, ahead: int = 0) -> DataError:
        fix = "correct the file; a broken list cannot be skipped"
        return DataError(f"not JSON: {what}", where=self.where(ahead), fix=fix)


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]


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
        what, where = f"not a readable parquet file: {error}", f"{path}:{number}"
        raise DataError(what, where=where, fix="write or download the file again") from error


def _document(path: Path, bad: Findings) -> Iterator[Text]:
    """Yield the file as one document, in parts that end before a line starting with a letter.

    A byte-level tokenizer splits there anyway, so the parts give the same tokens. A line that cannot be read
    counts as one bad sample.
    """
    lines: list[str] = []
    size, start, begins, before = 0, f"{path}:1", True, bad.count
    for where, line in _lines(path, bad):
        if "\0" in line:
            bad.add(where, f"a NUL byte at column {line.index(chr(0)) + 1}")
            continue
        if size >= PART_CHARS and line[:1].isalnum():
            yield Text(start, "".join(lines), begins=begins, ends=False)
            lines, size, start, begins = [], 0, where, False
        lines.append(line)
        size += len(line)
    text = "".join(lines)
    if begins and not text.strip():
        if bad.count == before:
            bad.add(str(path), "the document is empty")
    else:
        yield Text(start, text, begins=begins, ends=True)
