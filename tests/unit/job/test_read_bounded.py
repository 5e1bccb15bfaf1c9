"""A file that is named by mistake, or on purpose, is not read without end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.cli import main


@pytest.mark.parametrize("verb", ["check", "config"])
def test_what_has_no_end_is_not_read(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "zero.yaml"):
        assert main([verb, str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert "no regular file" in (said.out if verb == "check" else said.err)  # a finding like others
