"""Slurm's batch scripts: for torchrun, or for shardwise itself."""

import shlex
from collections.abc import Sequence

from shardwise.emit.request import Request

STOP_SECONDS = 300  # from the request to the end, to finish a step and save; `launch/slurm.py` has the same

# The nodes end together by themselves. To kill the others after the first exit code of 75 would replace it.
_TOGETHER = "--kill-on-bad-exit=0 --wait=120"

YOURS = "your cluster may want more: --partition, --account, --time or --mem, and lines that load modules"

# 75: stopped with its state saved. Where the job was cancelled it runs no longer, and must not come back.
_REQUEUE = """code=$?
if [ $code = 75 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code"""


def batch_script(
    request: Request, lines: Sequence[str], arguments: str = "", *, directives: Sequence[str] = ()
) -> str:
    """A batch script with one task a node; `lines` may name the folder as `$here`, `arguments` are said."""
    head = (*request.title, f"Usage: sbatch this-file {arguments}".rstrip())
    options = (
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={request.gpus_per_node}",
        "--exclusive",
        "--output=%x-%j.log",
        *directives,
    )
    here = []
    if any("$here" in line for line in lines):
        here = ["# Slurm runs a copy of this script: if this folder moves, write its new place here"]
        here.append(f"here={shlex.quote(request.folder)}")
    comments, settings = (f"# {line}" for line in head), (f"#SBATCH {option}" for option in options)
    return "\n".join(["#!/bin/bash", *comments, *settings, f"# {YOURS}", *here, *lines]) + "\n"


def own_script(request: Request, call: str) -> str:
    """A batch script that goes on with the run until it is done: `call` starts or resumes it.

    Before the time limit Slurm asks it to stop; it saves and ends with 75, and the job is queued again.
    """
    directives = (f"--signal=USR1@{STOP_SECONDS}", "--requeue", "--open-mode=append")
    lines = ("set -uo pipefail", f"srun {_TOGETHER} --cpu-bind=none {call}", _REQUEUE)
    return batch_script(request, lines, directives=directives)
