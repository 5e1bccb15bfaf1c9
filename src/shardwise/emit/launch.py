"""Launch commands and scripts for a training script of the user's own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from shardwise.engines import descriptor

if TYPE_CHECKING:
    from shardwise.emit.request import Request

Launcher = Literal["deepspeed", "torchrun", "accelerate", "slurm"]

PORT = 29500
HERE = "$here"
"""In a script: the folder that it and its files lie in, wherever it is started from."""


def command(
    launcher: Launcher, *, nodes: int, gpus_per_node: int, configs: Sequence[tuple[str, str]] = ()
) -> str:
    """What starts one process a GPU; the script and its arguments follow it.

    `configs`: flags of Accelerate that name its files. On several nodes HEAD_NODE has to be set, or HOSTFILE
    for deepspeed.
    """
    if launcher == "accelerate":
        return " ".join(["accelerate launch", *_flags(configs)])
    if launcher == "deepspeed":
        hosts = '--hostfile "${HOSTFILE:?lines of: host slots=GPUs}" ' if nodes > 1 else ""
        return f"deepspeed {hosts}--num_gpus {gpus_per_node}"
    if nodes == 1:
        return f"torchrun --standalone --nproc_per_node {gpus_per_node}"
    head = "$HEAD_NODE" if launcher == "slurm" else "${HEAD_NODE:?the name of the first node}"
    group = ' --rdzv_id "$SLURM_JOB_ID"' if launcher == "slurm" else ""
    return (
        f"torchrun --nnodes {nodes} --nproc_per_node {gpus_per_node}{group} --rdzv_backend c10d "
        f'--rdzv_endpoint "{head}:{PORT}"'
    )


def shell_script(title: Sequence[str], start: str, flags: Sequence[tuple[str, str]] = ()) -> str:
    """A script that starts `start`, the script in its arguments, and the flags."""
    call = f"exec {_call(start, flags)}"
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in title),
        "# Usage: bash this-file train.py [its arguments]",
        "set -euo pipefail",
    ]
    if HERE in call:
        lines.append('here=$(dirname "$(realpath "$0")")')
    return "\n".join([*lines, call]) + "\n"


def slurm_script(request: Request, start: str, flags: Sequence[tuple[str, str]] = ()) -> str:
    """A batch script: one torchrun a node, which starts a process for each of its GPUs."""
    # one task a node would be bound to one core, and all of its processes with it
    call = f"srun --cpu-bind=none {_call(start, flags)}"
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in request.title),
        "# Usage: sbatch this-file train.py [its arguments]",
        f"#SBATCH --job-name={request.name}",
        f"#SBATCH --nodes={request.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={request.gpus_per_node}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
        "set -euo pipefail",
    ]
    if HERE in call:
        lines.append("# Slurm runs a copy of this script: if this folder moves, write its new place here")
        lines.append(f"here={shlex.quote(request.folder)}")
    if request.nodes > 1:
        # sed reads to the end: head would close the pipe on a long list, and pipefail end the job
        lines.append("""HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)""")
        lines += descriptor(request.strategy).slurm_exports()
    return "\n".join([*lines, call]) + "\n"


def _call(start: str, flags: Sequence[tuple[str, str]]) -> str:
    return " \\\n    ".join([f'{start} "$@"', *_flags(flags)])


def _flags(flags: Sequence[tuple[str, str]]) -> list[str]:
    return [f"--{name} {_quoted(value)}".rstrip() for name, value in flags]


def _quoted(value: str) -> str:
    if value.startswith(HERE):
        return f'"{value}"'  # in quotes that let the shell put the folder in
    return shlex.quote(value) if value else ""
