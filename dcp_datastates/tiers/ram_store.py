"""The memory of the job's nodes as an object store: ``ram://run/step-100``.

A data file lies on the node of the process that wrote it and on the next nodes in the ring of their names; every other
object is small, and lies on all. So a checkpoint outlives the loss of as many nodes as a file has copies elsewhere. The
idea is that of Gemini (Wang et al., SOSP'23).

An object is sent to all its nodes, under no name. When each has it whole, it is published on them. A node that fails in
between leaves it on some: then the call raises, and reads find it. The first node of the ring decides which of several
creations comes first, once no node has such an object: that node may have been lost, and have come back empty.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from typing_extensions import Buffer

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_store import (
    Listing,
    ObjectMissingError,
    StoredObject,
    url_of,
)
from dcp_datastates.tiers import ram_nodes
from dcp_datastates.tiers.ram_node import Entry, Node, Writing
from dcp_datastates.tiers.ram_nodes import RamNodes

_REMEMBERED: Final = 4096
"""Of how many objects that lie elsewhere a store knows on which node."""

_WHOLE: Final = 1 << 62

_THREADS: Final = 32
"""Of a call that asks all nodes. In most jobs each node has one."""

S = TypeVar("S")
T = TypeVar("T")


class RamStore:
    """An :class:`~dcp_datastates.storage.object_store.ObjectStore`.

    Args:
        url: ``ram://run``.
        nodes: returns the job's nodes; it may wait, and raise :class:`StorageError`.
    """

    deletes_many: Final = True

    def __init__(self, url: str, nodes: Callable[[], RamNodes]) -> None:
        self.url: Final = url
        self._bucket = url.partition("://")[2]
        self._nodes = nodes
        self._found: dict[str, Node] = {}

    # ---- changing ----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer) -> None:
        self._put(key, [data], self._nodes().places(key))

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        # One piece is in flight: each node has it, or its socket has, before the next is taken.
        self._put(key, pieces, self._nodes().places(key))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._explained("creating", key):
            if self._spread(key) is not None:
                return False
        return self._put(key, [data], self._nodes().ring, if_absent=True)

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        if names:
            with self._explained("deleting", names[0]):
                _all(self._nodes().ring, lambda node: node.delete(map(self._name, names)))

    # ---- reading -----------------------------------------------------------------------------------

    def get(self, key: str) -> tuple[bytes, float]:
        entry, data = self._first("reading", key, lambda node, name: node.read(name, 0, _WHOLE))
        return bytes(data), entry.modified_ns / 1e9

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        end = max(begin, end)
        return self._first("reading", key, lambda node, name: node.read(name, begin, end))[1]

    def size(self, key: str) -> int:
        return self._first("looking at", key, lambda node, name: node.find(name)).nbytes

    def list(self, prefix: str) -> Listing:
        """What any node has; of an object that differs, what was stored last."""
        name = self._name(prefix)
        with self._explained("listing", prefix):
            answers = _all(self._nodes().ring, lambda node: node.list(name))
        every = sorted(itertools.chain(*answers), key=lambda entry: entry.modified_ns)
        found = {entry.key.removeprefix(f"{self._bucket}/"): entry for entry in every}
        folders = [key[:-1].rpartition("/")[2] for key in sorted(found) if key.endswith("/")]
        objects = [
            StoredObject(key, found[key].nbytes, found[key].modified_ns / 1e9)
            for key in sorted(found)
            if not key.endswith("/")
        ]
        return Listing(tuple(folders), tuple(objects))

    def left(self) -> int:
        """The bytes of data files that still have room, if each node stores equally many."""
        nodes = self._nodes()
        with self._explained("looking for room", ""):
            least = min(_all(nodes.ring, lambda node: node.left()))
        return least * len(nodes.ring) // min(len(nodes.ring), 1 + nodes.peers)

    # ---- within ------------------------------------------------------------------------------------

    def _put(
        self,
        key: str,
        pieces: Iterable[Buffer],
        places: Sequence[Node],
        *,
        if_absent: bool = False,
    ) -> bool:
        """Store an object on ``places``; ``if_absent``: unless the first of them has one."""
        modified_ns = time.time_ns()
        with contextlib.ExitStack() as stack:
            with self._explained("storing", key):
                copies: list[Writing] = _all(
                    places,
                    lambda node: stack.enter_context(
                        contextlib.closing(node.unpublished(self._name(key)))
                    ),
                )
            for piece in pieces:  # its errors are the caller's own
                with self._explained("storing", key):
                    hit("ram.piece.before")
                    for copy in copies:
                        copy.write(piece)
                del piece  # while waiting for the next
            with self._explained("storing", key):
                _all(copies, lambda copy: copy.complete())
                hit("ram.publish.before")
                if if_absent:
                    if not copies.pop(0).publish(modified_ns, if_absent=True):
                        return False
                    hit("ram.publish.between")
                _all(copies, lambda copy: copy.publish(modified_ns, if_absent=if_absent))
                hit("ram.publish.after")
        return True

    def _spread(self, key: str) -> Entry | None:
        """The object, which from now on lies on all nodes: one that was lost and comes back has nothing. None if there
        is no such object. Raises OSError.
        """
        ring = self._nodes().ring
        found = _all(ring, lambda node: node.find(self._name(key)))
        if not any(found) or all(found):
            return next(filter(None, found), None)
        try:
            entry, data = self._first("reading", key, lambda node, name: node.read(name, 0, _WHOLE))
        except ObjectMissingError:  # it was deleted a moment ago
            return None
        for node, there in zip(ring, found, strict=True):
            if there is None:
                with contextlib.closing(node.unpublished(self._name(key))) as copy:
                    copy.write(data)
                    copy.complete()
                    copy.publish(entry.modified_ns, if_absent=True)
        return entry

    def _first(self, doing: str, key: str, ask: Callable[[Node, str], T | None]) -> T:
        """What the nearest node answers that has the object."""
        nodes, name = self._nodes(), self._name(key)
        others = nodes.others
        known = self._found.get(name)
        failure: OSError | None = None
        for node in [nodes.own, *(node for node in others if node is known)]:
            try:
                if (answer := ask(node, name)) is not None:
                    return answer
            except OSError as error:
                failure = error
        found = _gathered(others, lambda node: node.find(name))
        for node, there in zip(others, found, strict=True):
            try:
                if isinstance(there, OSError):
                    raise there
                if there is not None and (answer := ask(node, name)) is not None:
                    if len(self._found) >= _REMEMBERED:
                        self._found.clear()
                    self._found[name] = node
                    return answer
            except OSError as error:
                failure = error
        if failure is None:
            raise ObjectMissingError(url_of(self.url, key))
        with self._explained(doing, key):
            raise failure

    def _name(self, key: str) -> str:
        """The object's name on the nodes."""
        return f"{self._bucket}/{key}" if key else self._bucket

    @contextlib.contextmanager
    def _explained(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            text = error.strerror or str(error)
            raise StorageError(
                error.errno or errno.EIO, f"{doing} failed: {text}", url_of(self.url, key)
            ) from error


def _gathered(each: Sequence[S], ask: Callable[[S], T]) -> list[T | OSError]:
    """What ``ask`` returns of each, or the error in its place. All are asked at the same time."""

    def asked(one: S) -> T | OSError:
        try:
            return ask(one)
        except OSError as error:
            return error

    if len(each) < 2:
        return list(map(asked, each))
    with ThreadPoolExecutor(min(len(each), _THREADS), "dcp_datastates-ram") as executor:
        return list(executor.map(asked, each))


def _all(each: Sequence[S], ask: Callable[[S], T]) -> list[T]:
    """What ``ask`` returns of each. Raises the first error, once all have answered."""
    answers: list[T] = []
    for answer in _gathered(each, ask):
        if isinstance(answer, OSError):
            raise answer
        answers.append(answer)
    return answers


def open_ram(root: str) -> RamStore:
    """The store ``root``, of the memory of this job's nodes; at the first call, this process takes its part in it."""
    if root.partition("://")[2].startswith("."):
        raise ConfigurationError(f"{root} cannot be opened: its name begins with a dot")
    ram_nodes.current()
    return _opened(root)


@functools.cache
def _opened(root: str) -> RamStore:
    return RamStore(root, lambda: ram_nodes.current().nodes())
