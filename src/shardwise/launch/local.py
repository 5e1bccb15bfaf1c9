"""Runs a job on this machine: starts the workers, passes signals on, and ends with one exit code.

Signals: the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 becomes one SIGTERM to every worker, which saves
and ends with 75. A second SIGINT kills them, and so does a second SIGTERM that comes a second or more after
the first: `timeout` and some batch systems send one request twice. When a worker fails the others get a
grace period to end by themselves (they may be about to report something better), then SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from shardwise.device.find import unseen_vendor
from shardwise.errors import MachineError, Problem, ShardwiseError, StoppedError, render
from shardwise.hardware.detect import gpu_count
from shardwise.launch.aftermath import POST_MORTEM_MODULE, Aftermath, Ending
from shardwise.launch.host_memory import host_memory_kills, killed
from shardwise.launch.spec import LaunchSpec
from shardwise.launch.worker import Worker, start, worker_environment

WORKER_MODULE = "shardwise.train.worker"
STOPPED = StoppedError.exit_code
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOOK_EVERY_SECONDS = 0.02
_TERM_SECONDS = 3.0  # from SIGTERM to SIGKILL, for the survivors of a failure
_DOUBLED_SECONDS = 1.0
"""SIGTERMs that are less apart are one request; after so long a wait is explained."""
_OUT_OF_MEMORY_SECONDS = 2.0  # for ranks with the same load, which run out a moment later, to say so too


class _Request(NamedTuple):
    signal: int
    at: float
    """By `time.monotonic`."""


def launch(
    spec: LaunchSpec,
    *,
    module: str = WORKER_MODULE,
    post_mortem: str = POST_MORTEM_MODULE,
    grace_seconds: float = 10.0,
) -> int:
    """Run the job with `spec.processes` workers; returns the exit code, the workers' error printed.

    0 all workers finished; 75 stopped on request with the state saved; 130 or 143 stopped by signal
    before the state could be saved; otherwise the code of the worker that failed first. Where that ran out
    of GPU memory, it is explained by `post_mortem`, another process, and with `spec.on_oom` "retry" run again
    (aftermath.py); a run that is only measured is not. Must be called from the main thread, which receives
    the signals. MachineError where no worker can start.
    """
    warning = None if gpu_count() else unseen_vendor()
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    aftermath = Aftermath(spec, module=post_mortem)
    while True:
        ending = _run(spec, module, grace_seconds)
        if ending.out_of_memory is None or spec.measure_steps is not None:
            aftermath.write()
            if ending.error is not None:
                _tell(ending.error)
            return ending.code
        error, following = aftermath.of(spec, ending)
        aftermath.write()
        _tell(error)
        if following is None:
            return ending.code
        aftermath.make_room(following)
        spec = following


def _run(spec: LaunchSpec, module: str, grace_seconds: float) -> Ending:
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))  # mode 0700
    try:
        spec_path = folder / "spec.json"
        spec_path.write_text(json.dumps(spec.to_json()), encoding="utf-8")
        killed_before = host_memory_kills()
        with _requests() as requests:
            workers = _start_all(1 if spec.dry_run else spec.processes, module, spec_path, folder)
            try:
                _watch(workers, requests, grace_seconds, saving=spec.measure_steps is None)
            finally:
                _kill(workers)
        return _conclude(workers, requests, killed_before=killed_before)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_all(processes: int, module: str, spec_path: Path, folder: Path) -> list[Worker]:
    environment = worker_environment(processes=processes, folder=folder)
    workers: list[Worker] = []
    try:
        for rank in range(processes):
            worker = start(rank, module=module, spec=spec_path, folder=folder, environment=environment)
            workers.append(worker)  # one by one: those that run must be ended when the next one fails
    except OSError as error:
        _kill(workers)
        raise MachineError(
            f"worker process {len(workers)} could not be started: {error.strerror}",
            fix="see `ulimit -u` and the free memory, or ask for fewer with --processes",
        ) from None
    return workers


@contextmanager
def _requests() -> Iterator[list[_Request]]:
    """The stop signals received so far, in order. A signal that was ignored (nohup) stays ignored."""
    received: list[_Request] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(_Request(number, time.monotonic()))

    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _impatient(requests: Sequence[_Request]) -> int | None:
    """The signal that asked a second time; None while nobody is impatient."""
    for number, apart in ((signal.SIGINT, 0.0), (signal.SIGTERM, _DOUBLED_SECONDS)):
        times = [request.at for request in requests if request.signal == number]
        if len(times) > 1 and times[-1] - times[0] >= apart:
            return number
    return None


def _watch(
    workers: Sequence[Worker], requests: Sequence[_Request], grace_seconds: float, *, saving: bool
) -> None:
    """Returns when all workers have ended, by themselves or not, or when they are to be killed."""
    forwarded = warned = explained = False
    while True:
        ended = [worker.look(time.time()) for worker in workers]
        if all(ended):
            return
        if requests and not forwarded:
            forwarded = True
            _ask_to_stop(workers)
        if _impatient(requests) is not None:
            return
        if forwarded and saving and not explained and time.monotonic() - requests[0].at > _DOUBLED_SECONDS:
            explained = True
            _explain_the_wait()
        failures = [worker.failed_at for worker in workers if worker.failed_at and _code(worker) != STOPPED]
        if failures:
            since = time.time() - min(failures)
            if since > _OUT_OF_MEMORY_SECONDS and any(worker.out_of_memory for worker in workers):
                return  # the others wait in a collective, where they hear no SIGTERM, and have nothing to add
            if since > grace_seconds and not warned:
                warned = True
                _ask_to_stop(workers)
            if since > grace_seconds + _TERM_SECONDS:
                return
        time.sleep(_LOOK_EVERY_SECONDS)


def _explain_the_wait() -> None:
    print(
        "stopping: the step that runs is finished first, then the state is saved; "
        "Ctrl-C or SIGTERM again ends the run at once, without what came after the last checkpoint",
        file=sys.stderr,
        flush=True,
    )


def _ask_to_stop(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.ask_to_stop()


def _kill(workers: Sequence[Worker]) -> None:
    """End every worker that still runs, and what any of them has started."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.process.wait()


