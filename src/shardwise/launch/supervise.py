"""Runs a job with any launcher: starts the workers, passes signals on, and ends with one exit code.

Signals: the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 asks every worker to save and end with 75. A second
SIGINT kills them, and so does a second SIGTERM a second or more after the first: `timeout` and some batch
systems send one request twice. When a worker fails, the others get a grace period to end by themselves (they
may report a better cause), then they are asked to stop, then killed.
"""

import json
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import MachineError, Problem, ShardwiseError, StoppedError, render, restored
from shardwise.hardware.detect import host_memory_bytes
from shardwise.launch import flight, handled
from shardwise.launch.control import Together
from shardwise.launch.heartbeat import Pulse
from shardwise.launch.oom import OomHandling
from shardwise.launch.restart import Restarts
from shardwise.launch.spec import Ending, Launcher, LaunchSpec, Worker
from shardwise.launch.team import joined, settle
from shardwise.record.read import is_run_folder
from shardwise.units import gib

WORKER_MODULE = "shardwise.training.worker"
POST_MORTEM_MODULE = "shardwise.training.post_mortem"
STOPPED = StoppedError.exit_code
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOOK_EVERY_SECONDS = 0.02
_STOP_SECONDS = 3.0  # from the request to the kill, for the survivors of a failure
_DOUBLED_SECONDS = 1.0  # SIGTERMs closer than this are one request; after as long, the wait is explained
_STOPPING = "stopping: the current step is finished first, then the state is saved; Ctrl-C or SIGTERM again "
_STOPPING += "ends the run at once and loses what came after the last checkpoint"
_OUT_OF_MEMORY_SECONDS = 2.0  # for ranks with the same load, which run out a moment later, to report it too


class _Request(NamedTuple):
    signal: int
    at: float  # By `time.monotonic`


def supervise(
    spec: LaunchSpec,
    *,
    launcher: Launcher,
    module: str = WORKER_MODULE,
    post_mortem: str = POST_MORTEM_MODULE,
    grace_seconds: float = 10.0,
    look: Callable[[], object] = lambda: None,
    restarts: Restarts | None = None,
) -> int:
    """Run the job with `spec.processes` workers; print their error and return the exit code.

    0: all workers finished. 75: stopped on request with the state saved. 130, 143: stopped by a signal before
    the state could be saved. Otherwise the code of the worker that failed first. When GPU memory ran out,
    `post_mortem` explains it in another process, and with `spec.on_oom` "retry" the job runs again; neither
    for a run that only measures. With `restarts` it is started again after other failures, too. `look` is
    called again and again; False asks the run to stop. Call it from the main thread, which receives the
    signals. Raises MachineError when no worker can start.
    """
    handling = OomHandling(spec, launcher, module=post_mortem)
    while True:
        if restarts is not None:
            restarts.began(spec)
        ending = _run(spec, launcher, module, grace_seconds, look)
        error, retry = ending.error, None
        if ending.out_of_memory is not None and spec.measure_steps is None:
            error, retry = handling.handle(spec, ending)
        handling.write()
        if error is not None:
            if spec.debug and ending.traceback:
                print(ending.traceback, file=sys.stderr)
            log = "" if not ending.log or retry is not None else f"\n  log: {ending.log}"
            print(f"{render(error)}{log}", file=sys.stderr, flush=True)
        if retry is not None:
            handling.make_room(retry)
            if restarts is not None:
                restarts.note(spec, ending)
        elif restarts is None or (seconds := restarts.wait(spec, ending)) is None:
            return ending.code
        elif (number := _asked_within(seconds)) is not None:
            restarts.end("stopped while no rank ran; the same command goes on")
            return 128 + number
        else:
            retry = restarts.again()
        spec = retry


def _asked_within(seconds: float) -> int | None:
    """Wait; the signal that asked to stop meanwhile, if any."""
    until = time.monotonic() + seconds
    with _requests() as requests:
        while not requests and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_SECONDS)
    return requests[0].signal if requests else None


