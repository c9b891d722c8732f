"""The nodes of a ``ram://`` store, as a process uses them: its own, and the others through their servers.

A method begins a request, and returns a function that waits for the answer: so one thread asks many nodes at once. Only
that function raises OSError, which names the node.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from typing_extensions import Buffer

from dcp_datastates.tiers import ram_messages as messages
from dcp_datastates.tiers import ram_protocol as protocol
from dcp_datastates.tiers.ram_files import Entry, Publish, RamFiles, Unpublished
from dcp_datastates.tiers.ram_protocol import Kind, Line

__all__ = ["Answer", "Node", "OtherNode", "OwnNode", "Pace", "ServerAddress", "Writing"]

_MOST_IDLE: Final = 2
"""Connections to a node that are kept: with many nodes a process must not need many descriptors."""

T = TypeVar("T")

Answer = Callable[[], T]
"""Waits for the answer, once."""


class Writing(Protocol):
    """An object on its way to a node. One thread at a time. It does not appear unless it is published."""

    def write(self, piece: Buffer) -> None:
        """Returns when ``piece`` may be changed."""

    def complete(self) -> Answer[object]:
        """Return when all pieces have come as they were sent."""

    def publish(self, how: Publish, modified_ns: int) -> Answer[bool]:
        """As :meth:`ram_files.Unpublished.publish`."""

    def close(self) -> None:
        """Idempotent."""


class Node(Protocol):
    """The memory of a node, as :class:`~dcp_datastates.tiers.ram_files.RamFiles`. Any thread."""

    @property
    def name(self) -> str: ...
    def find(self, key: str) -> Answer[Entry | None]: ...
    def read(self, key: str, begin: int, end: int) -> Answer[tuple[Entry, Buffer] | None]: ...
    def list(self, prefix: str) -> Answer[list[Entry]]: ...
    def delete(self, keys: Iterable[str]) -> Answer[object]: ...
    def left(self) -> Answer[int]: ...
    def writing(self, key: str) -> Answer[Writing]: ...


class Pace:
    """Limits the bytes per second that a process sends; 0: no limit. Any thread."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.RLock()  # guards _next
        self._next = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be sent."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(self._next, now)
            self._next = begin + nbytes / self._rate
        time.sleep(begin - now)


class OwnNode:
    """This process's node (a :class:`Node`): its files, without a server."""

    def __init__(self, name: str, files: RamFiles) -> None:
        self.name: Final = name
        self._files = files

    def find(self, key: str) -> Answer[Entry | None]:
        return lambda: self._files.find(key)

    def read(self, key: str, begin: int, end: int) -> Answer[tuple[Entry, Buffer] | None]:
        return lambda: self._files.read(key, begin, end)

    def list(self, prefix: str) -> Answer[list[Entry]]:
        return lambda: self._files.list(prefix)

    def delete(self, keys: Iterable[str]) -> Answer[object]:
        return lambda: self._files.delete(keys)

    def left(self) -> Answer[int]:
        return self._files.left

    def writing(self, key: str) -> Answer[Writing]:
        return lambda: _OwnWriting(self._files.unpublished(key))


class _OwnWriting:
    def __init__(self, new: Unpublished) -> None:
        self._new = new
        self.write = new.write
        self.close = new.close

    def complete(self) -> Answer[object]:
        return lambda: None

    def publish(self, how: Publish, modified_ns: int) -> Answer[bool]:
        return lambda: self._new.publish(how, modified_ns)


@dataclass(frozen=True)
class ServerAddress:
    """Of one process of a node."""

    host: str
    port: int
    token: bytes