def _conclude(
    workers: Sequence[Worker], requests: Sequence[_Request], *, killed_before: int | None
) -> Ending:
    """The run's exit code, and the one error there is to tell."""
    failed = sorted(
        (worker for worker in workers if worker.failed_at is not None),
        # Memory that ran out is a cause, never a consequence of what another rank met before it was told.
        key=lambda worker: (
            _code(worker) == STOPPED,
            worker.out_of_memory is None,
            worker.failed_at,
            worker.rank,
        ),
    )
    impatient = _impatient(requests)
    if impatient is not None or (failed and requests and _ended_by_our_term(failed[0])):
        number = signal.SIGTERM if impatient is None else impatient
        error = ShardwiseError(
            "stopped before the state could be saved",
            fix="--resume goes on from the last checkpoint, if there is one",
        )
        return Ending(code=128 + number, error=error, requested=True)
    if not failed:
        return Ending(code=0)
    first = failed[0]
    evidence = first.out_of_memory
    if evidence is not None:
        ranks = [first.rank, *(worker.rank for worker in failed[1:] if worker.out_of_memory)]
        evidence = {**evidence, "ranks": ranks}
    return Ending(
        code=_code(first),
        error=_error_of(first, killed_before=killed_before),
        out_of_memory=evidence,
        requested=bool(requests),
    )


def _ended_by_our_term(worker: Worker) -> bool:
    return worker.report is None and worker.process.returncode == -signal.SIGTERM


def _code(worker: Worker) -> int:
    """The exit code a failed worker stands for."""
    if worker.report is not None:
        return int(worker.report["exit_code"])
    code = worker.process.returncode
    return code if code is not None and code > 0 else MachineError.exit_code


def _error_of(worker: Worker, *, killed_before: int | None) -> ShardwiseError | None:
    """What to print for a worker that failed; None when it only stopped as it was asked to."""
    code, where = worker.process.returncode, f"rank {worker.rank} of this run"
    if worker.report is not None:
        problems = [Problem(**problem) for problem in worker.report["problems"]]
        kind = StoppedError if _code(worker) == STOPPED else ShardwiseError
        error = kind(problems[0].what, problems=problems)
        error.headline = worker.report["headline"]
        return error
    if code == STOPPED:
        return None
    tail = worker.log_tail()
    if tail:
        print(f"--- the last lines of rank {worker.rank} ---\n{tail}\n---", file=sys.stderr)
    if code == -signal.SIGKILL:
        return killed(where=f"{where}, process {worker.process.pid}", rank=worker.rank, before=killed_before)
    if code is not None and code < 0:
        return MachineError(
            f"rank {worker.rank} crashed with {signal.Signals(-code).name}",
            where=f"{where}, process {worker.process.pid}",
            fix="what it printed last is above; on a GPU, look for `Xid` in `dmesg`",
        )
    return ShardwiseError(
        f"rank {worker.rank} ended with exit code {code} and no error report",
        where=where,
        fix="what it printed last is above; please report this as a bug",
    )


def _tell(error: ShardwiseError) -> None:
    print(render(error), file=sys.stderr, flush=True)
