"""`train --supervise`: whether a run that failed is started again, when, and the log of it.

A failure of the machine or a crash is worth another try; an error in job, data or checkpoint is not.
The same error twice in the same step comes again: it ends the run, and so do failures in a row between which
nothing new was saved.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.errors import MachineError, ShardwiseError
from shardwise.folders import replace_text
from shardwise.launch.spec import Ending, LaunchSpec
from shardwise.record.manifest import step_folders
from shardwise.record.read import EVENTS, is_run_folder, read_events
from shardwise.record.restarts import BEGAN, ENDED, FAILED, LOG, read_restarts, restarts_of
from shardwise.record.write import redact

WORTH_A_TRY = (ShardwiseError.exit_code, MachineError.exit_code)
MOST_IN_A_ROW = 5  # Failures without a new checkpoint between them
FIRST_WAIT, MOST_WAIT = 1.0, 300.0  # Seconds; doubled with each failure in a row
_NUMBER = re.compile(r"[\d.]+")


class Restarts:
    """The restarts of one command. `again` gives what to launch next; it may raise ShardwiseError."""

    def __init__(self, run_dir: Path, again: Callable[[], LaunchSpec]) -> None:
        self.again, self._run_dir = again, run_dir
        self._earlier = (run_dir / LOG).read_text(encoding="utf-8") if read_restarts(run_dir) else ""
        self._lines: list[str] = []
        self._seen: set[tuple[int, str, int]] = set()
        self._row, self._saved = 0, self._newest()

    def began(self, spec: LaunchSpec) -> None:
        self._write(event=BEGAN, processes=spec.processes)

    def note(self, spec: LaunchSpec, ending: Ending, *, why: str | None = None) -> None:
        """Log how the ranks ended; `why` nothing is started after it."""
        failed = ending.code != 0 and not ending.requested
        self._write(
            event=FAILED if failed else ENDED,
            processes=spec.processes,
            code=ending.code,
            error=redact(_in_words(ending.error)) or None,
            step=ending.step,
            saved_step=self._newest(),
            why=why,
        )

    def wait(self, spec: LaunchSpec, ending: Ending) -> float | None:
        """Seconds to wait before the next start; None where the run ends, which is explained on stderr."""
        saved, error = self._newest(), _in_words(ending.error)
        self._row = 1 if saved != self._saved else self._row + 1
        self._saved = saved
        key = (ending.code, _NUMBER.sub("", error), ending.step)
        why = None
        if ending.requested or ending.code not in WORTH_A_TRY:
            why = "" if ending.code == 0 or ending.requested else "another try would end in the same way"
        elif key in self._seen:
            why = f"the same error came twice in step {ending.step}"
        elif self._row > MOST_IN_A_ROW:
            why = f"{self._row} failures in a row, and nothing new was saved between them"
        self._seen.add(key)
        self.note(spec, ending, why=why or None)
        if why is not None:
            self.end(f"not started again: {why}" if why else "")
            return None
        seconds = min(MOST_WAIT, FIRST_WAIT * 2.0 ** (self._row - 1))
        state = "the start" if saved is None else f"the state after step {saved}"
        _say(f"starting again in {seconds:.0f} s, from {state}")
        return seconds

    def end(self, why: str) -> None:
        """Say how many failures there were, and the share of the time in which the run made progress."""
        found = None
        if is_run_folder(self._run_dir) and (self._run_dir / EVENTS).is_file():
            found = restarts_of(self._run_dir, read_events(self._run_dir / EVENTS))
        share = ""
        if found is not None and found["ettr"] is not None:
            share = f"; {len(found['failures'])} failures, ETTR {found['ettr']:.1%} of "
            share += f"{found['wall_seconds']:.0f} s"
            self._write(**json.loads(self._lines.pop()), ettr=found["ettr"])
        if why or share:
            _say(f"{why or 'ended'}{share}")

    def _newest(self) -> int | None:
        """The step of the newest checkpoint."""
        found = step_folders(self._run_dir / "checkpoints")
        return found[0][0] if found else None

    def _write(self, **values: object) -> None:
        """Add a line, of now unless it says when; the folder may be newer than its first lines."""
        known = {key: value for key, value in values.items() if value is not None}
        self._lines.append(json.dumps({"at": time.time(), **known}) + "\n")
        if is_run_folder(self._run_dir):
            replace_text(self._run_dir / LOG, self._earlier + "".join(self._lines))


def _in_words(error: ShardwiseError | None) -> str:
    return "" if error is None else error.headline or error.problems[0].what


def _say(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)
