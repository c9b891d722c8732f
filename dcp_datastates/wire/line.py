"""A connection between two processes of a job, the messages on it, and a client that keeps connections.

A message is a header, words (JSON) and data (plain bytes). The header has the lengths of both, their CRC32C, and a
CRC32C of its own. Nothing is unpickled, and each length is compared with a limit before memory is taken.

Before the first message, each end proves that it knows the key of the server's :class:`Address`:

1. The server sends a random challenge, whose first byte says whether it uses TLS. Both ends do, or they part.
2. With TLS, they shake hands: all that follows is encrypted.
3. The client sends a challenge of its own, and an HMAC of both by the key.
4. The server sends another HMAC of both; zeros, if the client's was wrong.

The client then sends requests, and receives an answer to each, in order: ``["ok", result]``, with data, or ``["error",
errno, text]``.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import math
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from typing_extensions import Buffer

from dcp_datastates._native import crc32c
from dcp_datastates.process.forks import closed_in_children
from dcp_datastates.wire.secret import SAME_FOR_ALL, Address, encryption

PROGRESS_SECONDS: Final = 30.0
"""How long a connection may carry no byte while one is due."""

CONNECT_SECONDS: Final = 10.0

CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = 32

_TRIES: Final = 3
"""To connect, if the server ends the connection: it may have too many that prove nothing."""

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that is gone is noticed in about 30 seconds by connections that carry nothing, too."""

_HEADER: Final = struct.Struct("!IQII")
"""The length of the words, that of the data, the checksum of both, and that of these three."""

_MOST_WORDS: Final = 16 << 20
"""Bytes: the names of all files of a checkpoint of 16,384 ranks take 4 MiB."""


