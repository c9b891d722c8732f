"""A node of a ``ram://`` store: this process's own, or another one, through the servers of its processes.

A method begins a request, and returns a function that waits for the answer: so one thread asks many nodes at the same
time. Only that function raises OSError, which names the node.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from typing_extensions import Buffer

from dcp_datastates.tiers.ram_files import Entry, RamFiles, Unpublished
from dcp_datastates.wire.client import Client
from dcp_datastates.wire.line import DamagedError, Line
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import Server, listen

_MOST_IDLE: Final = 2
"""Connections to a node that are kept: with many nodes a process must not need many descriptors."""

_MOST_BYTES: Final = 8 << 30
"""Of an object that is read whole: more than the metadata of any checkpoint."""

_PIECE_BYTES: Final = 1 << 20
"""What a server holds of an object that comes."""

_MOST_UNANSWERED: Final = 8
"""Pieces that are on their way to a node."""

_THREAD_NAME: Final = "dcp_datastates-ram"

T = TypeVar("T")

Answer = Callable[[], T]
"""Waits for the answer, once."""


class Writing(Protocol):
    """An object on its way to a node. One thread at a time. It does not appear unless it is published."""

    def write(self, piece: Buffer) -> None:
        """Returns when ``piece`` may be changed."""

    def complete(self) -> None:
        """Return when all pieces have come as they were sent."""

    def publish(self, modified_ns: int, *, if_absent: bool) -> Answer[bool]:
        """As :meth:`~dcp_datastates.tiers.ram_files.Unpublished.publish`."""

    def close(self) -> None:
        """Idempotent."""


class Node(ABC):
    """The memory of a node, as :class:`~dcp_datastates.tiers.ram_files.RamFiles`. Any thread."""

    def __init__(self, name: str) -> None:
        self.name: Final = name

    @abstractmethod
    def asked(self, *words: object, most: int = 0) -> Answer[tuple[Any, Buffer]]:
        """The result of a request that :func:`_result` knows, with data of at most ``most`` bytes."""

    @abstractmethod
    def writing(self, key: str) -> Answer[Writing]:
        """As :meth:`~dcp_datastates.tiers.ram_files.RamFiles.unpublished`."""

    def find(self, key: str) -> Answer[Entry | None]:
        asked = self.asked("find", key)
        return lambda: _entry(asked()[0])

    def read(self, key: str, begin: int, end: int) -> Answer[tuple[Entry, Buffer] | None]:
        asked = self.asked("read", key, begin, end, most=min(end - begin, _MOST_BYTES))

        def answer() -> tuple[Entry, Buffer] | None:
            found, data = asked()
            entry = _entry(found)
            return None if entry is None else (entry, data)

        return answer

    def list(self, prefix: str) -> Answer[list[Entry]]:
        asked = self.asked("list", prefix)
        return lambda: [Entry(*each) for each in asked()[0]]

    def delete(self, keys: Iterable[str]) -> Answer[object]:
        return self.asked("delete", list(keys))

    def left(self) -> Answer[int]:
        asked = self.asked("left")
        return lambda: int(asked()[0])


def _entry(found: Any) -> Entry | None:
    return None if found is None else Entry(*found)


class OwnNode(Node):
    """This process's node: its files, without a server."""

    def __init__(self, name: str, files: RamFiles) -> None:
        super().__init__(name)
        self._files = files

    def asked(self, *words: object, most: int = 0) -> Answer[tuple[Any, Buffer]]:
        return lambda: _result(self._files, list(words))

    def writing(self, key: str) -> Answer[Writing]:
        return lambda: _OwnWriting(self._files.unpublished(key))


class _OwnWriting:
    def __init__(self, new: Unpublished) -> None:
        self._new = new
        self.write = new.write
        self.close = new.close

    def complete(self) -> None:
        """There is nothing to wait for."""

    def publish(self, modified_ns: int, *, if_absent: bool) -> Answer[bool]:
        return lambda: self._new.publish(modified_ns, if_absent=if_absent)


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


