"""A job to a run: check what can be checked without a model, start the processes, wait for them."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shardwise.app.jobs import AnyJob, Changes, cap_in_bytes, read, texts, trainable
from shardwise.device.fake import create
from shardwise.device.find import FAKE, REPLAY
from shardwise.engines import settings_of
from shardwise.engines.facts import Devices
from shardwise.errors import JobError, MachineError, ShardwiseError
from shardwise.hardware.detect import gpu_count
from shardwise.job.load import LoadedJob
from shardwise.job.schema import Job
from shardwise.launch import resume as resuming
from shardwise.launch.control import excuse
from shardwise.launch.hostfile import Host, own_address, read_hostfile, this_first
from shardwise.launch.local import launch
from shardwise.launch.nodes import Nodes, chosen, free_port
from shardwise.launch.restart import Restarts
from shardwise.launch.slurm import nodes_of_step, share_secret, stopped_in_time
from shardwise.launch.spec import LaunchSpec
from shardwise.launch.ssh import launch_on
from shardwise.power.lease import FOLDER as LEASES
from shardwise.record.energy import read_used
from shardwise.record.follow import Follower
from shardwise.record.manifest import step_folders
from shardwise.record.read import is_being_written, is_run_folder, read_run
from shardwise.record.write import check_place, in_use
from shardwise.report.terminal import show
from shardwise.screen import as_text
from shardwise.space.auto import resolve
from shardwise.strategy import Strategy
from shardwise.training.mirror import is_place, take, take_missing


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended. `print` shows its `shardwise report`."""

    folder: Path
    exit_code: int
    """0: done; 75: stopped with its state saved; anything else: the error is on stderr."""

    def __str__(self) -> str:
        return as_text(show, [self.folder]) if is_run_folder(self.folder) else repr(self)

    def summary(self) -> dict[str, Any]:
        """Losses, speed, memory and energy, as `shardwise report --json` has them."""
        from shardwise.report.compare import summary

        return summary(self.folder)

    def events(self, kind: str = "step") -> list[dict[str, Any]]:
        """The events of a kind, in order; `record/schema.py` says what is in them."""
        return [event for event in read_run(self.folder).events if event["kind"] == kind]


