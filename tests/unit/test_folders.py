"""Where the cache is."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.folders import cache_root


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("SHARDWISE_CACHE")
    assert cache_root() == Path.home() / ".cache" / "shardwise"
