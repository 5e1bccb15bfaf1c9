"""A job file is read again as it was written."""

from __future__ import annotations

import pytest
import yaml

from shardwise.job.source import job_text, job_values


@pytest.mark.parametrize(
    "text", ["1e5", "1234e56", "12", "0x1f", "on", "yes", "~", "1_000", "2026-11-23", "a: b"]
)
def test_text_in_a_written_job_is_read_as_text(text: str) -> None:
    """By the rules of job files, which take 1e5 for a number, and by YAML 1.1's, which do not."""
    written = job_text({"name": text, "rate": 1e-3})
    assert job_values(written) == yaml.safe_load(written) == {"name": text, "rate": 1e-3}


def test_a_job_edited_by_hand_has_its_numbers() -> None:
    assert job_values("rate: 1e-3\n") == {"rate": 1e-3}