def train(
    job: AnyJob,
    *,
    processes: int | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    hostfile: str | Path | None = None,
    workdir: str | Path | None = None,
    resume: bool = False,
    resume_or_start: bool = False,
    resume_from: str | None = None,
    trust_checkpoint: bool = False,
    max_steps: int | None = None,
    dry_run: bool = False,
    changes: Changes = (),
    memory_cap: str | int | None = None,
    on_oom: Literal["stop", "retry"] = "stop",
    as_json: bool = False,
    supervise: bool = False,
    simulate_power: bool = False,
    debug: bool = False,
    command: Sequence[str] = ("shardwise.train",),
    on_event: Callable[[dict[str, Any]], object] | None = None,
) -> Run:
    """Train a model as the job says, in processes of its own; returns when they have ended.

    Args:
        job: a job file or a job; with `resume` also a run folder.
        processes: of this machine, one per GPU; None: the resumed run's, all GPUs, or 1.
        nodes: machines that train together; each calls this with the same job.
        node_rank: which of them this is, from 0.
        rendezvous: `HOST:PORT` of node 0, where they meet.
        hostfile: machines that train together, as DeepSpeed and MPI list them: they are started over ssh.
        workdir: the folder that the others start in; None: the same as here.
        resume: continue from the run's newest checkpoint.
        resume_or_start: the same if the run has one, else begin: a batch system may repeat it.
        resume_from: resume from `step-000400`, `final` or `latest`; newer checkpoints are set aside.
        trust_checkpoint: load DeepSpeed's own files even if they name code that they do not need.
        max_steps: stop after this step; the schedule stays the job's.
        dry_run: show what would run; train nothing.
        changes: what the command line's `--set` is for: `{"train.steps": 20}`, or `key=value` texts.
        memory_cap: use no more of each GPU; bytes, or `16GiB`.
        on_oom: after a GPU ran out of memory: stop, or retry with a strategy that needs less.
        supervise: start it again after a crash, a hang or a lost GPU, and resume what the folder has.
        as_json: a dry run prints its plan as one JSON object.
        simulate_power: rehearse power limits on the CPU, with a fake GPU for each process.
        debug: print the traceback of a process that fails.
        command: what the user typed, for the run's record.
        on_event: called with each new line of events.jsonl while the run goes on, in this process. False
            asks the run to save and stop; an exception ends it at once.

    Returns:
        The run: its `folder`, `exit_code`, `summary()` and `events()`. What only the processes find, they
        print; then `exit_code` is not 0.

    Raises:
        JobError: the job, the run folder or an argument is wrong.
        CheckpointError: the run to resume is damaged, or another job's.
    """
    changes = texts(changes)
    hosts = () if hostfile is None else this_first(read_hostfile(Path(hostfile)))
    among = _nodes(hosts, nodes, node_rank, rendezvous)
    if hosts:
        processes = processes or hosts[0].slots
    if supervise and among is not None:
        fix = "leave it out; the batch system starts all nodes again, with --resume-or-start"
        raise JobError("--supervise works on one machine", where="--supervise", fix=fix)

    goes_on = (resume or resume_or_start or supervise) and among is None and not dry_run
    if goes_on and resume_from is None and (folder := _finished(job, changes, max_steps)):
        return Run(folder=folder, exit_code=0)
    build = partial(
        _spec,
        job,
        nodes=among,
        resume=resume,
        resume_or_start=resume_or_start,
        supervise=supervise,
        trust_checkpoint=trust_checkpoint,
        max_steps=max_steps,
        dry_run=dry_run,
        changes=changes,
        memory_cap=memory_cap,
        on_oom="retry" if supervise else on_oom,
        as_json=as_json,
        simulate_power=simulate_power,
        debug=debug,
        command=command,
    )
    try:
        spec, folder = build(processes=processes, resume_from=resume_from)
    except ShardwiseError as error:
        if among is not None and not dry_run:
            excuse(among, error)
        raise
    if len(hosts) > 1 and among is not None and not dry_run:
        again, there = _again(job, spec, changes, memory_cap), Path(workdir or Path.cwd())
        code = launch_on(hosts, again, rendezvous=among.rendezvous, workdir=there, run_dir=folder)
        return Run(folder=folder, exit_code=code)
    simulated = _simulated(spec.processes) if simulate_power and not dry_run else nullcontext()
    restarts = None
    if supervise and not dry_run:
        on_fewer = partial(_on_what_is_left, lambda count: build(processes=count)[0], spec.processes)
        restarts = Restarts(folder, partial(on_fewer, gpu_count()))
    look = _looker(folder, on_event)
    with simulated, stopped_in_time():
        code = launch(spec, look=look, restarts=restarts)
    look()
    return Run(folder=folder, exit_code=code)


def _finished(job: AnyJob, changes: Sequence[str], max_steps: int | None) -> Path | None:
    """The folder of a run that has nothing left to do, which is said; None for any other."""
    loaded, folder = _named(job, changes, resume=True, needs_data=False)
    if not is_run_folder(folder) or not step_folders(folder / "checkpoints"):
        return None
    resuming.check_same_job(loaded, folder)
    if said := resuming.finished(folder, loaded.job, max_steps):
        print(said, file=sys.stderr)
    return folder if said else None


def _named(job: AnyJob, changes: Sequence[str], *, resume: bool, needs_data: bool) -> tuple[LoadedJob, Path]:
    """The job of a value, a file or a run folder, and its run folder."""
    if isinstance(job, Job) or (file := resuming.job_file(Path(job), resume=resume)) == Path(job):
        loaded = read(job, changes, needs_data=needs_data)
        return loaded, Path(loaded.job.output) / loaded.job.name
    return read(file, changes, needs_data=needs_data), Path(job)


