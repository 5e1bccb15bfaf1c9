"""A checkpoint's manifest: its files with their hashes, and the run that it belongs to.

File formats do not notice a flipped bit or a zeroed page, so the manifest holds the SHA-256 of every
file, and of itself. A folder without a manifest that verifies is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.job.paths import open_regular

SCHEMA = 1
NAME = "manifest.json"
LIMIT = 64 << 20  # Bytes of a JSON file that are read at most


def read_json(path: Path) -> Any:
    """What a checkpoint's file says. OSError, or ValueError where it is no JSON, too long or too deep."""
    with open_regular(path) as file:
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise ValueError(f"it has more than {LIMIT} bytes of JSON")
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def reading(path: Path, what: str, fix: str) -> Iterator[None]:
    """Whatever content of a checkpoint cannot be used as expected is a CheckpointError with its file."""
    try:
        yield
    except Exception as error:  # its values may be anything: every operation on them can fail
        if isinstance(error, ShardwiseError):
            raise
        text = f"{what} ({type(error).__name__}: {str(error)[:500]})"
        raise CheckpointError(text, where=str(path), fix=fix) from error


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that a checkpoint belongs to: only a run of the same origin loads it."""

    world_size: int
    strategy: Mapping[str, Any]  # `Strategy.to_json()`
    identity: Mapping[str, Any]
    """Fields that identify the job: model, data, sequence length, precision, seed, ..."""
    versions: Mapping[str, str]
    """Versions of the libraries that wrote it, for information: they are never compared."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`. Paths are relative to its folder, with `/` between parts."""

    step: int
    origin: Origin
    files: Mapping[str, FileEntry]
    elsewhere: Mapping[str, Mapping[str, FileEntry]] = field(default_factory=dict)
    """Where each node has a disk of its own: the files on those of other nodes than 0, by node."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of the checkpoint, without the manifest."""
        return sum(entry.size_bytes for node in self.nodes for entry in self.of(node).values())

    @property
    def nodes(self) -> list[int]:
        """Nodes that hold a part."""
        return [0, *sorted(map(int, self.elsewhere))]

    def of(self, node: int | None) -> Mapping[str, FileEntry]:
        """The files on the disk of a node; None: all, once they have been brought together in one folder.

        DeepSpeed writes some names on every node, with the same content in other bytes: there node 0's count.
        """
        if node is None:
            return {name: entry for one in reversed(self.nodes) for name, entry in self.of(one).items()}
        return self.elsewhere.get(str(node), {}) if node else self.files

    def to_text(self) -> str:
        """The content of `manifest.json`, with the hash of the rest as its last key."""
        body = {"schema": SCHEMA, "step": self.step, **asdict(self.origin), "files": _listed(self.files)}
        if self.elsewhere:
            body["elsewhere"] = {node: _listed(files) for node, files in sorted(self.elsewhere.items())}
        return json.dumps({**body, "manifest_sha256": _hash_of(body)}, indent=1) + "\n"

    @staticmethod
    def from_json(body: Any) -> Manifest:
        """What `to_text` wrote, parsed. ValueError where it is damaged or of another schema."""
        try:
            claimed = body.pop("manifest_sha256")
            if body["schema"] != SCHEMA:
                raise ValueError(f"it has schema {body['schema']!r}, this version reads {SCHEMA}")
            if claimed != _hash_of(body):
                raise ValueError("its own hash does not match: it was changed after it was written")
            files = _entries(body["files"])
            elsewhere = {node: _entries(of_node) for node, of_node in body.get("elsewhere", {}).items()}
            fields = {key: body[key] for key in ("world_size", "strategy", "identity", "versions")}
            types = [type(value) for value in (body["step"], *fields.values())]
            if types != [int, int, dict, dict, dict] or not all(map(str.isdecimal, elsewhere)):
                raise TypeError("a value has another type")
            return Manifest(step=body["step"], origin=Origin(**fields), files=files, elsewhere=elsewhere)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it cannot be read ({type(error).__name__}: {error})") from None


def _listed(files: Mapping[str, FileEntry]) -> dict[str, Any]:
    return {name: asdict(files[name]) for name in sorted(files)}


def _entries(listed: Mapping[str, Any]) -> dict[str, FileEntry]:
    return {name: FileEntry(**entry) for name, entry in listed.items()}


def folder_name(step: int) -> str:
    """`step-000100`."""
    return f"step-{step:06d}"


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every folder named like a checkpoint, newest first; it may be damaged."""
    named = ((re.fullmatch(r"step-(\d{6,})", path.name), path) for path in checkpoints.glob("step-*"))
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. ValueError where it is missing, damaged or of another step."""
    try:
        manifest = Manifest.from_json(read_json(folder / NAME))
    except FileNotFoundError:
        raise ValueError("there is no manifest.json: the checkpoint was never finished") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"manifest.json cannot be read ({error})") from None
    except ValueError as error:
        raise ValueError(f"manifest.json: {error}") from None
    if folder.name != folder_name(manifest.step):
        raise ValueError(f"manifest.json is of step {manifest.step}, the folder is {folder.name}")
    return manifest


def list_files(folder: Path) -> list[str]:
    """Relative paths of all files below `folder` without the manifest, sorted."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in files if (name := path.relative_to(folder).as_posix()) != NAME)


def check_sizes(folder: Path, manifest: Manifest, *, node: int | None = None) -> list[str]:
    """List files that are missing, of the wrong size, or not in the manifest. Reads no content.

    `node`: only what lies on that node's disk.
    """
    problems = []
    present, files = set(list_files(folder)), manifest.of(node)
    for name, entry in files.items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif (folder / name).is_symlink():
            problems.append(f"{name} is a link, not a file")
        elif (size := (folder / name).stat().st_size) != entry.size_bytes:
            problems.append(f"{name} has {size} bytes instead of {entry.size_bytes}")
    problems += [f"{name} is not in the manifest" for name in sorted(present - set(files))]
    return problems


def verify(folder: Path, *, node: int | None = None, rank: int = 0, size: int = 1) -> list[str]:
    """List what is wrong with a checkpoint after reading every byte; empty when it is intact.

    `node`: only what lies on that node's disk. Each of `size` ranks reads its share of the files.
    """
    try:
        manifest = read_manifest(folder)
        files = manifest.of(node)
        if problems := check_sizes(folder, manifest, node=node):
            return problems
        hashes = hash_files(folder, sorted(files)[rank::size])
    except ValueError as error:
        return [str(error)]
    except OSError as error:
        return [f"it cannot be read ({error})"]
    damaged = (name for name, entry in hashes.items() if entry != files[name])
    return [f"{name} is damaged: its SHA-256 is not the one it was saved with" for name in damaged]


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and SHA-256 of files below `folder`, several at a time."""

    def entry(name: str) -> tuple[str, FileEntry]:
        with (folder / name).open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return name, FileEntry(size_bytes=file.tell(), sha256=digest)

    with ThreadPoolExecutor(max_workers=8) as pool:  # hashlib releases the GIL
        return dict(pool.map(entry, names))


def _hash_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