class OtherNode(Node):
    """Another node, through the servers of its processes."""

    def __init__(self, name: str, addresses: Sequence[Address], pace: Pace) -> None:
        super().__init__(name)
        self.client: Final = Client(addresses, most_idle=_MOST_IDLE)
        self._pace = pace

    def asked(self, *words: object, most: int = 0) -> Answer[tuple[Any, Buffer]]:
        begun = self.client.begin(words, most=most)

        def answer() -> tuple[Any, Buffer]:
            with self.named():
                line, result, data = begun()
            self.client.give_back(line)
            return result, data

        return answer

    def writing(self, key: str) -> Answer[Writing]:
        begun = self.client.begin(["put", key])

        def answer() -> Writing:
            with self.named():
                return _OtherWriting(self, begun()[0], self._pace)

        return answer

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Names the node in errors."""
        try:
            yield
        except OSError as error:
            text = error.strerror or str(error) or type(error).__name__
            where = ", ".join(f"{each.host}:{each.port}" for each in self.client.addresses[:3])
            raise OSError(error.errno or errno.EIO, f"node {self.name} ({where}): {text}") from None


class _OtherWriting:
    """Sends pieces ahead of their answers. After an error, the connection is closed, and nothing appears."""

    def __init__(self, node: OtherNode, line: Line, pace: Pace) -> None:
        self._node, self._line, self._pace = node, line, pace
        self._unanswered = 0
        self._is_over = False

    def write(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        self._pace.take(view.nbytes)
        for begin in range(0, view.nbytes, _PIECE_BYTES):
            with self._node.named():
                self._line.send("piece", view[begin : begin + _PIECE_BYTES])
            self._unanswered += 1
            self._await(_MOST_UNANSWERED)

    def complete(self) -> None:
        self._await(0)

    def publish(self, modified_ns: int, *, if_absent: bool) -> Answer[bool]:
        failure = None
        try:
            self._line.send(["publish", modified_ns, if_absent])
        except OSError as error:
            failure = error

        def answer() -> bool:
            with self._node.named():
                if failure is not None:
                    raise failure
                published, _ = self._line.result()
            self._is_over = True
            self._node.client.give_back(self._line)
            return bool(published)

        return answer

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._line.close()

    def _await(self, most: int) -> None:
        while self._unanswered > most:
            with self._node.named():
                self._line.result()
            self._unanswered -= 1


# ---- the server ----------------------------------------------------------------------------------------


def serve(files: RamFiles, host: str) -> Server:
    """A server that gives the other nodes access to ``files``, at ``host``, an address of this machine. Raises OSError
    if it cannot listen there.
    """
    return Server(*listen(host), _THREAD_NAME, functools.partial(_serve, files))


def _serve(files: RamFiles, line: Line) -> None:
    new: Unpublished | None = None
    with contextlib.ExitStack() as unpublished:
        for words, data in line.requests(_PIECE_BYTES):
            result: Any = None
            found: Buffer = b""
            try:
                match words:
                    case ["put", str(key)]:
                        unpublished.close()
                        new = unpublished.enter_context(contextlib.closing(files.unpublished(key)))
                    case "piece" if new is not None:
                        new.write(data)
                    case ["publish", int(modified_ns), bool(if_absent)] if new is not None:
                        result = new.publish(modified_ns, if_absent=if_absent)
                        unpublished.close()
                        new = None
                    case _:
                        result, found = _result(files, words)
            except OSError as error:
                unpublished.close()
                new = None
                line.refuse(error)
            else:
                line.answer(result, found)


def _result(files: RamFiles, words: object) -> tuple[Any, Buffer]:
    """The result of a request that needs one message, with data; None if there is no such object."""
    match words:
        case ["find", str(key)]:
            return files.find(key), b""
        case ["read", str(key), int(begin), int(end)] if begin >= 0:
            return files.read(key, begin, end) or (None, b"")
        case ["list", str(prefix)]:
            return files.list(prefix), b""
        case ["delete", list(keys)] if all(isinstance(key, str) for key in keys):
            files.delete(keys)
            return None, b""
        case ["left"]:
            return files.left(), b""
    raise DamagedError
