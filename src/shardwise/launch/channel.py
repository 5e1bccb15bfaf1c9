"""One end of a connection between two nodes: frames of JSON, never pickled objects, each with an HMAC.

A frame is the length of its body, the HMAC under the secret, and the body. Both ends begin with a nonce, so
that no frame of another connection is accepted.
"""

import hashlib
import hmac
import json
import os
import select
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any

from shardwise.errors import MachineError
from shardwise.launch.nodes import SECRET

_MAGIC = b"shardws1"
_NONCE, _MAC, _MOST = 16, 32, 4 << 20
_SEND_SECONDS = 5.0

Message = dict[str, Any]


class ForgedError(MachineError):
    """The other end has another secret, or is another program."""


class Channel:
    """Frames over one socket. `heard`: when the last one came, by `time.monotonic`."""

    def __init__(self, connection: socket.socket, *, first: bool) -> None:
        """`first`: this is node 0's end."""
        connection.setblocking(False)
        self._socket, self._first = connection, first
        self._nonce, self._key = os.urandom(_NONCE), b""
        self._sent = self._received = 0
        self._buffer = bytearray()
        self._queue: deque[Message] = deque()  # until the key is known
        self.heard = time.monotonic()
        self._write(_MAGIC + self._nonce)

    def send(self, message: Message) -> None:
        """OSError where the connection is broken or the other end takes nothing."""
        if not self._key:
            self._queue.append(message)
            return
        body = json.dumps(message).encode()
        self._write(len(body).to_bytes(4, "big") + self._mac(self._first, self._sent, body) + body)
        self._sent += 1

    def receive(self) -> list[Message]:
        """What has come, without waiting. EOFError at the end, ForgedError for a frame of another secret."""
        ended = False
        while not ended and select.select([self._socket], [], [], 0)[0]:
            with suppress(BlockingIOError):
                data = self._socket.recv(1 << 16)
                ended = not data
                self._buffer += data
        found = list(iter(self._next, None))
        if found:
            self.heard = time.monotonic()
        elif ended:
            raise EOFError
        return found

    def address(self) -> str:
        """This end's address."""
        return str(self._socket.getsockname()[0])

    def close(self, wait_seconds: float = 0.0) -> None:
        """Close it; first let the other end take what was sent, for so long at most.

        To close a socket with unread bytes throws away what the other end has not read yet.
        """
        until = time.monotonic() + wait_seconds
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0 and select.select([self._socket], [], [], left)[0]:
                if not self._socket.recv(1 << 16):
                    break
        self._socket.close()

    def _next(self) -> Message | None:
        if not self._key and not self._greeted():
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        end = 4 + _MAC + size
        if size > _MOST:
            raise ForgedError("a frame is too long")
        if len(self._buffer) < max(end, 4):
            return None
        mac, body = bytes(self._buffer[4 : 4 + _MAC]), bytes(self._buffer[4 + _MAC : end])
        del self._buffer[:end]
        if not hmac.compare_digest(mac, self._mac(not self._first, self._received, body)):
            raise ForgedError("the other end has another secret")
        self._received += 1
        message: Message = json.loads(body)
        return message

    def _greeted(self) -> bool:
        """Take the other end's nonce, once it is there."""
        if not _MAGIC.startswith(bytes(self._buffer[: len(_MAGIC)])):
            raise ForgedError("the other end is another program")
        if len(self._buffer) < len(_MAGIC) + _NONCE:
            return False
        theirs = bytes(self._buffer[len(_MAGIC) : len(_MAGIC) + _NONCE])
        del self._buffer[: len(_MAGIC) + _NONCE]
        nonces = self._nonce + theirs if self._first else theirs + self._nonce
        self._key = hmac.digest(os.environ.get(SECRET, "").encode(), _MAGIC + nonces, hashlib.sha256)
        for message in self._queue:
            self.send(message)
        return True

    def _mac(self, first: bool, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, bytes([first]) + number.to_bytes(8, "big") + body, hashlib.sha256)

    def _write(self, data: bytes) -> None:
        self._socket.settimeout(_SEND_SECONDS)
        try:
            self._socket.sendall(data)
        finally:
            self._socket.setblocking(False)
