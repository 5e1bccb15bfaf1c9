"""The machines of a run: which of them this is, the address they meet at, and the network between them."""

import fcntl
import ipaddress
import os
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import JobError, MachineError

SECRET = "SHARDWISE_SECRET"  # noqa: S105 - the name of the environment variable
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # linux/sockios.h
PORTS = range(10_000, 32_768)  # Linux's ephemeral ports begin at 32768, unless ip_local_port_range differs


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run, and this one's place among them."""

    count: int
    rank: int
    rendezvous: str  # HOST:PORT of node 0; the port is the control connection's
    shared: bool = True  # All nodes see the same run folder; the start-up checks find it out

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            what = f"node {self.rank} is not one of {self.count} nodes"
            fix = f"count from 0: the nodes are 0 to {max(0, self.count - 1)}"
            raise JobError(what, where="--nodes, --node-rank", fix=fix)
        self.address()

    def address(self) -> tuple[str, int]:
        """Host and port of the rendezvous; JobError where it is not written as such."""
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            fix = "write the address and a free port of node 0, as 10.0.0.1:29500"
            raise JobError(f"{self.rendezvous!r} is not HOST:PORT", where="--rendezvous", fix=fix)
        return host.removeprefix("[").removesuffix("]"), int(port)


class Place(NamedTuple):
    """Where the workers of this node stand among all, and where all of them meet."""

    node: int = 0
    first_rank: int = 0
    world_size: int | None = None  # None: the processes of this machine are all there are
    address: str = "127.0.0.1"  # of rank 0
    port: int | None = None  # None: any free one
    interface: str | None = "lo"


def chosen(nodes: int | None, node_rank: int | None, rendezvous: str | None) -> Nodes | None:
    """What --nodes, --node-rank and --rendezvous say together; None for one machine. JobError for a part."""
    alone = node_rank is None or (nodes == 1 and node_rank == 0)
    if nodes in (None, 1) and alone and rendezvous is None:
        return None
    given = {"--nodes": nodes, "--node-rank": node_rank, "--rendezvous": rendezvous}
    missing = [flag for flag, value in given.items() if value is None]
    if nodes is None or node_rank is None or rendezvous is None:
        fix = f"give {' and '.join(missing)}, too: the same on every node, except the node's own rank"
        raise JobError("several nodes need three options", where=", ".join(missing), fix=fix)
    return Nodes(count=nodes, rank=node_rank, rendezvous=rendezvous)


def node_name() -> str:
    """What people call this machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def resolve(nodes: Nodes) -> tuple[socket.AddressFamily, str, int]:
    """The rendezvous as numbers. MachineError where the name leads nowhere, or to this machine's loopback."""
    host, port = nodes.address()
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter for names that no host can have
        what = f"the rendezvous {host[:200]} is unknown here: {getattr(error, 'strerror', None) or error}"
        raise MachineError(what, where="--rendezvous", fix="give node 0's address in numbers") from None
    address = str(found[0])
    if nodes.count > 1 and ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
        what = f"{host} is {address} on this machine, which no other machine reaches"
        fix = "give node 0's address in numbers, or correct /etc/hosts"
        raise MachineError(what, where="--rendezvous", fix=fix)
    return family, address, port


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None where none is known to."""
    return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), None)


def addresses_of(interface: str) -> list[str]:
    """The addresses of an interface that gloo may listen on: its first IPv4 address, and IPv6 ones."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port of this machine's address that nothing listens on. OSError: the address is another's.

    Some connection may be given an ephemeral port before it is used here, so a lower one is preferred.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in random.SystemRandom().sample(PORTS, 9):
        with suppress(OSError), socket.create_server((address, port), family=family):
            return port
    with socket.create_server((address, 0), family=family) as probe:
        return int(probe.getsockname()[1])
