"""What the nodes of a run compare before any worker starts: all that would fail later, slowly or in silence.

Every node states its facts, which need no other node (`facts`), then what it sees of the others (`_seen`).
All nodes get all of them and judge alike, so that all end with the same exit code. What only a tokenizer or
a model can tell is compared by the workers (`training.run`).
"""

import hashlib
import os
import platform
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from shardwise.device.find import find
from shardwise.errors import CheckpointError, JobError, MachineError, ShardwiseError
from shardwise.folders import cache_root
from shardwise.hardware.detect import visible
from shardwise.job.load import differences
from shardwise.job.paths import DATA_SUFFIXES, unplaced
from shardwise.launch.control import Together
from shardwise.launch.nodes import INTERFACES, addresses_of, interface_of
from shardwise.launch.spec import LaunchSpec
from shardwise.record.environment import versions
from shardwise.record.manifest import NAME, step_folders
from shardwise.units import processes

Facts = dict[str, Any]
Errors = Iterator[ShardwiseError]

MOST_SKEW_SECONDS = 5.0  # clocks that NTP keeps differ by milliseconds
LEAST_FREE_BYTES = 256 << 20  # no run that is worth several machines writes less
REACH_SECONDS = 5.0
_ENDS_BYTES = 1 << 20
_KINDS: tuple[type[ShardwiseError], ...] = (JobError, MachineError, CheckpointError)
_COMPARED = ("python", "shardwise", "torch", "transformers", "deepspeed", "peft", "tokenizers", "triton")
_OPTIONS = {"resume": "--resume", "max_steps": "--max-steps", "memory_cap_bytes": "--memory-cap"}


def check(together: Together, spec: LaunchSpec, mine: Facts, while_waiting: Callable[[], object]) -> bool:
    """Compare the nodes' `facts`; True where all see the same run folder. One error for all that is wrong."""
    place, marker = Path(spec.run_dir).parent, f".shardwise-{uuid.uuid4().hex[:12]}"
    listener, network = _network(together)
    with listener, _marked(place, marker) if together.first else nullcontext():
        mine = {**mine, **network, "marker": marker, "ahead": together.ahead}
        everyone = together.agree(mine, while_waiting)
        found = list(compare(everyone, together))
        views = together.agree(_seen(everyone, together.nodes.rank, place), while_waiting)
    found += [*_unreached(views, everyone, together), *_mixed(views, together)]
    found.sort(key=lambda error: _KINDS.index(type(error)))
    if found:
        error = found[0]
        if len(found) > 1:
            problems = [one.problems[0] for one in found]
            error = type(error)("the nodes do not fit together", problems=problems)
        raise together.elsewhere(error)
    return all(view["marked"] for view in views)


def facts(spec: LaunchSpec) -> Facts:
    """What this node can tell by itself; it may take long, so the others are met afterwards."""
    wanted = {"the run folder": Path(spec.run_dir).absolute().parent, "the cache": cache_root().absolute()}
    places = {name: next(p for p in (path, *path.parents) if p.exists()) for name, path in wanted.items()}
    checkpoints = step_folders(Path(spec.run_dir) / "checkpoints") if spec.resume else []
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "code": _code(),
        "job": {key: value for key, value in unplaced(spec.job).items() if key != "output"},
        "options": {flag: getattr(spec, name) for name, flag in _OPTIONS.items()},
        "processes": spec.processes,
        "data": _data(spec.job["data"]),
        "gpus": [str(getattr(card, "name", card)) for card in visible(find())],
        "free": {name: shutil.disk_usage(place).free for name, place in places.items()},
        "steps": [step for step, folder in checkpoints if (folder / NAME).exists()],
    }


