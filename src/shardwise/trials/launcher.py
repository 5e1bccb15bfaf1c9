"""A row's own launcher, in a session of its own: `python -m shardwise.trials.launcher SPEC.json PARENT`.

It does not outlive the process PARENT, which has started it; its workers do not outlive it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardwise.errors import ShardwiseError, render
from shardwise.launch.local import die_with, launch
from shardwise.launch.spec import LaunchSpec


def main() -> int:
    """Runs the spec; returns its exit code."""
    die_with(int(sys.argv[2]))
    spec = LaunchSpec.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    try:
        return launch(spec)
    except ShardwiseError as error:  # no worker could be started
        print(render(error), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
