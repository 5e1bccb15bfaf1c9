"""Launch commands and scripts for a training script of the user's own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

Launcher = Literal["deepspeed", "torchrun", "accelerate", "slurm"]

PORT = 29500
TIMEOUT_MINUTES = 60
"""How long ranks wait for one that tokenises or loads; DeepSpeed's own 10 minutes are short for that."""


def command(launcher: Launcher, *, nodes: int, gpus_per_node: int, config: str = "") -> str:
    """What starts one process a GPU; the script and its arguments follow it.

    `config`: Accelerate's file. On several nodes HEAD_NODE has to be set, or HOSTFILE for deepspeed.
    """
    if launcher == "accelerate":
        return f"accelerate launch --config_file {shlex.quote(config)}"
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


def shell_script(title: str, start: str, flags: Sequence[tuple[str, str]] = ()) -> str:
    """A script that starts `start`, the script in its arguments, and the flags."""
    lines = [
        "#!/bin/bash",
        f"# {title}",
        "# Usage: bash this-file train.py [its arguments]",
        "set -euo pipefail",
    ]
    lines.append(f"exec {_call(start, flags)}")
    return "\n".join(lines) + "\n"


def slurm_script(
    title: str,
    start: str,
    *,
    name: str,
    nodes: int,
    gpus_per_node: int,
    flags: Sequence[tuple[str, str]] = (),
) -> str:
    """A batch script: one torchrun a node, which starts a process for each of its GPUs."""
    lines = [
        "#!/bin/bash",
        f"# {title}",
        "# Usage: sbatch this-file train.py [its arguments]",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={gpus_per_node}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
        "set -euo pipefail",
        # sed reads to the end: head would close the pipe on a long list, and pipefail end the job
        """HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)""",
        f"export HEAD_NODE DEEPSPEED_TIMEOUT={TIMEOUT_MINUTES}",
        # one task a node would be bound to one core, and all of its processes with it
        f"srun --cpu-bind=none {_call(start, flags)}",
    ]
    return "\n".join(lines) + "\n"


def _call(start: str, flags: Sequence[tuple[str, str]]) -> str:
    words = [f'{start} "$@"', *(f"--{name} {_quoted(value)}".rstrip() for name, value in flags)]
    return " \\\n    ".join(words)


def _quoted(value: str) -> str:
    return shlex.quote(value) if value else ""