def _network(together: Together) -> tuple[socket.socket, Facts]:
    """A socket on which this node waits for another to reach it, where gloo will; and the facts about it."""
    interface = os.environ.get(INTERFACES[0], "").split(",")[0] or interface_of(together.address)
    known = addresses_of(interface) if interface else [together.address]
    address = together.address if together.address in known or not known else known[0]
    listener = socket.create_server(
        (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
    )
    port = listener.getsockname()[1]
    return listener, {"interface": interface, "known": bool(known), "address": address, "port": port}


def _code() -> str:
    """A hash of this package's source, whatever version it says it is."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _data(data: Mapping[str, Any]) -> list[list[Any]]:
    """Name, size and a hash of both ends of each file of the data."""
    found: list[list[Any]] = []
    for key in ("train", "eval"):
        entries = data.get(key) or []
        for path in map(Path, [entries] if isinstance(entries, str) else entries):
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            files = [file for file in files if file.suffix.lower() in DATA_SUFFIXES and file.is_file()]
            found += [[str(file.relative_to(path.parent)), *_ends(file)] for file in files]
    return found


def _ends(file: Path) -> tuple[int, str]:
    size = file.stat().st_size
    with file.open("rb") as content:
        digest = hashlib.sha256(content.read(_ENDS_BYTES))
        content.seek(max(0, size - _ENDS_BYTES))
        digest.update(content.read(_ENDS_BYTES))
    return size, digest.hexdigest()[:12]


@contextmanager
def _marked(place: Path, marker: str) -> Iterator[None]:
    """Within, the folder holds an empty file by which other nodes know it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / marker).touch(mode=0o600)
    except OSError as error:
        what = f"the folder of the run cannot be written to: {error.strerror}"
        raise MachineError(what, where=str(place), fix="give permission, or --set output=DIR") from None
    try:
        yield
    finally:
        with suppress(OSError):
            (place / marker).unlink()


def _seen(everyone: Sequence[Facts], rank: int, place: Path) -> Facts:
    """What this node sees of the others: node 0's mark, and whether the next node can be reached."""
    following, reason = everyone[(rank + 1) % len(everyone)], ""
    try:
        address, own = (following["address"], following["port"]), (everyone[rank]["address"], 0)
        socket.create_connection(address, timeout=REACH_SECONDS, source_address=own).close()
    except OSError as error:
        reason = error.strerror or str(error)
    return {"unreached": reason, "marked": (place / everyone[0]["marker"]).exists()}


def compare(everyone: Sequence[Facts], together: Together) -> Errors:
    """An error for each fact in which a node differs from node 0, or which fails by itself."""
    first, zero = everyone[0], together.named(0)
    for node, other in enumerate(everyone):
        name = together.named(node)
        if not other["known"]:
            what = f"{name} has no network interface {other['interface']}, or it has no address"
            fix = f"see `ip address` there; unset {' and '.join(INTERFACES)}, or name one that exists"
            yield MachineError(what, where=INTERFACES[0], fix=fix)
        for place, free in other["free"].items():
            if free < LEAST_FREE_BYTES:
                what = f"{name} has {free >> 20} MiB free for {place}"
                yield MachineError(what, fix="make room there")
        if node:
            yield from _differing(first, other, zero=zero, name=name, ahead=first["ahead"][str(node)])
    if first["options"]["--resume"]:
        yield from _without_checkpoint(everyone, together)


def _differing(first: Facts, other: Facts, *, zero: str, name: str, ahead: float) -> Errors:
    yield from _other_software(first, other, zero=zero, name=name)
    for key, here, there in differences(first["job"], other["job"]):
        what, fix = f"{key} is {there!r} on {name}, {here!r} on {zero}", "start every node with the same job"
        yield JobError(what, where=key, fix=f"{fix} and --set")
    for flag, here in first["options"].items():
        if other["options"][flag] != here:
            what = f"{flag} is {other['options'][flag]} on {name}, {here} on {zero}"
            fix = "start every node with the same command"
            yield JobError(what, where=flag, fix=fix)
    if first["processes"] != other["processes"]:
        what = f"{name} runs {processes(other['processes'])}, {zero} {processes(first['processes'])}"
        fix = "every node needs as many: give --processes, or hide GPUs with CUDA_VISIBLE_DEVICES"
        yield JobError(what, where="--processes", fix=fix)
    yield from _other_data(first, other, zero=zero, name=name)
    if set(first["gpus"]) != set(other["gpus"]):
        what = f"{name} has {_cards(other)}, {zero} {_cards(first)}"
        fix = (
            "use nodes with the same GPUs: the slowest would hold up the others, and the plan is for one kind"
        )
        yield MachineError(what, fix=fix)
    if abs(ahead) > MOST_SKEW_SECONDS:
        way = "ahead of" if ahead > 0 else "behind"
        what = f"the clock of {name} is {abs(ahead):.0f} s {way} that of {zero}"
        fix = "set it: `timedatectl set-ntp true`, or chrony"
        yield MachineError(what, fix=fix)