def _run(
    spec: LaunchSpec, launcher: Launcher, module: str, grace_seconds: float, look: Callable[[], object]
) -> Ending:
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))  # mode 0700
    log = None
    try:
        spec_path = folder / "spec.json"
        killed_before = host_memory_kills()
        processes = 1 if spec.dry_run else spec.processes
        with _requests() as requests, joined(spec, lambda: _stopped_early(requests)) as (spec, place, team):
            spec_path.write_text(json.dumps(spec.to_json()), encoding="utf-8")
            workers = launcher.start(processes, module, spec_path, place=place, debug=spec.debug)
            try:
                pulse = Pulse(workers)
                saving = spec.measure_steps is None
                _watch(launcher, workers, pulse, requests, grace_seconds, team, look, saving=saving)
            finally:
                launcher.kill(workers)
            ending = _conclude(spec, workers, requests, killed_before=killed_before)
            ending = replace(ending, step=pulse.last_step())
            log = ending.log
            if team is not None:
                ending = settle(team, ending, lambda: _pass_on(requests, team))
        return ending
    finally:
        if log is None or log.parent != folder:
            shutil.rmtree(folder, ignore_errors=True)


def _stopped_early(requests: Sequence[_Request]) -> None:
    """While nodes wait for each other, the first signal ends it."""
    if requests:
        error = ShardwiseError("stopped before the nodes had met", fix="start it again: nothing was written")
        error.exit_code = 128 + requests[0].signal
        raise error


def _pass_on(requests: list[_Request], team: Together) -> None:
    """Let the other nodes know of requests made here, and this one of those made there."""
    team.tick(stop=bool(requests))
    if team.stop and not requests:
        requests.append(_Request(signal.SIGTERM, time.monotonic()))


def _ask(requests: list[_Request], look: Callable[[], object]) -> None:
    if look() is False and not requests:
        requests.append(_Request(signal.SIGTERM, time.monotonic()))


@contextmanager
def _requests() -> Iterator[list[_Request]]:
    """The stop signals received so far, in order."""
    received: list[_Request] = []
    with handled(_STOP_SIGNALS, lambda number, _: received.append(_Request(number, time.monotonic()))):
        yield received


def _impatient(requests: Sequence[_Request]) -> int | None:
    """The signal that asked a second time; None while there is none."""
    for number, apart in ((signal.SIGINT, 0.0), (signal.SIGTERM, _DOUBLED_SECONDS)):
        times = [request.at for request in requests if request.signal == number]
        if len(times) > 1 and times[-1] - times[0] >= apart:
            return number
    return None


def _watch(
    launcher: Launcher,
    workers: list[Worker],
    pulse: Pulse,
    requests: list[_Request],
    grace_seconds: float,
    team: Together | None,
    look: Callable[[], object],
    *,
    saving: bool,
) -> None:
    """Returns when all workers have ended, or when those left are to be killed."""
    forwarded = warned = explained = False
    while True:
        _ask(requests, look)
        pulse.look(requested=bool(requests), alone=team is None)
        ended = [worker.look(time.time()) for worker in workers]
        failures = [worker.failed_at for worker in workers if worker.failed_at and _code(worker) != STOPPED]
        if team is not None:
            _pass_on(requests, team)
            team.tick(failing=bool(failures) or _impatient(requests) is not None)
            failures += [team.failed_at] if team.failed_at is not None else []
            if team.over is not None:
                return
        if all(ended) or _impatient(requests) is not None or (pulse.hung and team is None):
            return
        if requests and not forwarded:
            forwarded = True
            launcher.stop(workers)
        if forwarded and saving and not explained and time.monotonic() - requests[0].at > _DOUBLED_SECONDS:
            explained = True
            print(_STOPPING, file=sys.stderr, flush=True)
        if failures:
            since = time.time() - min(failures)
            if since > _OUT_OF_MEMORY_SECONDS and any(worker.out_of_memory for worker in workers):
                return  # the others wait in a collective, where they hear no SIGTERM
            if since > grace_seconds and not warned:
                warned = True
                launcher.stop(workers)
            if since > grace_seconds + _STOP_SECONDS:
                return
        time.sleep(_LOOK_EVERY_SECONDS)