class DamagedError(OSError):
    """A message came with other bytes than were sent. The next one can be received."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "a message came damaged: its checksum differs")


class RefusedError(OSError):
    """The server has answered a request with an error. The next one can be sent."""


class Line:
    """One end of a connection. One thread at a time; waits without the GIL. Methods raise OSError: ConnectionError if
    the connection has ended, TimeoutError, :class:`DamagedError`.

    ``patience``: waits so many times :data:`PROGRESS_SECONDS` while nothing passes. A server waits longer than its
    client, which then says that nothing passes, and not that the connection has ended.
    """

    def __init__(self, connection: socket.socket, patience: float = 1.0) -> None:
        self._most_seconds = patience * PROGRESS_SECONDS
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = closed_in_children(connection)
        self._seconds = self._most_seconds
        self._ends_at = math.inf

    def end_within(self, seconds: float) -> None:
        """Let all that is sent and received from now on fail after ``seconds``, even while bytes pass."""
        self._seconds = min(seconds, self._most_seconds)
        self._ends_at = time.monotonic() + seconds

    # ---- requests and answers ------------------------------------------------------------------------

    def result(self, most: int = 0) -> tuple[Any, memoryview]:
        """Receive the answer to a request that was sent. Raises :class:`RefusedError` if it is an error."""
        words, data = self.receive(most)
        match words:
            case ["ok", result]:
                return result, data
            case ["error", int(number), str(text)]:
                raise RefusedError(number, text)
        raise DamagedError

    def requests(self, most: int = 0) -> Iterator[tuple[Any, memoryview]]:
        """The requests that come, with data of at most ``most`` bytes each, until the connection ends. Each is to be
        answered before the next, which is waited for without a limit.
        """
        while True:
            try:
                request = self.receive(most, is_idle=True)
            except DamagedError as error:
                self.refuse(error)
            else:
                yield request

    def answer(self, result: object, *data: Buffer) -> None:
        """Answer a request."""
        self.send(["ok", result], *data)

    def refuse(self, error: OSError) -> None:
        """Answer a request with an error."""
        text = error.strerror or str(error) or type(error).__name__
        self.send(["error", error.errno or errno.EIO, text])

    # ---- messages ------------------------------------------------------------------------------------

    def send(self, words: object, *data: Buffer) -> None:
        """Send a message; its data are those of all ``data``, one after the other."""
        said = json.dumps(words).encode()
        views = [memoryview(part).cast("B") for part in data]
        checksum, nbytes = crc32c(said), sum(view.nbytes for view in views)
        for view in views:
            checksum = crc32c(view, checksum)
        header = _HEADER.pack(len(said), nbytes, checksum, _own(len(said), nbytes, checksum))
        self.send_plain(header + said, *views)

    def receive(self, most: int = 0, *, is_idle: bool = False) -> tuple[Any, memoryview]:
        """The next message, with data of at most ``most`` bytes. ``is_idle``: waits without a limit until it begins."""
        header = self.receive_plain(_HEADER.size, is_idle=is_idle)
        length, nbytes, checksum, own = _HEADER.unpack(header)
        if own != _own(length, nbytes, checksum) or length > _MOST_WORDS or nbytes > most:
            raise ConnectionAbortedError(
                errno.ECONNABORTED, "a header came damaged, or is no header"
            )
        said, data = self.receive_plain(length), self.receive_plain(nbytes)
        if crc32c(data, crc32c(said)) != checksum:
            raise DamagedError
        try:
            return json.loads(bytes(said)), data
        except (ValueError, RecursionError):
            raise DamagedError from None

    def send_plain(self, *parts: Buffer) -> None:
        """Send bytes."""
        for part in parts:
            self._move(memoryview(part), self._socket.send)

    def receive_plain(self, nbytes: int, *, is_idle: bool = False) -> memoryview:
        """Receive ``nbytes`` bytes. ``is_idle``: waits for the first of them without a limit."""
        view = memoryview(bytearray(nbytes))
        self._move(view, self._socket.recv_into, is_idle)
        return view

    def _move(
        self, view: memoryview, move: Callable[[memoryview], int], is_idle: bool = False
    ) -> None:
        """Send or receive all of ``view`` by ``move``, which returns how many bytes it has sent or received."""
        with _explained(self._seconds):
            while view.nbytes:
                self._socket.settimeout(None if is_idle else self._left())
                count = move(view)
                if not count:
                    raise ConnectionResetError(errno.ECONNRESET, "the connection has ended")
                view, is_idle = view[count:], False

    def _left(self) -> float:
        if (left := self._ends_at - time.monotonic()) <= 0:
            raise TimeoutError
        return min(left, self._most_seconds)

    def encrypt(self, context: ssl.SSLContext) -> None:
        """As a client, shake hands for TLS."""
        with _explained(self._seconds):
            self._socket.settimeout(self._left())
            encrypted = context.wrap_socket(self._socket, do_handshake_on_connect=False)
            self._socket = closed_in_children(encrypted)
            encrypted.do_handshake()

    def end(self) -> None:
        """End the connection. Idempotent; any thread. The one that uses the line finds that it has ended."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own: what that thread sends would no longer be encrypted.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, in the thread that uses it: its descriptor may be another one's next. Idempotent."""
        self.end()
        self._socket.close()


@contextlib.contextmanager
def _explained(seconds: float) -> Iterator[None]:
    """Says in a TimeoutError for how long the other end was waited for; errors of TLS become those of the system."""
    try:
        yield
    except TimeoutError as error:
        text = f"it does not answer within {seconds:.3g} s"
        raise TimeoutError(errno.ETIMEDOUT, text) from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise ConnectionResetError(errno.ECONNRESET, "the connection has ended") from error
    except ssl.SSLError as error:
        raise _refused(
            f"TLS refuses it ({getattr(error, 'verify_message', error.reason)})"
        ) from error


def _refused(why: str) -> PermissionError:
    return PermissionError(errno.EACCES, f"{why}: {SAME_FOR_ALL}")


def _own(length: int, nbytes: int, checksum: int) -> int:
    return crc32c(_HEADER.pack(length, nbytes, checksum, 0))


def new_challenge(*, has_tls: bool) -> bytes:
    """A server's challenge, which says whether the server uses TLS."""
    return bytes([has_tls]) + os.urandom(CHALLENGE_BYTES - 1)


