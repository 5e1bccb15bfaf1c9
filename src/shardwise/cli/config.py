"""`shardwise config JOB`: the resolved job, and where each value came from."""

from __future__ import annotations

import json

from shardwise.cli.options import AsJson, Changes, JobFile


def config(job: JobFile, changes: Changes = [], as_json: AsJson = False) -> None:
    """Show the resolved job and where each value comes from."""
    from shardwise.job.load import load_job, resolved

    settings = resolved(load_job(job, changes))
    if as_json:
        rows = [{"key": row.key, "value": row.value, "origin": row.origin} for row in settings]
        print(json.dumps({"settings": rows}, ensure_ascii=False))
        return
    texts = [json.dumps(row.value, ensure_ascii=False) for row in settings]
    widths = max(len(row.key) for row in settings), min(40, max(map(len, texts)))
    for row, text in zip(settings, texts, strict=True):
        print(f"{row.key:<{widths[0]}}  {text:<{widths[1]}}  {row.origin}")
