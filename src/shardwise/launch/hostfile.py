"""Hostfiles: which machines train together, and which of them this one is.

The formats are DeepSpeed's and MPI's: a line is `HOST`, `HOST slots=N [max_slots=M]` or `HOST:N`; `#` begins
a comment. Hosts are names that ssh knows. A host without a number has a process for each of its GPUs.
"""

import ipaddress
import re
import socket
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import JobError, MachineError, Problem
from shardwise.launch.nodes import addresses_of

_LINE = re.compile(r"(?P<name>\[[^\]]+\]|[^\s:]+)(?::(?P<count>\d+))?(?P<more>(?:\s+[\w-]+\s*=\s*\S+)*)")
_NAME = re.compile(r"(?!-)[\w.:@%-]+")  # ssh would take others for options, or a shell for commands
_MOST_BYTES = 1 << 20  # tens of thousands of hosts
_KNOWN = ("slots", "max_slots", "max-slots")
_EXAMPLE = "write a line for each machine: HOST, HOST slots=8 or HOST:8"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of a hostfile."""

    name: str  # As ssh takes it
    slots: int | None  # Processes, one per GPU; None: as many as it has GPUs
    where: str  # FILE:LINE


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The machines of a hostfile, in its order. JobError with everything that is wrong in it."""
    try:
        if path.exists() and not path.is_file():
            raise JobError("the hostfile is no file", where=str(path), fix="check the path")
        if path.is_file() and path.stat().st_size > _MOST_BYTES:
            what = f"the hostfile has {path.stat().st_size} bytes, at most {_MOST_BYTES} are read"
            raise JobError(what, where=str(path), fix="check the path")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = f"the hostfile cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"
        raise JobError(what, where=str(path), fix="check the path") from None
    hosts: list[Host] = []
    problems: list[Problem] = []
    for number, text in enumerate(lines, 1):
        line, where = text.partition("#")[0].strip(), f"{path}:{number}"
        found = _host(line, where) if line else None
        if isinstance(found, Problem):
            problems.append(found)
        elif found is not None:
            hosts.append(found)
    problems += _disagreements(hosts)
    if not hosts and not problems:
        problems.append(Problem(what="it names no host", where=str(path), fix=_EXAMPLE))
    if problems:
        raise JobError("the hostfile is wrong", problems=problems)
    return tuple(hosts)


def _host(line: str, where: str) -> Host | Problem:
    match = _LINE.fullmatch(line)
    if match is None or not _NAME.fullmatch(match["name"].strip("[]")):
        return Problem(what=f"{line[:80]!r} is not a host", where=where, fix=_EXAMPLE)
    settings = dict(re.findall(r"([\w-]+)\s*=\s*(\S+)", match["more"]))
    unknown = [name for name in settings if name not in _KNOWN]
    if unknown:
        return Problem(what=f"{unknown[0]} is not known here", where=where, fix=_EXAMPLE)
    counts = {text for text in (match["count"], settings.get("slots")) if text is not None}
    if len(counts) > 1 or not all(re.fullmatch("[1-9][0-9]{0,3}", text) for text in counts):
        what = f"{' and '.join(sorted(counts))} is not one number of processes"
        return Problem(what=what, where=where, fix="slots=8 for a machine with 8 GPUs")
    slots = int(counts.pop()) if counts else None
    return Host(name=match["name"].strip("[]"), slots=slots, where=where)


def _disagreements(hosts: Sequence[Host]) -> list[Problem]:
    problems, first = [], dict[str, Host]()
    for host in hosts:
        if host.name in first:
            what = f"{host.name} stands here and in {first[host.name].where}"
            problems.append(Problem(what=what, where=host.where, fix="one line for each machine"))
        first.setdefault(host.name, host)
    other = next((host for host in hosts if host.slots != hosts[0].slots), None)
    if other is not None:
        one, two = (f"{host.slots or 'no'} slots" for host in (hosts[0], other))
        what = f"{hosts[0].name} has {one}, {other.name} {two}"
        problems.append(
            Problem(what=what, where=other.where, fix="every machine runs equally many processes")
        )
    return problems


def this_first(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts with this machine as the first, node 0. JobError where it is not one of them."""
    own = {address for _, name in socket.if_nameindex() for address in addresses_of(name)}
    found = [host for host in hosts if _is_this(host.name, own)]
    if len(found) == 1:
        return (found[0], *(host for host in hosts if host is not found[0]))
    known = ", ".join(sorted(own - {"127.0.0.1", "::1"})) or "no address"
    what, fix = "this machine is not in the hostfile", "start on one of its machines, or add this one"
    where = f"{socket.gethostname()}, {known}"
    if found:
        what = f"{' and '.join(host.name for host in found)} are the same machine, this one"
        where, fix = ", ".join(host.where for host in found), "one line for each machine"
    raise JobError(what, where=where, fix=fix)


def _is_this(name: str, own: Collection[str]) -> bool:
    if name in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    with suppress(OSError):
        found = {str(one[4][0]) for one in socket.getaddrinfo(address_name(name), None)}
        return any(one in own or ipaddress.ip_address(one).is_loopback for one in found)
    return False


def address_name(name: str) -> str:
    """What ssh's configuration puts in the place of a host's name: an alias has a name or address there."""
    try:
        asked = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        fix = "install it (Debian: apt-get install openssh-client), or start each node by hand with --nodes"
        raise MachineError("there is no ssh here", where="--hostfile", fix=fix) from None
    words = [line.split(maxsplit=1) for line in asked.stdout.splitlines()]
    return next((rest[0] for key, *rest in words if key == "hostname" and rest), name)


def own_address(other: str) -> str:
    """This machine's address on the way to another host. MachineError where there is no way to it."""
    target = address_name(other)
    try:
        family, kind, _, _, place = socket.getaddrinfo(target, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: it only chooses the way
            return str(probe.getsockname()[0])
    except OSError as error:
        what = f"{other} cannot be found from here: {error.strerror or error}"
        fix = "correct its name, or name this machine's address for it: --rendezvous ADDRESS:PORT"
        raise MachineError(what, where="--hostfile", fix=fix) from None
