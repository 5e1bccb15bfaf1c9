"""From a job to a finished run: data, model, strategy, engine, run folder, loop; in this order.

The run folder is written only after the job, the data and the model have been checked.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.device.find import fake_file, find
from shardwise.engines import descriptor
from shardwise.engines.runtime.host_copy import HostCopy
from shardwise.engines.runtime.protocol import Engine, World, build_engine
from shardwise.errors import DoesNotFitError, JobError, StoppedError
from shardwise.hardware.detect import driver_version
from shardwise.job.paths import absolute
from shardwise.job.schema import Job
from shardwise.job.source import job_text
from shardwise.kernels.fused import apply_fused_kernels
from shardwise.launch import heartbeat
from shardwise.launch.resume import resume_command
from shardwise.launch.spec import LaunchSpec
from shardwise.models.adapters import check_bitsandbytes, is_adapter
from shardwise.models.export import save_weights
from shardwise.models.families import liger_kernels
from shardwise.models.structure import checkpoint_blocks
from shardwise.objective import objective_of
from shardwise.record.environment import environment, versions
from shardwise.record.manifest import Origin
from shardwise.record.read import EVENTS, evaluations_of, ranked, read_events
from shardwise.record.write import RunFolder
from shardwise.strategy import Strategy
from shardwise.training.announce import announce, header, speed
from shardwise.training.checkpoint import CheckpointStore, Disk, Keep
from shardwise.training.loop import Loop, check_warmup
from shardwise.training.meter import (
    PROFILED_STEPS,
    UNKNOWN,
    card_of,
    host_millijoules,
    millijoules,
    profile_steps,
)
from shardwise.training.mirror import Mirroring
from shardwise.training.nonfinite import FirstNonFinite
from shardwise.training.observe import Quiet, Recorder
from shardwise.training.oom import explained
from shardwise.training.power import PowerTuner
from shardwise.training.process import Ranks, StopSignal, join, place, settled
from shardwise.training.ready import Ready, count_steps, get_ready, identity, make_streams
from shardwise.training.rehearsal import NOTICE, rehearsal
from shardwise.training.replay import Replay
from shardwise.training.samples import make_samples
from shardwise.training.saving import Progress, Saver, reserve
from shardwise.training.snapshot import Snapshots, seed_rng
from shardwise.units import gib

CHECKED_WEIGHTS = 6
"""Weights that are compared with their files, in addition to the first."""


def run(spec: LaunchSpec) -> None:
    """Runs the job of `spec` in this process. Collective over all processes of the run."""
    job = Job.model_validate(spec.job)
    rank, size, _ = place()
    ready = get_ready(
        job,
        processes=spec.world_size if spec.dry_run else size,
        nodes=1 if spec.nodes is None else spec.nodes.count,
        memory_cap_bytes=spec.memory_cap_bytes,
        chosen=spec.chosen,
    )
    total_steps = count_steps(ready)
    if job.train.steps is None and spec.measure_steps is None:
        check_warmup(job.optimizer, total_steps)
    if rank == 0:
        announce(ready, total_steps=total_steps, json_plan=spec.dry_run and spec.as_json)
    if spec.dry_run:
        return
    check_bitsandbytes(job.model, job.optimizer.name)
    at_most = _left_of_the_cap(spec.memory_cap_bytes, ready.strategy)
    heartbeat.mark("building")
    with explained(ready):
        world = join(
            tensor_parallel=ready.strategy.tensor_parallel,
            pipeline=ready.strategy.pipeline,
            reserve_at_most_bytes=at_most,
            local_disks=spec.nodes is not None and not spec.nodes.shared,
        )
        train(ready, spec, world)


def train(ready: Ready, spec: LaunchSpec, world: World) -> None:
    """Trains to the end, to `spec.max_steps`, or until asked to stop (StoppedError, exit code 75)."""
    job = ready.job
    measuring = spec.measure_steps is not None
    total_steps = max(count_steps(ready), _steps_to_measure(spec))
    run_dir = Path(spec.run_dir)
    ranks = Ranks(world)
    check_alike(ready, ranks)
    began, mine = time.monotonic(), millijoules(world.device)
    host_millijoules()  # it counts from its first call on
    engine = make_engine(ready, world)
    stop = StopSignal()
    stop.install()  # from here on there is something to save; before, a signal simply ends the process
    check_weights(ready, engine)
    ready.built.weights.source.release()
    stream, evaluation = make_streams(ready, world)
    _seed(job, world)
    strategy, about = ready.strategy.to_json(), identity(ready)
    snapshots = Snapshots(
        store=CheckpointStore(
            run_dir / "checkpoints",
            keep=Keep.of(job.train),
            rank=world.rank,
            agree=Ranks(world, "checkpoint").gather,  # a thread may use it, while training uses the other
            disk=_disk(spec, world),
        ),
        origin=Origin(world_size=world.size, strategy=strategy, identity=about, versions=versions()),
        engine=engine,
        stream=stream,
        write_weights=lambda folder, weights: save_weights(
            ready.built, weights, folder, ready.tokenizer, rank=world.rank
        ),
        weight_dtypes=ready.built.trainable_dtypes,
        copy=HostCopy(world),
        total_steps=total_steps,
        resume_from=spec.resume_from,
        trusted=spec.trust_checkpoint,
    )
    progress = snapshots.restore() if spec.resume else Progress()
    cards, first = zip(*ranks.gather((card_of(world.device), mine)), strict=True)
    _check_meter(job, first)
    gpus = GpusOfRanks(cards, first, waited=time.monotonic() - began)
    observer = make_observer(ready, spec, snapshots, progress, gpus, stop) if world.rank == 0 else Quiet()
    if world.rank > 0 and world.local_disks and world.local_rank == 0:
        run_folder(ready, spec).close()
    ranks.barrier()  # the run folder exists now, for every rank
    reads = spec.resume and world.rank == 0  # nodes with disks of their own have no events
    known = evaluations_of(read_events(run_dir / EVENTS), until=progress.step) if reads else []
    evaluations = ranks.gather(known)[0]
    snapshots.store.ranking = lambda: ranked(evaluations)
    if snapshots.store.keep.best:
        progress.best = next(iter(snapshots.store.ranking()), None)
    if spec.profile is not None and spec.measure_steps is not None:
        profile_steps(engine, after=spec.measure_steps, trace=Path(spec.profile))
    with rehearsal(engine, cards[world.rank]), observer:
        loop = Loop(
            job=job,
            engine=engine,
            stream=stream,
            evaluation=None if measuring else evaluation,
            ranks=ranks,
            stop=stop,
            observer=observer,
            saver=None if measuring else make_saver(snapshots, ranks),
            progress=progress,
            total_steps=total_steps,
            evaluations=evaluations,
            sample=make_samples(ready, engine),
            check=Replay(ready.built.model, engine, ranks, pipeline=ready.strategy.pipeline > 1).check,
            explain=partial(FirstNonFinite(ready.built.model, ready.tokenizer.decode).find, engine, ranks),
        )
        last_step = _steps_to_measure(spec) or min(total_steps, spec.max_steps or total_steps)
        with settled():
            arrived = loop.run(last_step)
        heartbeat.mark("ending", progress.step)
        done = loop.worse or progress.step >= (last_step if measuring else total_steps)
        status = "finished" if done else "paused" if arrived else "stopped"
        ends = ranks.gather((observer.stopping, millijoules(world.device), *host_millijoules()))
        (why, *_), gpus_end, *host_end = zip(*ends, strict=True)
        observer.finish(step=progress.step, status=status, millijoules=gpus_end, host=host_end)
    if not arrived:
        resume = resume_command(run_dir)
        what = f"{why or 'on request'} after step {progress.step} of {total_steps}; the state is saved"
        more = " with a larger one: --set energy.budget_kwh=KWH" if why else ""
        if spec.nodes is not None:
            more += ", with --nodes, --node-rank and --rendezvous on each node as before"
        raise StoppedError(what, where=spec.run_dir, fix=f"`{resume}` goes on from here{more}")


class GpusOfRanks(NamedTuple):
    """By rank, before the first step."""

    cards: Sequence[str | None]  # UUIDs
    millijoules: Sequence[float]  # energy counters, or UNKNOWN
    waited: float  # seconds since they were read


def _check_meter(job: Job, first: Sequence[float]) -> None:
    """A budget needs a meter. The same error on every rank."""
    if job.energy.budget_kwh is not None and UNKNOWN in first:
        what = f"rank {first.index(UNKNOWN)} has no GPU whose energy can be read, so a budget cannot be kept"
        raise JobError(what, where="energy.budget_kwh", fix="remove it, or see `shardwise doctor`")


def _steps_to_measure(spec: LaunchSpec) -> int:
    """Those that count, and those under the profiler; 0 for a run that is not only measured."""
    if spec.measure_steps is None:
        return 0
    return spec.measure_steps + (0 if spec.profile is None else PROFILED_STEPS)


def _left_of_the_cap(cap_bytes: int | None, strategy: Strategy) -> int | None:
    """What torch may reserve, so that the process with all that lies outside stays within --memory-cap."""
    if cap_bytes is None:
        return None
    left = cap_bytes - descriptor(strategy).outside_allocator_bytes(strategy)
    if left <= 0:
        what = f"{gib(cap_bytes)} is less than CUDA and NCCL take by themselves"
        raise DoesNotFitError(what, where="--memory-cap", fix=f"more than {gib(cap_bytes - left)}")
    return left


def make_engine(ready: Ready, world: World) -> Engine:
    """The engine of the strategy, holding this rank's share of the weights."""
    built, strategy = ready.built, ready.strategy
    apply_fused_kernels(built.model, world.device, liger=liger_kernels(built.config))
    checkpoint_blocks(built.blocks, every=strategy.checkpoint_every)
    module = objective_of(ready.job)(built.model)
    return build_engine(strategy, module, built.blocks, built.weights.fill, ready.job.optimizer, world)