def _on_what_is_left(build: Callable[[int], LaunchSpec], wanted: int, gpus: int) -> LaunchSpec:
    """`build` with `wanted` processes, or the most that the job allows on the GPUs left of `gpus`."""
    left = min(wanted, gpu_count()) if gpus else wanted
    refused: ShardwiseError = MachineError("no GPU is left", fix="see `shardwise doctor`")
    for processes in range(left, 0, -1):
        try:
            spec = build(processes)
        except JobError as error:
            refused = error if processes == left else refused
            continue
        if processes < wanted:
            text = f"supervise: {left} of {wanted} GPUs are left: going on with {processes} processes"
            print(text, file=sys.stderr, flush=True)
        return spec
    raise refused


def _looker(folder: Path, on_event: Callable[[dict[str, Any]], object] | None) -> Callable[[], bool]:
    """A function that hands new events on; it returns False where a call asks to stop."""
    events, on_event = Follower(folder), on_event or (lambda _: None)
    events.read()  # what is there is of earlier launches

    def look() -> bool:
        again, found = events.read()
        if again:  # a resumed run has replaced its file
            found = found[max((i for i, event in enumerate(found) if event["kind"] == "resume"), default=0) :]
        return False not in [on_event(event) for event in found]

    return look


def _nodes(
    hosts: Sequence[Host], nodes: int | None, node_rank: int | None, rendezvous: str | None
) -> Nodes | None:
    """The nodes that the options name, or a hostfile, or Slurm; None for this machine alone."""
    if hosts:
        if nodes is not None or node_rank is not None:
            fix = "leave out --nodes and --node-rank"
            raise JobError("the hostfile says which nodes there are", where="--hostfile", fix=fix)
        if rendezvous is None and len(hosts) > 1:
            own = own_address(hosts[1].name)
            rendezvous = f"{own}:{free_port(own)}"
        return None if rendezvous is None else Nodes(count=len(hosts), rank=0, rendezvous=rendezvous)
    if (nodes, node_rank, rendezvous) != (None, None, None):
        return chosen(nodes, node_rank, rendezvous)
    found = nodes_of_step()
    if found is not None:
        share_secret()
    return found


def _again(job: AnyJob, spec: LaunchSpec, changes: Sequence[str], memory_cap: str | int | None) -> list[str]:
    """The arguments of `shardwise` that run a spec on each host."""
    if isinstance(job, Job):
        raise JobError("hosts read the job from a file", where="hostfile", fix="name a job file")
    values = {"--max-steps": spec.max_steps, "--memory-cap": memory_cap, "--processes": spec.processes}
    values["--resume-from"] = spec.resume_from
    words = ["train", str(job), *(["--resume"] if spec.resume else []), *(["--debug"] if spec.debug else [])]
    words += ["--trust-checkpoint"] if spec.trust_checkpoint else []
    words += [word for name, value in values.items() if value is not None for word in (name, str(value))]
    return words + [word for change in changes for word in ("--set", change)]


