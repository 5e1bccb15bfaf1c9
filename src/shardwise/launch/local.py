"""The launcher of this machine: one process for each GPU, which meet on the loopback device."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from shardwise.device.find import unseen_vendor
from shardwise.errors import MachineError
from shardwise.hardware.detect import deepspeed_accelerator, gpu_count
from shardwise.launch import die_with, flight
from shardwise.launch.nodes import INTERFACES, SECRET, Place, free_port
from shardwise.launch.spec import LaunchSpec, Worker
from shardwise.launch.supervise import supervise


class LocalLauncher:
    """Starts processes of this machine; they do not outlive this one."""

    def start(
        self,
        processes: int,
        module: str,
        spec: Path,
        *,
        place: Place | None = None,
        quiet: bool = False,
        debug: bool = False,
    ) -> list[Worker]:
        """See `Launcher.start`. Rank 0 shares this process's output unless it is `quiet`."""
        first = 0 if place is None else place.first_rank
        environment = worker_environment(processes=processes, folder=spec.parent, place=place)
        if debug:
            environment = {"PYTHONFAULTHANDLER": "1", **environment}  # native crashes have a stack, too
        workers: list[Worker] = []
        try:
            for local in range(processes):
                own = {**environment, "RANK": str(first + local), "LOCAL_RANK": str(local)}
                worker = _start(first + local, module, spec, own, quiet=quiet)
                workers.append(worker)  # one by one: those that run must be ended when the next one fails
        except OSError as error:
            self.kill(workers)
            what = f"worker process {len(workers)} could not be started: {error.strerror}"
            fix = "see `ulimit -u` and the free memory, or ask for fewer with --processes"
            raise MachineError(what, fix=fix) from None
        return workers

    def stop(self, workers: Sequence[Worker]) -> None:
        """Send SIGTERM to the workers alone: they still need what they started (a renderer, a compiler).

        One that SIGSTOP has stopped goes on, or it would never hear of it.
        """
        for worker in workers:
            if worker.process.poll() is None:
                os.kill(worker.process.pid, signal.SIGTERM)
                os.kill(worker.process.pid, signal.SIGCONT)

    def kill(self, workers: Sequence[Worker]) -> None:
        """See `Launcher.kill`: every worker leads a process group."""
        for worker in workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in workers:
            worker.process.wait()


def _start(rank: int, module: str, spec: Path, environment: Mapping[str, str], *, quiet: bool) -> Worker:
    """Start one worker in a process group of its own, so that Ctrl-C reaches it only through the launcher."""
    parent = os.getpid()
    own_log = (spec.parent / f"rank-{rank}.log").open("wb") if rank or quiet else nullcontext()
    with own_log as log:
        process = subprocess.Popen(
            # -P: a file of the user's folder must not stand in for a module of the same name.
            [sys.executable, "-P", "-m", module, str(spec)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            process_group=0,
            preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 - the launcher has one thread
        )
    return Worker(rank, process, spec.parent)


def launch(spec: LaunchSpec, **options: Any) -> int:
    """Run a job, or this machine's part of it, and return its exit code; options are those of `supervise`."""
    if not gpu_count() and (warning := unseen_vendor()) is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return supervise(spec, launcher=LocalLauncher(), **options)


def worker_environment(*, processes: int, folder: Path, place: Place | None = None) -> dict[str, str]:
    """The environment that the workers of this machine share; what the user has set stays."""
    given = {name: value for name, value in os.environ.items() if name != SECRET}
    place = place or Place()
    if "TORCH_CUDA_ARCH_LIST" in given:  # DeepSpeed 0.19.8 reads 9.0, and fails at 9.0a
        given["TORCH_CUDA_ARCH_LIST"] = re.sub("(?<=[0-9])[af]", "", given["TORCH_CUDA_ARCH_LIST"])
    defaults = {
        # One thread per core in all: the default, one per core and process, makes them fight.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes)),
        # Threads that wait must not keep a core busy that another process needs.
        "OMP_WAIT_POLICY": "PASSIVE",
        **flight.variables(folder),
    }
    if place.interface is not None:  # loopback on one machine, whatever the network looks like
        defaults |= dict.fromkeys(INTERFACES, place.interface)
    if (accelerator := deepspeed_accelerator()) is not None:
        defaults["DS_ACCELERATOR"] = accelerator  # DeepSpeed would detect it by itself, and print a warning
    if "PYTORCH_ALLOC_CONF" not in given:  # the newer name of the same variable
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    fixed = {
        "WORLD_SIZE": str(place.world_size or processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": str(place.node),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port or free_port()),
        "SHARDWISE_ERROR_DIR": str(folder),
        # Tools of the virtual environment, such as ninja, even when it is not activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), given.get("PATH", os.defpath)]),
    }
    return {**defaults, **given, **fixed}
