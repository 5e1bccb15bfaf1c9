"""A rank killed in the middle of writing a checkpoint: the run goes on from the last whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_out_of_memory import Done, check_same, train, undisturbed, write_job

from shardwise.training.saving import SWITCH

pytestmark = pytest.mark.slow

__all__ = ["undisturbed"]


@pytest.mark.parametrize(("rank", "background"), [(0, "1"), (1, "1"), (1, "0")])
def test_a_checkpoint_that_a_killed_rank_left_half_written_never_counts(
    tmp_path: Path, undisturbed: Done, monkeypatch: pytest.MonkeyPatch, rank: int, background: str
) -> None:
    """By a thread, while training goes on, and by the rank itself. The table is benchmarks/reliability."""
    monkeypatch.setenv(SWITCH, background)
    write_job(tmp_path, "zero2")
    border = {"phase": "saving", "rows": 2, "from_step": 4, "rank": rank, "killed": True}
    done = train(tmp_path, "job.yaml", "--processes", "2", border=border)
    assert done.code == 4
    assert f"error: rank {rank} was killed" in done.err
    checkpoints = done.run / "checkpoints"
    assert list((checkpoints / ".tmp-step-000004").iterdir()), "it was being written"
    assert max(path.name for path in checkpoints.glob("step-*")) == "step-000002"

    done = train(tmp_path, str(done.run), "--resume")
    check_same(done, undisturbed)
    assert "passed over" not in done.err
    assert not list(checkpoints.glob(".tmp-*")), "the next save clears what is left"


def test_a_run_killed_before_its_first_checkpoint_goes_on_by_the_same_command(
    tmp_path: Path, undisturbed: Done
) -> None:
    write_job(tmp_path, "zero2")
    border = {"phase": "saving", "rows": 2, "from_step": 0, "rank": 1, "killed": True}
    done = train(tmp_path, "job.yaml", "--processes", "2", border=border)
    assert done.code == 4
    assert not list((done.run / "checkpoints").glob("step-*"))
    again = train(tmp_path, "job.yaml", "--processes", "2")
    assert again.code == 2
    assert "--resume` continues it" in again.err

    done = train(tmp_path, str(done.run), "--resume")
    assert "nothing was saved yet: the run begins again with step 1" in done.err
    check_same(done, undisturbed)
