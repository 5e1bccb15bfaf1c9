"""A process of the run by itself."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import suppress

import pytest

from shardwise.training.process import settled


def test_what_exists_is_not_searched_while_steps_run_and_freed_afterwards() -> None:
    with settled():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
    with suppress(ValueError), settled():
        raise ValueError("a step fails")
    assert gc.get_freeze_count() == 0


def test_triton_has_nothing_to_complain_of_at_the_end() -> None:
    pytest.importorskip("triton")
    script = "import triton\nfrom shardwise.training.process import settled\nwith settled(): pass"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
