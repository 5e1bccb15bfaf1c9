"""Whether the kernel ended a process because the host's memory was used up."""

from __future__ import annotations

import resource
from pathlib import Path

from shardwise.errors import MachineError
from shardwise.hardware.detect import host_memory_bytes
from shardwise.units import gib

ROOT = Path("/")
_LESS = "use less host memory: no offloading, fewer processes, data that is already tokenised"


def host_memory_kills(root: Path = ROOT) -> int | None:
    """Processes of any user that Linux (4.13 and newer) has killed for memory so far; None if unknown."""
    try:
        lines = (root / "proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def killed(*, rank: int, where: str, before: int | None, root: Path = ROOT) -> MachineError:
    """The error of a worker that another process killed with SIGKILL; `before`: the count at its start."""
    now = host_memory_kills(root)
    if before is not None and now is not None and now == before:
        return MachineError(
            f"rank {rank} was killed; the kernel counts no kill for memory since the run began",
            where=where,
            fix="find who sends SIGKILL here: a user, a batch system at its time limit, or a memory guard "
            "outside the kernel, such as systemd-oomd or a container's runtime",
        )
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return MachineError(
        f"rank {rank} was killed, probably out of host memory of {gib(host_memory_bytes(root))}; "
        f"the largest process held {gib(largest)}",
        where=where,
        fix=f"look for `Out of memory` in `dmesg`; {_LESS}",
    )