def make_saver(snapshots: Snapshots, ranks: Ranks) -> Saver:
    """Saves in the background where that is possible. Collective."""
    why, others = reserve(snapshots.copy, snapshots.engine, ranks), ranks.world.rank > 0
    if why is not None:
        if not others:
            print(f"training waits while a checkpoint is written: {why}", file=sys.stderr, flush=True)
        return Saver(snapshots.save)
    return Saver(snapshots.save, snapshots.stage, quiet=others)


def check_weights(ready: Ready, engine: Engine) -> None:
    """Compare some weights, as the engine holds them, with the files they came from.

    Under ZeRO-3, a run has silently trained from random weights although files were loaded.
    """
    if ready.job.model.weights == "random":
        return
    names = [name for name, _ in ready.built.model.named_parameters() if not is_adapter(name)]
    some = {names[index * (len(names) - 1) // CHECKED_WEIGHTS] for index in range(CHECKED_WEIGHTS + 1)}
    gathered = engine.weights(some)
    if engine.world.rank == 0:
        ready.built.weights.verify(gathered)
    else:
        deque(gathered, maxlen=0)  # gathering is collective


def make_observer(
    ready: Ready, spec: LaunchSpec, saves: Snapshots, progress: Progress, gpus: GpusOfRanks, stop: StopSignal
) -> Recorder | PowerTuner:
    """Rank 0's observer; creates the run folder, or opens it again."""
    folder = run_folder(ready, spec)
    recorded = folder.events.exists() and bool(read_events(folder.events))
    begun = spec.resume and (recorded or progress.step > 0)
    if spec.resume and not recorded:  # it was killed before its first line was complete
        folder.events.unlink(missing_ok=True)
    folder.write_engine_config(f"{ready.strategy.engine}.json", saves.engine.config())
    recorder = Recorder(
        folder,
        job=ready.job.model_dump(mode="json"),
        header=header(ready, total_steps=count_steps(ready)),
        speed=speed(ready),
        resumed_step=progress.step if begun else None,
        cards=gpus.cards,
        first=gpus.millijoules,
        waited=gpus.waited,
        stop=stop.ask,
    )
    if fake_file() is not None:
        recorder.say(NOTICE)
    if (mirror := saves.store.keep.mirror) is not None and spec.measure_steps is None:
        if saves.engine.world.local_disks:
            what = "a mirror copies one folder of checkpoints, and each node has its own"
            raise JobError(what, where="train.keep", fix="put the run folder on a shared disk")
        recorder.mirror = Mirroring(f"{mirror}/{ready.job.name}", folder.path, saves.store)
    energy = ready.job.energy
    searched = energy.objective != "measure" and spec.measure_steps is None
    if not searched and energy.power_limit is None:
        return recorder
    return PowerTuner(
        recorder,
        energy=energy,
        device=find(),
        cards=gpus.cards,
        key={"job": identity(ready), "strategy": ready.strategy.to_json(), "versions": versions()},
        folder=folder.path,
    )


def run_folder(ready: Ready, spec: LaunchSpec) -> RunFolder:
    """Create the run folder, or open it again; on a node's own disk, too, so that it can resume there."""
    path, plan = Path(spec.run_dir), ready.to_json()
    if spec.resume:
        folder = RunFolder.reopen(path)
        folder.keep_choice(plan["chosen"])
        folder.keep_length(ready.job.train.steps, ready.job.train.epochs)
        return folder
    # Only what differs from the defaults: a job file again, which can be trained as it is.
    values = absolute(ready.job.model_dump(mode="json", exclude_defaults=True))
    about = environment(gpus=_gpus(), driver=driver_version(), command=spec.command)
    return RunFolder.create(path, job_yaml=job_text(values), plan=plan, environment=about)


def _disk(spec: LaunchSpec, world: World) -> Disk | None:
    if spec.nodes is None or spec.nodes.shared:
        return None
    return Disk(node=spec.nodes.rank, rank=world.local_rank, size=spec.processes)


def check_alike(ready: Ready, ranks: Ranks) -> None:
    """JobError on every rank where one has other data or another strategy than rank 0."""
    as_named = {"model": ready.job.model.model_dump(mode="json")}  # folders of nodes may have other paths
    mine = {**identity(ready), **as_named, "strategy": ready.strategy.to_json()}
    everyone = ranks.gather(mine)
    for rank, other in enumerate(everyone):
        keys = [key for key, value in everyone[0].items() if other.get(key) != value]
        if keys:
            what = f"rank {rank} has another {' and another '.join(keys)} than rank 0"
            fix = "give every node the same data, the same tokenizer and the same cache; or name a strategy"
            raise JobError(what, where=", ".join(keys), fix=fix)


def _seed(job: Job, world: World) -> None:
    """Seeds dropout per data-parallel rank; rows and initial weights have seeds of their own."""
    seed_rng(job.train.seed + world.data_rank)
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _gpus() -> list[dict[str, Any]]:
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties]
