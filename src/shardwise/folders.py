"""Where shardwise keeps what it can make again: tokenised data, tokenizers, traces, plans, calibrations."""

import os
from pathlib import Path


def cache_root() -> Path:
    """`$SHARDWISE_CACHE`, else `~/.cache/shardwise`."""
    return Path(os.environ.get("SHARDWISE_CACHE") or Path.home() / ".cache" / "shardwise")
