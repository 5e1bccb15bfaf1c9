"""`python -m shardwise` is the `shardwise` command."""

from __future__ import annotations

import sys

from shardwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
