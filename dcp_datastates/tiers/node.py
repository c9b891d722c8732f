"""Another node, as this process reaches it, and the server by which others reach this node."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from typing_extensions import Buffer

from dcp_datastates.storage.object_store import StoredObject
from dcp_datastates.tiers.node_files import NodeFiles, Unpublished
from dcp_datastates.tiers.pace import Pace
from dcp_datastates.wire.line import Client, DamagedError, Line
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

_THREAD_NAME: Final = "dcp_datastates-node"


class OtherNode:
    """Another node, through the servers of its processes. The methods are those of :class:`NodeFiles`; an OSError that
    they raise names the node.
    """

    def __init__(self, name: str, addresses: Sequence[Address], pace: Pace) -> None:
        self.name: Final = name
        self.client: Final = Client(addresses, most_idle=_MOST_IDLE)
        self._pace = pace

    def find(self, key: str) -> StoredObject | None:
        found, _ = self._asked("find", key)
        return None if found is None else StoredObject(*found)

    def read(self, key: str, begin: int, end: int) -> Buffer | None:
        is_there, data = self._asked("read", key, begin, end, most=min(end - begin, _MOST_BYTES))
        return data if is_there else None

    def list(self, prefix: str) -> list[StoredObject]:
        return [StoredObject(*each) for each in self._asked("list", prefix)[0]]

    def delete(self, keys: Iterable[str]) -> None:
        self._asked("delete", list(keys))

    def left(self, key: str) -> int:
        return int(self._asked("left", key)[0])

    def unpublished(self, key: str, seconds: float = math.inf) -> UnpublishedThere:
        with self.named():
            line, _, _ = self.client.begin(["put", key], seconds=seconds)
        return UnpublishedThere(self, line, self._pace, seconds)

    def _asked(self, *words: object, most: int = 0) -> tuple[Any, Buffer]:
        with self.named():
            return self.client.ask(words, most=most)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Names the node in errors."""
        try:
            yield
        except OSError as error:
            text = error.strerror or str(error) or type(error).__name__
            where = ", ".join(f"{each.host}:{each.port}" for each in self.client.addresses[:3])
            raise OSError(error.errno or errno.EIO, f"node {self.name} ({where}): {text}") from None


class UnpublishedThere:
    """As :class:`Unpublished`, on another node, which takes each piece within ``seconds``. Sends pieces ahead of their
    answers. After an error, the connection is closed, and nothing appears.
    """

    def __init__(self, node: OtherNode, line: Line, pace: Pace, seconds: float) -> None:
        self._node, self._line, self._pace, self._seconds = node, line, pace, seconds
        self._unanswered = 0
        self._is_over = False

    def write(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        time.sleep(self._pace.delay(view.nbytes))
        self._line.end_within(self._seconds)
        for begin in range(0, view.nbytes, _PIECE_BYTES):
            with self._node.named():
                self._line.send("piece", view[begin : begin + _PIECE_BYTES])
            self._unanswered += 1
            self._await(_MOST_UNANSWERED)

    def complete(self) -> None:
        self._line.end_within(self._seconds)
        self._await(0)

    def publish(self, if_absent: bool) -> bool:
        self._line.end_within(self._seconds)
        with self._node.named():
            self._line.send(["publish", if_absent])
            published, _ = self._line.result()
        self._is_over = True
        self._node.client.give_back(self._line)
        return bool(published)

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._line.close()

    def _await(self, most: int) -> None:
        while self._unanswered > most:
            with self._node.named():
                self._line.result()
            self._unanswered -= 1


Node = NodeFiles | OtherNode
Writing = Unpublished | UnpublishedThere

# ---- the server ----------------------------------------------------------------------------------------


def serve(files: NodeFiles, host: str) -> Server:
    """A server that gives the other nodes access to ``files``, at ``host``, an address of this machine. Raises OSError
    if it cannot listen there.
    """
    return Server(*listen(host), _THREAD_NAME, functools.partial(_serve, files))


def _serve(files: NodeFiles, line: Line) -> None:
    requests = line.requests(_PIECE_BYTES)
    for words, _ in requests:
        try:
            line.answer(*_answer(files, line, requests, words))
        except OSError as error:
            line.refuse(error)


def _answer(
    files: NodeFiles, line: Line, requests: Iterator[tuple[Any, memoryview]], words: object
) -> tuple[Any, Buffer]:
    named = files.check_named
    match words:
        case ["find", str(key)]:
            return files.find(named(key)), b""
        case ["read", str(key), int(begin), int(end)] if begin >= 0:
            data = files.read(named(key), begin, end)
            return data is not None, data or b""
        case ["list", str(prefix)]:
            return files.list(named(prefix)), b""
        case ["delete", list(keys)] if all(isinstance(key, str) for key in keys):
            files.delete(map(named, keys))
            return None, b""
        case ["left", str(key)]:
            return files.left(named(key)), b""
        case ["put", str(key)]:
            with contextlib.closing(files.unpublished(named(key))) as new:
                line.answer(None)
                for words, piece in requests:
                    match words:
                        case "piece":
                            new.write(piece)
                            line.answer(None)
                        case ["publish", bool(if_absent)]:
                            return new.publish(if_absent), b""
                        case _:
                            break
    raise DamagedError
