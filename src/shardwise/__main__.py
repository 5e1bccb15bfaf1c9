"""`python -m shardwise` is the `shardwise` command."""

from __future__ import annotations

from shardwise.cli import run

if __name__ == "__main__":
    run()
