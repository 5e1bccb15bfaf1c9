"""Replace attributes of other libraries, and only those whose source was read (decision 0033)."""

import functools
import hashlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from shardwise.errors import MachineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """A distribution, the versions that were read, and what training loses at any other version."""

    name: str
    versions: str
    lost: str


@functools.cache
def supported(library: Library) -> bool:
    """Whether the installed version was read. Warns once per process if not."""
    installed = importlib.metadata.version(library.name)
    if SpecifierSet(library.versions).contains(installed, prereleases=True):
        return True
    logger.warning(
        "%s %s is installed, and shardwise knows %s: it changes nothing in it. %s",
        library.name,
        installed,
        library.versions,
        library.lost,
    )
    return False


def patch(
    owner: Any, name: str, replacement: Any, *, library: Library, source_hash: str | None
) -> Callable[[], None]:
    """Set `owner.name` and return a function that undoes it.

    `owner` is a module, a class or an instance; on an instance only that instance changes. `source_hash` is
    `hash_of` the function that is replaced, None for a value or a function without Python source. At an
    unsupported version nothing is replaced. Setting the same replacement again has no effect. MachineError if
    the attribute is missing, or its source is not the one that was read.
    """
    if not supported(library) or getattr(owner, name, None) is replacement:
        return lambda: None
    check(owner, name, library=library, source_hash=source_hash)
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, replacement)
    return lambda: setattr(owner, name, before) if own else delattr(owner, name)


def check(owner: Any, name: str, *, library: Library, source_hash: str | None) -> None:
    """Raise MachineError if `owner.name` is missing or its source is not the one that was read."""
    where = f"{library.name} {importlib.metadata.version(library.name)}"
    fix = f"pip install '{library.name}{library.versions}', the version that shardwise is tested with"
    what = f"shardwise replaces or relies on {getattr(owner, '__name__', type(owner).__name__)}.{name}"
    missing = object()
    found = inspect.getattr_static(owner, name, missing)
    if found is missing:
        raise MachineError(f"{what}, which does not exist", where=where, fix=fix)
    actual = None if source_hash is None else hash_of(getattr(owner, name))
    if actual != source_hash:
        what += f", whose source has changed ({actual}, not {source_hash})"
        raise MachineError(what, where=where, fix=fix)


def hash_of(function: Callable[..., Any]) -> str:
    """First 16 digits of the SHA-256 of a function's source below its decorators; "no source" without one."""
    try:
        source = inspect.getsource(_undecorated(function))
    except (OSError, TypeError):
        return "no source"
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as written, also below decorators that do not set `__wrapped__`."""
    function = inspect.unwrap(function)
    cells = getattr(function, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells if inspect.isfunction(cell.cell_contents)]
    decorated = "<locals>" in getattr(function, "__qualname__", "") and len(inner) == 1
    return _undecorated(inner[0]) if decorated else function