def _spec(
    job: AnyJob,
    *,
    nodes: Nodes | None,
    processes: int | None,
    resume: bool,
    resume_or_start: bool,
    supervise: bool,
    changes: Sequence[str],
    memory_cap: str | int | None,
    simulate_power: bool,
    resume_from: str | None = None,
    **options: Any,
) -> tuple[LaunchSpec, Path]:
    """What to launch, and the run folder, after all checks that this machine can make by itself."""
    resume = resume or resume_from is not None
    named = None if isinstance(job, Job) else Path(job)
    if named is not None and not named.exists() and is_place(resume_from):
        take(resume_from, named)
    begins = not (resume or resume_or_start or supervise)
    loaded, folder = _named(job, changes, resume=not begins, needs_data=True)
    asked, gpus = trainable(loaded).job, gpu_count()
    first = nodes is None or nodes.rank == 0
    if first and not options["dry_run"] and is_being_written(folder):
        raise in_use(folder)
    if first and not options["dry_run"]:
        resume_from = take_missing(asked, folder, resume_from, begins=begins)
    resume = resume or (supervise and is_run_folder(folder))
    if resume_or_start:
        resume = resume or bool(step_folders(folder / "checkpoints"))
        if not resume and not options["dry_run"] and first:
            resuming.set_aside(folder)
    if resume or not (options["dry_run"] or (resume_or_start and not first)):
        _check_folder(folder, resume=resume)
        if first and not resume:
            check_place(folder)
    count = 1 if nodes is None else nodes.count
    if resume:
        resuming.check_same_job(loaded, folder)
        if nodes is None:
            resuming.check_nodes(folder)
        _check_budget(asked, folder)
        processes = processes or resuming.processes_of(folder, nodes=count)
    processes = processes or (1 if asked.strategy == "single" else max(1, gpus))
    if simulate_power and gpus:
        what = "--simulate-power rehearses on the CPU, and there are GPUs here"
        raise JobError(what, where="--simulate-power", fix="hide them: set CUDA_VISIBLE_DEVICES to nothing")
    if nodes is not None and (simulate_power or options["on_oom"] == "retry"):
        flag = "--simulate-power" if simulate_power else "--on-oom retry"
        fix = "leave it out; after GPU memory ran out the error says what would fit"
        raise JobError(f"{flag} works on one machine, and this run has {count}", where=flag, fix=fix)
    kept = resuming.last_choice(folder, asked, processes * count) if resume else None
    _check_strategy(loaded, kept, processes * count, gpus, resuming=resume)
    spec = LaunchSpec(
        job=asked.model_dump(mode="json"),
        run_dir=str(folder),
        processes=processes,
        nodes=nodes,
        resume=resume,
        resume_from=None if resume_from is None else resuming.step_named(folder, resume_from),
        memory_cap_bytes=cap_in_bytes(memory_cap, gpus),
        chosen=kept,
        **{**options, "command": list(options["command"])},
    )
    return spec, folder


@contextmanager
def _simulated(processes: int) -> Iterator[None]:
    """Within, this machine has a fake GPU for each process. They and their leases are temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-power-"))
    fake = create(folder / "gpus.json", cards=processes)
    new = {REPLAY: f"{FAKE}{fake}", LEASES: str(folder / "leases")}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        if not any(folder.glob("leases/*.json")):  # a guardian needs them a moment longer
            shutil.rmtree(folder)


def _check_budget(job: Job, folder: Path) -> None:
    """JobError where a run to resume has used its energy up."""
    used, budget = read_used(folder), job.energy.budget_kwh
    if used is not None and budget is not None and used.kwh >= budget:
        what = f"the run has used {used.kwh:.4g} kWh of its {budget:g} kWh"
        fix = "give it more: --set energy.budget_kwh=KWH"
        raise JobError(what, where="energy.budget_kwh", fix=fix)


def _check_strategy(
    loaded: LoadedJob, kept: dict[str, Any] | None, processes: int, gpus: int, *, resuming: bool
) -> None:
    """Refuse what cannot be combined before any process starts, at the job file's lines.

    `kept`: the choice that a resumed run keeps (`last_choice`), whatever the file says. The workers resolve
    the strategy again; they know the model's size and the GPU's memory.
    """
    own = {} if kept is None else {"strategy": settings_of(Strategy.from_json(kept["strategy"]))}
    try:
        devices: Devices = "cuda" if gpus else "cpu"
        resolve(loaded.job.model_copy(update=own), world_size=processes, devices=devices, resuming=resuming)
    except JobError as error:
        raise loaded.located(error) from None


def _check_folder(folder: Path, *, resume: bool) -> None:
    """A new run needs an empty place, a resumed one a run; JobError names the flag that fits."""
    if resume and not is_run_folder(folder):
        raise JobError("there is no run to resume", where=str(folder), fix="run without --resume")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        goes_on = f"`{resuming.resume_command(folder)}` continues it; " if is_run_folder(folder) else ""
        what = "the run folder exists already"
        raise JobError(what, where=str(folder), fix=f"{goes_on}--set name={folder.name}-2 starts another")