def proof(key: bytes, role: bytes, challenges: bytes) -> bytes:
    """What the end in ``role`` sends to prove that it knows ``key``, after both challenges, the server's first."""
    return hmac.digest(key, role + challenges, "sha256")


def connect(address: Address, seconds: float = CONNECT_SECONDS) -> Line:
    """A connection to the server at ``address``, made within ``seconds``. Raises OSError: PermissionError if one end
    does not know the other's key.
    """
    key, tls = address.key(), encryption(of_server=False)
    began = time.monotonic()
    with _explained(seconds):
        line = Line(socket.create_connection(address[:2], seconds))
    try:
        line.end_within(max(0.001, began + seconds - time.monotonic()))
        theirs, mine = bytes(line.receive_plain(CHALLENGE_BYTES)), os.urandom(CHALLENGE_BYTES)
        if theirs[0] != (tls is not None):
            one, other = ("this process", "it") if tls else ("it", "this process")
            raise _refused(f"{one} uses TLS, and {other} does not")
        if tls is not None:
            line.encrypt(tls)
        both = theirs + mine
        line.send_plain(mine + proof(key, b"client", both))
        if not hmac.compare_digest(line.receive_plain(PROOF_BYTES), proof(key, b"server", both)):
            raise _refused("it does not know the job's secret, or has another one")
        line.end_within(math.inf)
    except BaseException:
        line.close()
        raise
    return line


class Client:
    """The servers at ``addresses``, which have the same to say: the first that takes a connection is asked. Any thread;
    each request that is under way has a connection of its own. ``most_idle`` connections are kept for later requests.
    """

    def __init__(self, addresses: Sequence[Address], *, most_idle: int) -> None:
        self.addresses: Final = addresses
        self._most_idle = most_idle
        self._lock = threading.RLock()  # guards what follows
        self._idle: list[Line] = []

    def ask(
        self, words: object, *, most: int = 0, seconds: float = math.inf
    ) -> tuple[Any, memoryview]:
        """The result of a request, with data of at most ``most`` bytes. ``seconds``: within which the server takes a
        connection, and then answers, even while bytes pass. Raises OSError; :class:`RefusedError` if the server has
        answered with an error.
        """
        line, result, data = self.begin(words, most=most, seconds=seconds)
        self.give_back(line)
        return result, data

    def begin(
        self, words: object, *, most: int = 0, seconds: float = math.inf
    ) -> tuple[Line, Any, memoryview]:
        """As :meth:`ask`. Returns the connection, too, for more requests: it is to be given back or closed.

        If an idle connection turns out to have ended, the request is sent once more: it must do no harm twice.
        """
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            with contextlib.suppress(ConnectionError):
                return self._asked(idle, words, most, seconds)
        return self._asked(self._connected(min(seconds, CONNECT_SECONDS)), words, most, seconds)

    def give_back(self, line: Line) -> None:
        """Keep a connection, whose requests were answered, for others."""
        with self._lock:
            if len(self._idle) < self._most_idle:
                self._idle.append(line)
                return
        line.close()

    def close(self) -> None:
        """End the connections that carry no request, and keep none from now on. Idempotent."""
        with self._lock:
            self._most_idle = 0
            lines, self._idle = self._idle, []
        for line in lines:
            line.close()

    def _asked(
        self, line: Line, words: object, most: int, seconds: float
    ) -> tuple[Line, Any, memoryview]:
        try:
            line.end_within(seconds)
            line.send(words)
            return line, *line.result(most)
        except RefusedError:
            self.give_back(line)
            raise
        except BaseException:
            line.close()
            raise

    def _connected(self, seconds: float) -> Line:
        failures: list[OSError] = []
        for address in [*self.addresses] * _TRIES:
            try:
                return connect(address, seconds)
            except OSError as error:
                failures.append(error)
                if isinstance(error, TimeoutError):  # the host is gone: so are its other processes
                    break
        raise failures[0]
