"""The messages between the nodes of a ``ram://`` store, over TCP.

A message is a header (its kind, the CRC32C of all the rest, its length) and its bytes. Nothing is pickled. A connection
carries one request at a time:

1. ``HELLO`` with the token of the server's process, which only the job's processes know. ``OK``.
2. ``FIND``, ``READ``, ``LIST``, ``DELETE``, ``LEFT``: ``OK`` with the answer, or ``ERROR``.
3. ``PUT``: ``OK``. Then as many ``PIECE`` as there are, without answers; ``COMPLETE``: ``OK``, when every checksum was
   right. Then ``PUBLISH``: ``OK``. A server that fails on the way says ``ERROR`` and ends the connection. If the
   connection ends before ``PUBLISH``, nothing appears.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final

from typing_extensions import Buffer

from dcp_datastates._native import crc32c

__all__ = [
    "TOKEN_BYTES",
    "DamagedError",
    "Kind",
    "Line",
    "listen",
]

PROGRESS_SECONDS: Final = 30.0
"""How long a connection may carry no byte while one is due."""

_CONNECT_SECONDS: Final = 10.0

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that is gone is noticed in about 30 seconds by connections that carry nothing, too."""

TOKEN_BYTES: Final = 16

_HEADER: Final = struct.Struct("!BIQ")
_COVERED: Final = struct.Struct("!BQ")

_MOST_BYTES: Final = 8 << 30
"""Of one message: more than any part."""

_BUFFER_BYTES: Final = 1 << 20
"""What a server holds of a piece."""

_JOINED_BYTES: Final = 64 << 10
"""A smaller message is sent by one call."""


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    FIND = 2
    READ = 3
    LIST = 4
    DELETE = 5
    PUT = 6
    PIECE = 7
    COMPLETE = 8
    PUBLISH = 9
    LEFT = 10
    OK = 11
    ERROR = 12


class DamagedError(OSError):
    """A message came with other bytes than were sent."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "a message came damaged: its checksum differs")


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Line:
    """One end of a connection. One thread at a time; waits without the GIL. Methods raise OSError."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PROGRESS_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._buffer = bytearray()
        self._seconds = PROGRESS_SECONDS
        self._ends_at = math.inf
        _sockets.add(connection)

    @classmethod
    def to(cls, host: str, port: int, seconds: float = _CONNECT_SECONDS) -> Line:
        """A connection to a server, which takes it within ``seconds``. Raises OSError."""
        with _explained(seconds):
            return cls(socket.create_connection((host, port), seconds))

    def end_within(self, seconds: float) -> None:
        """Have all that is sent and received from now on fail after ``seconds``, even while bytes pass."""
        self._seconds = min(seconds, PROGRESS_SECONDS)
        self._ends_at = time.monotonic() + seconds

    def send(self, kind: Kind, *parts: Buffer) -> None:
        """Send a message of ``parts``, one behind the other."""
        views = [memoryview(part).cast("B") for part in parts]
        length = sum(view.nbytes for view in views)
        checksum = crc32c(_COVERED.pack(kind, length))
        for view in views:
            checksum = crc32c(view, checksum)
        header = _HEADER.pack(kind, checksum, length)
        if length <= _JOINED_BYTES:
            views = [memoryview(b"".join([header, *views]))]
        else:
            views.insert(0, memoryview(header))
        with _explained(self._seconds):
            for view in views:
                while view.nbytes:  # sendall() has one limit of time for all
                    self._check_time()
                    view = view[self._socket.send(view) :]

    def receive(
        self,
        *,
        most: int = _MOST_BYTES,
        is_idle: bool = False,
        pieces_to: Callable[[memoryview], object] | None = None,
    ) -> tuple[Kind, memoryview]:
        """The next message: its kind and its bytes, at most ``most``. If the connection ``is_idle``, waits without a
        limit until it begins.

        The bytes of a ``PIECE`` go to ``pieces_to``, as they come. They count only if this returns.

        Raises ConnectionError if the connection has ended, TimeoutError, :class:`DamagedError`, and what ``pieces_to``
        raises.
        """
        self._socket.settimeout(None if is_idle else PROGRESS_SECONDS)
        number, expected, length = _HEADER.unpack(self._exactly(_HEADER.size))
        self._socket.settimeout(PROGRESS_SECONDS)
        checksum = crc32c(_COVERED.pack(number, length))
        if number == Kind.PIECE and pieces_to is not None:
            while length:
                self._buffer = self._buffer or bytearray(_BUFFER_BYTES)
                view = self._exactly(min(length, len(self._buffer)), self._buffer)
                length -= view.nbytes
                checksum = crc32c(view, checksum)
                pieces_to(view)
            view = memoryview(b"")
        elif length > most:
            raise DamagedError
        else:
            view = self._exactly(length)
            checksum = crc32c(view, checksum)
        if checksum != expected or number not in Kind._value2member_map_:
            raise DamagedError
        return Kind(number), view

    def has_news(self) -> bool:
        """Whether something has come, or the connection has ended."""
        return bool(self._poll.poll(0))

    def drain(self) -> None:
        """Send nothing more, and read all that still comes: so the other end can read what was sent to it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(1 << 20):
                pass

    def close(self) -> None:
        """Idempotent; any thread. Wakes a thread that waits for the other end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _check_time(self) -> None:
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if left < PROGRESS_SECONDS:
            self._socket.settimeout(left)

    def _exactly(self, nbytes: int, buffer: bytearray | None = None) -> memoryview:
        view = memoryview(bytearray(nbytes) if buffer is None else buffer)[:nbytes]
        rest = view
        with _explained(self._seconds):
            while rest.nbytes:
                self._check_time()
                count = self._socket.recv_into(rest)
                if not count:
                    raise ConnectionResetError(errno.ECONNRESET, "the connection has ended")
                rest = rest[count:]
        return view


@contextlib.contextmanager
def _explained(seconds: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(
            errno.ETIMEDOUT, f"it does not answer: nothing has passed for {seconds:g} s"
        ) from error


def listen(host: str) -> socket.socket:
    """A socket that takes connections at ``host``, an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=1024)
    _sockets.add(listening)
    return listening


def _close_in_child() -> None:
    for each in list(_sockets):  # else the other end would not notice when the parent has ended
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
