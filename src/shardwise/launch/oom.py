"""After a worker ran out of GPU memory: explain it, record it, and choose what to retry with.

Strategies that need less are found by simulation, which needs torch. So another process does it when all
workers have ended: `shardwise.training.post_mortem`. A retry starts new processes with one spec.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import DoesNotFitError, Problem, ShardwiseError
from shardwise.folders import replace_json
from shardwise.launch.spec import Ending, Launcher, LaunchSpec
from shardwise.record.manifest import step_folders
from shardwise.record.read import is_run_folder
from shardwise.record.schema import OUT_OF_MEMORY

MOST_RETRIES = 3  # Each needs less than all before; where three do not help, the cause is not the strategy
POST_MORTEM_SECONDS = 600.0  # Planning takes seconds; a model of thousands of blocks on one core, minutes


class RetryError(DoesNotFitError):
    title = "out of memory, going on"


class OomHandling:
    """The out-of-memory failures of one launch; create it before the first worker starts."""

    def __init__(self, spec: LaunchSpec, launcher: Launcher, *, module: str) -> None:
        self._launcher, self._module = launcher, module
        self._run_dir = Path(spec.run_dir)
        self._existed = self._run_dir.exists()
        self._failures: list[dict[str, Any]] = []

    def handle(self, spec: LaunchSpec, ending: Ending) -> tuple[ShardwiseError, LaunchSpec | None]:
        """The error to print, and what to run next (None: nothing)."""
        assert ending.out_of_memory is not None
        assert ending.error is not None
        evidence = dict(ending.out_of_memory)
        failure: dict[str, Any] = {"evidence": evidence, "retried_with": None, "from_step": None}
        self._failures.append(failure)
        newest = step_folders(self._run_dir / "checkpoints")  # sound or not
        saved = spec.resume_from or (newest[0][0] if newest else None)
        answer = self._ask(spec, saved)
        if answer is None:
            return ending.error, None
        facts = [Problem(**problem) for problem in answer["facts"]]
        chosen = answer["next"] if spec.on_oom == "retry" and not ending.requested else None
        if chosen is not None and len(self._failures) <= MOST_RETRIES:
            state = "start, as nothing was saved yet" if saved is None else f"state after step {saved}"
            going_on = Problem(what=f"going on from the {state}, with {answer['next_in_words']}")
            error: DoesNotFitError = RetryError(answer["headline"], problems=[*facts, going_on])
            failure |= {"retried_with": chosen["strategy"], "from_step": saved or 0}
            following = replace(spec, chosen=chosen, resume=spec.resume or saved is not None)
        else:
            problems = [*facts, *(Problem(**problem) for problem in answer["changes"])]
            if chosen is not None:
                problems.append(Problem(what=f"{MOST_RETRIES} retries have not helped: this was the last"))
            elif spec.on_oom == "retry" and not ending.requested:
                problems.append(Problem(what=answer["why_no_next"], fix=answer["instead"]))
            error, following = DoesNotFitError(answer["headline"], problems=problems), None
        failure["error"] = {"headline": error.headline, "problems": [*map(vars, error.problems)]}
        return error, following

    def make_room(self, retry: LaunchSpec) -> None:
        """Before a retry from the start: remove the failed try's folder, which holds no state.

        A folder that existed before this launch is left alone.
        """
        if not retry.resume and not self._existed and is_run_folder(self._run_dir):
            shutil.rmtree(self._run_dir)

    def write(self) -> None:
        """Write `out_of_memory.json`, if there is a run folder and something to write."""
        if self._failures and is_run_folder(self._run_dir):
            replace_json(self._run_dir / OUT_OF_MEMORY, {"schema": 1, "failures": self._failures})

    def _ask(self, spec: LaunchSpec, saved: int | None) -> dict[str, Any] | None:
        """The post-mortem's answer; None where it gave none, which is explained on stderr."""
        print("out of GPU memory: looking for what would fit", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
        path, answer = folder / "request.json", folder / "answer.json"
        evidence = [failure["evidence"] for failure in self._failures]
        request = {"spec": spec.to_json(), "failures": evidence, "saved_step": saved, "answer": str(answer)}
        path.write_text(json.dumps(request), encoding="utf-8")
        [worker] = workers = self._launcher.start(1, self._module, path, quiet=True)
        reason = "it ended without an answer"
        try:
            worker.process.wait(POST_MORTEM_SECONDS)
        except subprocess.TimeoutExpired:
            reason = f"it took more than {POST_MORTEM_SECONDS:.0f} s"
        finally:
            self._launcher.kill(workers)
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            shutil.rmtree(folder, ignore_errors=True)
            return found
        tail = worker.log_tail(1000 if spec.debug else 1)
        print(f"warning: there is no post-mortem: {reason}\n{tail}\n  log: {worker.log}", file=sys.stderr)
        return None
