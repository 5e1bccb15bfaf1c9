"""Replacing what was read, and nothing else."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import MachineError
from shardwise.patch import Library, hash_of, patch, supported

INSTALLED = importlib.metadata.version("pytest")
HERE = Library("pytest", f"=={INSTALLED}", lost="Everything is slow.")
OTHER = Library("pytest", f">{INSTALLED}", lost="Everything is slow.")


class Owner:
    limit = 2

    def greet(self, name: str) -> str:
        return f"hello {name}"


READ = hash_of(Owner.greet)


def shout(name: str) -> str:
    return f"HELLO {name}"


@pytest.fixture(autouse=True)
def again() -> Iterator[None]:
    supported.cache_clear()
    yield
    supported.cache_clear()


def test_an_instance_changes_alone_and_back() -> None:
    one, other = Owner(), Owner()
    undo = patch(one, "greet", shout, library=HERE, source_hash=READ)
    assert (one.greet("a"), other.greet("a")) == ("HELLO a", "hello a")
    undo()
    assert one.greet("a") == "hello a"
    assert vars(one) == {}


def test_a_module_changes_for_everyone_and_back() -> None:
    module = SimpleNamespace(greet=Owner.greet)
    undo = patch(module, "greet", shout, library=HERE, source_hash=READ)
    assert module.greet is shout
    patch(module, "greet", shout, library=HERE, source_hash=READ)  # a second time has no effect
    undo()
    assert module.greet is Owner.greet


def test_a_value_only_has_to_exist() -> None:
    owner = Owner()
    patch(owner, "limit", 9, library=HERE, source_hash=None)
    assert (owner.limit, Owner.limit) == (9, 2)


def test_a_missing_name_is_an_error() -> None:
    owner = Owner()
    with pytest.raises(MachineError, match=r"Owner\.leave, which does not exist") as caught:
        patch(owner, "leave", shout, library=HERE, source_hash=READ)
    assert caught.value.problems[0].where == f"pytest {INSTALLED}"
    assert f"pytest=={INSTALLED}" in caught.value.problems[0].fix
    assert vars(owner) == {}


@pytest.mark.parametrize("found", [shout, len, 3])
def test_another_source_is_an_error(found: Any) -> None:
    owner = SimpleNamespace(greet=found)
    with pytest.raises(MachineError, match="whose source has changed"):
        patch(owner, "greet", lambda name: name, library=HERE, source_hash=READ)
    assert owner.greet is found


def test_another_version_is_left_alone_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    patch(owner, "greet", shout, library=OTHER, source_hash=READ)()
    patch(owner, "leave", shout, library=OTHER, source_hash=READ)
    assert vars(owner) == {}
    [warning] = caplog.messages
    assert f"pytest {INSTALLED} is installed" in warning
    assert "Everything is slow." in warning


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(plain(function))


@pytest.mark.parametrize("decorate", [plain, wrapping, lambda f: wrapping(plain(wrapping(f)))])
def test_the_source_is_read_below_decorators(decorate: Callable[..., Any]) -> None:
    assert hash_of(decorate(Owner.greet)) == READ
    assert hash_of(decorate(shout)) != READ
    assert hash_of(Owner().greet) == READ