class OtherNode:
    """Another node (a :class:`Node`), through the servers of its processes, the first that takes a connection."""

    def __init__(self, name: str, servers: Sequence[ServerAddress], pace: Pace) -> None:
        self.name: Final = name
        self._servers = servers
        self._pace = pace
        self._lock = threading.RLock()  # guards _idle
        self._idle: list[Line] = []

    def find(self, key: str) -> Answer[Entry | None]:
        return self._ask(Kind.FIND, messages.packed_keys([key]), _one_entry)

    def read(self, key: str, begin: int, end: int) -> Answer[tuple[Entry, Buffer] | None]:
        return self._ask(Kind.READ, messages.packed_range(key, begin, end), _entry_and_data)

    def list(self, prefix: str) -> Answer[list[Entry]]:
        return self._ask(Kind.LIST, messages.packed_keys([prefix]), _entries)

    def delete(self, keys: Iterable[str]) -> Answer[object]:
        return self._ask(Kind.DELETE, messages.packed_keys(keys), lambda data: None)

    def left(self) -> Answer[int]:
        return self._ask(Kind.LEFT, b"", messages.unpacked_number)

    def writing(self, key: str) -> Answer[Writing]:
        begun = self._begin(Kind.PUT, messages.packed_keys([key]))
        return lambda: _OtherWriting(self, begun()[0], self._pace)

    def close(self) -> None:
        """End the connections that carry no request."""
        with self._lock:
            lines, self._idle = self._idle, []
        for line in lines:
            line.close()

    def give_back(self, line: Line) -> None:
        """Keep a connection, whose request was answered, for another request."""
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(line)
                return
        line.close()

    @contextlib.contextmanager
    def named(self, line: Line | None = None) -> Iterator[None]:
        """Names the node in errors. They end ``line``."""
        try:
            yield
        except BaseException as error:
            if line is not None:
                line.close()
            if not isinstance(error, OSError):
                raise
            text = error.strerror or str(error) or type(error).__name__
            where = ", ".join(f"{server.host}:{server.port}" for server in self._servers[:3])
            kind = ConnectionError if isinstance(error, ConnectionError) else OSError
            raise kind(error.errno or errno.EIO, f"node {self.name} ({where}): {text}") from None

    def _ask(self, kind: Kind, data: Buffer, decode: Callable[[memoryview], T]) -> Answer[T]:
        begun = self._begin(kind, data)

        def answer() -> T:
            line, found = begun()
            self.give_back(line)
            return decode(found)

        return answer

    def _begin(self, kind: Kind, data: Buffer) -> Answer[tuple[Line, memoryview]]:
        """Send a request; the answer comes with its connection. If an idle connection turns out to be broken, asks once
        more: no such request does harm if it comes twice.
        """
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        begun = _deferred(lambda: self._sent(idle, kind, data))

        def answer() -> tuple[Line, memoryview]:
            try:
                line = begun()
                with self.named(line):
                    return line, _answer_of(line)
            except ConnectionError:
                if idle is None:
                    raise
            line = self._sent(None, kind, data)
            with self.named(line):
                return line, _answer_of(line)

        return answer

    def _sent(self, idle: Line | None, kind: Kind, data: Buffer) -> Line:
        with self.named(idle):
            line = self._connect() if idle is None else idle
        with self.named(line):
            line.send(kind, data)
        return line

    def _connect(self) -> Line:
        failure: OSError | None = None
        for server in self._servers:
            line = None
            try:
                line = Line.to(server.host, server.port)
                line.send(Kind.HELLO, server.token)
                _answer_of(line)
                return line
            except OSError as error:
                failure = failure or error
                if line is not None:
                    line.close()
                if isinstance(error, TimeoutError):  # the host is gone: so are its other processes
                    break
        assert failure is not None, "a node has a server"
        raise failure


class _OtherWriting:
    def __init__(self, node: OtherNode, line: Line, pace: Pace) -> None:
        self._node, self._line, self._pace = node, line, pace
        self._is_over = False

    def write(self, piece: Buffer) -> None:
        self._pace.take(memoryview(piece).nbytes)
        with self._node.named(self._line):
            if not self._line.has_news():
                with contextlib.suppress(ConnectionError):
                    self._line.send(Kind.PIECE, piece)
                    return
            _answer_of(
                self._line
            )  # raises what the node has said, or that the connection has ended
            raise protocol.DamagedError

    def complete(self) -> Answer[object]:
        return self._ask(Kind.COMPLETE)

    def publish(self, how: Publish, modified_ns: int) -> Answer[bool]:
        asked = self._ask(Kind.PUBLISH, messages.packed_publish(how, modified_ns))

        def answer() -> bool:
            done = bool(asked()[0])
            self._is_over = True
            self._node.give_back(self._line)
            return done

        return answer

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._line.close()

    def _ask(self, kind: Kind, *parts: Buffer) -> Answer[memoryview]:
        sent = _deferred(lambda: self._line.send(kind, *parts))

        def answer() -> memoryview:
            with self._node.named(self._line):
                with contextlib.suppress(ConnectionError):  # what the node has said before counts
                    sent()
                return _answer_of(self._line)

        return answer


def _deferred(function: Callable[[], T]) -> Answer[T]:
    """Call ``function`` now; its OSError comes with the answer."""
    try:
        result = function()
    except OSError as error:
        failure = error

        def answer() -> T:
            raise failure

        return answer
    return lambda: result


def _answer_of(line: Line) -> memoryview:
    """The bytes of the answer. Raises what the other node has raised."""
    kind, data = line.receive()
    if kind is Kind.ERROR:
        raise messages.unpacked_error(data)
    if kind is not Kind.OK:
        raise protocol.DamagedError
    return data


def _entries(data: memoryview) -> list[Entry]:
    return messages.unpacked_entries(data)[0]


def _one_entry(data: memoryview) -> Entry | None:
    return next(iter(_entries(data)), None)


def _entry_and_data(data: memoryview) -> tuple[Entry, Buffer] | None:
    entries, rest = messages.unpacked_entries(data, 1)
    return (entries[0], rest) if entries else None
