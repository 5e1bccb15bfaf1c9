"""After a worker ran out of GPU memory: the explanation, its record, and what to go on with.

The strategies that need less are found by simulating them, which needs torch: another process does that,
`shardwise.train.post_mortem`, when all workers have ended. With `--on-oom retry` it says what to try next.
A retry is a new set of processes with one spec, so its ranks need not agree on anything.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import DoesNotFitError, Problem, ShardwiseError
from shardwise.launch.spec import LaunchSpec
from shardwise.launch.worker import start, worker_environment
from shardwise.record.manifest import step_folders
from shardwise.record.read import is_run_folder
from shardwise.record.schema import OUT_OF_MEMORY

POST_MORTEM_MODULE = "shardwise.train.post_mortem"
MOST_RETRIES = 3
"""Each needs less than all before; where three do not help, the cause is not the strategy."""
POST_MORTEM_SECONDS = 600.0
"""Planning takes seconds; a model of thousands of blocks on one core, minutes."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one set of workers ended."""

    code: int
    error: ShardwiseError | None = None
    out_of_memory: Mapping[str, Any] | None = None
    """`record.schema.OutOfMemory` of the worker that failed first, if that is why."""
    requested: bool = False
    """Somebody asked the run to stop."""


class RetryError(DoesNotFitError):
    title = "out of memory, going on"


class Aftermath:
    """What happened in the sets of workers of one launch that ran out of GPU memory."""

    def __init__(self, spec: LaunchSpec, *, module: str = POST_MORTEM_MODULE) -> None:
        """Before the first worker starts."""
        self._module = module
        self._run_dir = Path(spec.run_dir)
        self._found = self._run_dir.exists()
        self._failures: list[dict[str, Any]] = []

    def of(self, spec: LaunchSpec, ending: Ending) -> tuple[ShardwiseError, LaunchSpec | None]:
        """The error to tell, and what to run next; None where that is the end."""
        assert ending.out_of_memory is not None
        assert ending.error is not None
        evidence = dict(ending.out_of_memory)
        self._failures.append({"evidence": evidence, "retried_with": None, "from_step": None})
        saved = saved_step(spec)
        answer = self._ask(spec, saved)
        if answer is None:  # what the worker said by itself is all there is
            return ending.error, None
        facts = [Problem(**problem) for problem in answer["facts"]]
        problems = [*facts, *(Problem(**problem) for problem in answer["changes"])]
        chosen = answer["next"]
        if spec.on_oom != "retry" or ending.requested:
            chosen = None
        elif chosen is None:
            problems.append(Problem(what=answer["why_no_next"], fix=answer["instead"]))
        elif len(self._failures) > MOST_RETRIES:
            problems.append(Problem(what=f"{MOST_RETRIES} retries have not helped: this was the last"))
            chosen = None
        if chosen is None:
            error: ShardwiseError = DoesNotFitError(answer["headline"], problems=problems)
        else:
            self._failures[-1].update(retried_with=chosen["strategy"], from_step=saved or 0)
            going_on = Problem(what=_going_on(answer["next_in_words"], saved))
            error = RetryError(answer["headline"], problems=[*facts, going_on])
        self._failures[-1]["error"] = {
            "headline": error.headline,
            "problems": [vars(problem) for problem in error.problems],
        }
        if chosen is None:
            return error, None
        return error, replace(spec, chosen=chosen, resume=spec.resume or saved is not None)

    def make_room(self, following: LaunchSpec) -> None:
        """For a retry from the start: what the failed try left holds no state, and would be in the way.

        A folder that was there before this launch is not touched.
        """
        if not following.resume and not self._found and is_run_folder(self._run_dir):
            shutil.rmtree(self._run_dir)

    def write(self) -> None:
        """`out_of_memory.json`, where there is a run folder and something to write."""
        if self._failures and is_run_folder(self._run_dir):
            record = {"schema": 1, "failures": self._failures}
            (self._run_dir / OUT_OF_MEMORY).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _ask(self, spec: LaunchSpec, saved: int | None) -> dict[str, Any] | None:
        """The post-mortem's answer; None where it could not give one."""
        print("out of GPU memory: looking for what would fit", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
        try:
            evidence = [failure["evidence"] for failure in self._failures]
            request = {"spec": spec.to_json(), "failures": evidence, "saved_step": saved}
            path, answer = folder / "request.json", folder / "answer.json"
            path.write_text(json.dumps({**request, "answer": str(answer)}), encoding="utf-8")
            process = start(
                0,
                module=self._module,
                spec=path,
                folder=folder,
                environment=worker_environment(processes=1, folder=folder),
                quiet=True,
            )
            try:
                process.process.wait(POST_MORTEM_SECONDS)
            except subprocess.TimeoutExpired:
                print("warning: the post-mortem took too long", file=sys.stderr)
            finally:
                process.kill()
                process.process.wait()
            if not answer.exists():
                print(f"warning: there is no post-mortem:\n{process.log_tail(5)}", file=sys.stderr)
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        else:
            return found
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def saved_step(spec: LaunchSpec) -> int | None:
    """The step of the newest checkpoint, sound or not; None where nothing was saved."""
    newest = step_folders(Path(spec.run_dir) / "checkpoints")
    return newest[0][0] if newest else None


def _going_on(strategy: str, saved: int | None) -> str:
    place = (
        "from the start, as nothing was saved yet" if saved is None else f"from the state after step {saved}"
    )
    return f"going on {place}, with {strategy}"
