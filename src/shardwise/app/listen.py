"""The address of a server of this machine."""

import ipaddress
import socket
from socket import AF_INET, AF_INET6

from shardwise.errors import JobError, MachineError


def listen(host: str, port: int, *, token: str | None, use: str, fix: str) -> socket.socket:
    """A socket that listens on the address; `use`: what others could do without a token.

    Raises JobError where others would reach it without one, MachineError where the address is taken.
    """
    if not token and not _is_local(host):
        raise JobError(f"everybody who reaches {host} could {use}", where="--host", fix=fix)
    try:
        return socket.create_server((host, port), family=AF_INET6 if ":" in host else AF_INET)
    except OSError as error:
        what = f"{host}:{port} cannot be listened on: {error.strerror or error}"
        raise MachineError(what, where="--host, --port", fix="name another port, e.g. --port 0") from None


def _is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