def _other_software(first: Facts, other: Facts, *, zero: str, name: str) -> Errors:
    fix = "install the same versions on every node"
    for package in _COMPARED:
        here, there = (one["versions"].get(package, "not at all") for one in (first, other))
        if here != there:
            what = f"{name} has {package} {there}, {zero} {here}"
            yield MachineError(what, fix=fix)
    same = first["versions"].get("shardwise") == other["versions"].get("shardwise")
    if same and first["code"] != other["code"]:
        what = f"{name} has other code of the same version of shardwise than {zero}"
        yield MachineError(what, fix=fix)


def _other_data(first: Facts, other: Facts, *, zero: str, name: str) -> Errors:
    here, there = ({file: rest for file, *rest in one["data"]} for one in (first, other))
    fix = "copy the same files to every node"
    for file in sorted(here.keys() | there.keys()):
        if file not in here or file not in there:
            has, lacks = (zero, name) if file in here else (name, zero)
            yield JobError(f"{file} is on {has}, not on {lacks}", where="data", fix=fix)
        elif here[file] != there[file]:
            what = f"{file} is another file on {name} than on {zero}: "
            what += f"{there[file][0]} bytes, {here[file][0]} bytes"
            yield JobError(what, where="data", fix=fix)


def _cards(one: Facts) -> str:
    return ", ".join(sorted(set(one["gpus"]))) or "no GPU"


def _without_checkpoint(everyone: Sequence[Facts], together: Together) -> Errors:
    """Where no checkpoint is on all nodes: which of them lacks the newest."""
    common = set.intersection(*(set(one["steps"]) for one in everyone))
    newest = max((step for one in everyone for step in one["steps"]), default=None)
    if common or newest is None:
        return
    for node, one in enumerate(everyone):
        if newest not in one["steps"]:
            has = (
                f"it has those of steps {', '.join(map(str, one['steps']))}"
                if one["steps"]
                else "it has none"
            )
            what = f"{together.named(node)} lacks its part of the checkpoint of step {newest}; {has}"
            fix = "bring back that node's disk, or start another run"
            yield CheckpointError(what, fix=fix)


def _unreached(views: Sequence[Facts], everyone: Sequence[Facts], together: Together) -> Errors:
    for node, view in enumerate(views):
        following = (node + 1) % len(views)
        if view["unreached"]:
            target = everyone[following]
            what = f"{together.named(node)} cannot reach {together.named(following)} at {target['address']} "
            what += f"({target['interface']}): {view['unreached']}"
            fix = "open the firewall between the nodes for all ports, or name the right interface in "
            fix += " and ".join(INTERFACES)
            yield MachineError(what, where=f"port {target['port']}", fix=fix)


def _mixed(views: Sequence[Facts], together: Together) -> Errors:
    """An error where some of the other nodes see node 0's run folder, and some do not."""
    others = range(1, len(views))
    having, lacking = (
        ", ".join(together.named(node) for node in others if views[node]["marked"] == marked)
        for marked in (True, False)
    )
    if having and lacking:
        what = f"{having} see the run folder of {together.named(0)}, and {lacking} do not"
        fix = "name a folder that all nodes share, or one that is local on every node: --set output=DIR"
        yield MachineError(what, where="output", fix=fix)