def _conclude(
    spec: LaunchSpec, workers: Sequence[Worker], requests: Sequence[_Request], *, killed_before: int | None
) -> Ending:
    """The run's exit code and its one error: the first cause on any rank."""
    failed = [worker for worker in workers if worker.failed_at is not None]
    # Memory that ran out is a cause, never a consequence of what another rank reported earlier.
    failed.sort(
        key=lambda one: (
            _code(one) == STOPPED,
            one.out_of_memory is None,
            one.follows,
            one.failed_at,
            one.rank,
        )
    )
    terminated = failed and failed[0].report is None and failed[0].process.returncode == -signal.SIGTERM
    number = _impatient(requests)
    if number is None and requests and terminated:  # the workers were asked before they could save
        number = signal.SIGINT if requests[0].signal == signal.SIGINT else signal.SIGTERM
    if number is not None:
        fix = "start it again: nothing was written yet"
        if is_run_folder(Path(spec.run_dir)):
            fix = "--resume goes on from the last checkpoint, if there is one"
        early = "the dry run was done" if spec.dry_run else "the state could be saved"
        error = ShardwiseError(f"stopped before {early}", fix=fix)
        return Ending(code=128 + number, error=error, requested=True)
    if not failed:
        return Ending(code=0)
    first, code = failed[0], _code(failed[0])
    evidence = first.out_of_memory
    if evidence is not None:
        ranks = [first.rank, *(worker.rank for worker in failed[1:] if worker.out_of_memory)]
        evidence = {**evidence, "ranks": ranks}
    return Ending(
        code=code,
        error=_error_of(first, killed_before=killed_before),
        out_of_memory=evidence,
        requested=bool(requests),
        follows=first.follows,
        failed_at=first.failed_at or 0.0,
        traceback=first.traceback,
        log=None if code == STOPPED else _kept_log(spec, first, workers),
    )


def _kept_log(spec: LaunchSpec, first: Worker, workers: Sequence[Worker]) -> Path | None:
    """The log of the worker that failed first, with its traceback; the other ranks' lie next to it.

    They are kept in the run folder. Before there is one, they stay in the temporary folder, unless the user's
    own input is the cause: then the error says it all. None where nothing is kept.
    """
    for worker in workers:
        if worker.traceback:
            with worker.log.open("a", encoding="utf-8") as file:
                file.write(worker.traceback)
    if not first.log.exists():
        return None
    if is_run_folder(Path(spec.run_dir)) and not spec.dry_run:
        logs = Path(spec.run_dir) / "logs"
        try:
            logs.mkdir(exist_ok=True)
            for log in chain(first.folder.glob("rank-*.log"), first.folder.glob(flight.FILES)):
                shutil.copy(log, logs)
        except OSError:  # the disk is full, say
            return first.log
        return logs / first.log.name
    own_input = _code(first) not in (ShardwiseError.exit_code, MachineError.exit_code)
    return None if own_input and not spec.debug else first.log


def _code(worker: Worker) -> int:
    """The exit code a failed worker stands for."""
    if worker.report is not None:
        return int(worker.report["exit_code"])
    code = worker.process.returncode or 0
    if code == STOPPED:
        return code
    # Another program's code in one of ours would say that the job is wrong, and is not worth another try.
    return ShardwiseError.exit_code if code > 0 else MachineError.exit_code


def _error_of(worker: Worker, *, killed_before: int | None) -> ShardwiseError | None:
    """What to print for a worker that failed; None when it only stopped as it was asked to."""
    code, where = worker.process.returncode, f"rank {worker.rank}, process {worker.process.pid}"
    if worker.report is not None:
        error = restored(worker.report)
        if worker.traceback:  # otherwise what hangs is named already
            hints = tuple(Problem(what=text) for text in flight.last_collectives(worker.folder))
            error.headline = error.headline or error.problems[0].what * bool(hints)
            error.problems += hints
        return error
    if code == STOPPED:
        return None
    tail = worker.log_tail()
    if tail:
        print(f"--- the last lines of rank {worker.rank} ---\n{tail}\n---", file=sys.stderr)
    if code == -signal.SIGKILL:
        return killed(where=where, rank=worker.rank, before=killed_before)
    last = "see what it printed last, above; "
    if code is not None and code < 0:
        what = f"rank {worker.rank} crashed with {signal.Signals(-code).name}"
        return MachineError(
            what, where=where, fix=f"{last}--debug adds its stack; on a GPU, see `Xid` in `dmesg`"
        )
    what = f"rank {worker.rank} ended with exit code {code} and no error report"
    return ShardwiseError(what, where=where, fix=f"{last}please report this as a bug")


ROOT = Path("/")
_KILLED_BY = "find who sends SIGKILL here: a user, a batch system at its time limit, or a memory guard "
_KILLED_BY += "outside the kernel, such as systemd-oomd or a container's runtime"
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
    if before is not None and now == before:
        what = f"rank {rank} was killed; the kernel counts no kill for memory since the run began"
        return MachineError(what, where=where, fix=_KILLED_BY)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    what = f"rank {rank} was killed, probably out of host memory of {gib(host_memory_bytes(root))}; "
    what += f"the largest process held {gib(largest)}"
    return MachineError(what, where=where, fix=f"look for `Out of memory` in `dmesg`; {_LESS}")
