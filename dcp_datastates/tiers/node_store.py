"""The memory of the job's nodes, or a directory on each node's disk, as an object store: ``ram://run/step-100``,
``node:///nvme/run/step-100``.

A data file lies on the node of the process that wrote it and on the next nodes in the ring of their names; every other
object is small, and lies on all. So a checkpoint outlives the loss of as many nodes as a file has copies elsewhere. The
idea is that of Gemini (Wang et al., SOSP'23).

An object is sent to all its nodes, under no name. When each has it whole, it is published on them. A node that fails in
between leaves it on some: then the call raises, and reads find it. But a data file must lie on the own node alone: a
copy that fails is named in the log, and made later (``copies.py``). The first node of the ring decides which of several
creations comes first, once no node has such an object: that node may have been lost, and have come back empty.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from typing_extensions import Buffer

from dcp_datastates.errors import StorageError
from dcp_datastates.storage.attempts import rank_of
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import url_of
from dcp_datastates.storage.object_store import (
    Listing,
    ObjectMissingError,
    ObjectStore,
    StoredObject,
)
from dcp_datastates.tiers.node import Node, Writing
from dcp_datastates.tiers.nodes import Nodes

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 4096
"""Of how many objects that lie elsewhere a store knows on which node."""

_WHOLE: Final = 1 << 62

_COPY_SECONDS: Final = 5.0
"""How long a save waits for another node to take a piece of a data file. Then the copy is made later."""

_FAILING_SECONDS: Final = 60.0
"""How long no save sends data files to a node whose copy has failed, at least: each would wait as long as the first."""

_THREADS: Final = 32
"""Of a call that asks all nodes. In most jobs each node has one."""

S = TypeVar("S")
T = TypeVar("T")


class NodeStore:
    """An :class:`~dcp_datastates.storage.object_store.ObjectStore`.

    Args:
        url: ``ram://run``, or ``node:///``.
        nodes: returns the job's nodes; it may wait, and raise :class:`StorageError`.

    Attributes:
        on_loss: is told the key of an object of which a copy is damaged or missing.
        saves: the data files that this process is storing.
    """

    def __init__(self, url: str, nodes: Callable[[], Nodes]) -> None:
        self.url: Final = url
        self._bucket = url.partition("://")[2].strip("/")
        self.nodes: Final = nodes
        self._found: dict[str, Node] = {}
        self._damaged: set[tuple[str, str]] = set()
        """The names of objects and of nodes on which the copy is damaged."""
        self._failing: dict[str, float] = {}  # by node: until then, saves send it no data files
        self.on_loss: Callable[[str], object] = id
        self.saves: set[str] = set()

    # ---- changing ----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer) -> None:
        self.put_stream(key, iter([data]), part_bytes=0, parts_in_flight=1)

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        # One piece is in flight: each node has it, or its socket has, before the next is taken.
        places = self.nodes().places(key)
        if rank_of(key) is None:
            self.put_on(places, key, pieces)
            return
        self.saves.add(key)
        try:
            self.put_on(places, key, pieces, least=1)
        finally:
            self.saves.discard(key)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        ring = self.nodes().ring
        return not self.spread(key) and self.put_on(ring, key, [data], if_absent=True)

    def delete(self, keys: Iterable[str]) -> None:
        if them := [*keys]:
            names = [self.name_of(key) for key in them]
            self._all("deleting", them[0], self.nodes().ring, lambda node: node.delete(names))

    # ---- reading -----------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        return bytes(self.get_range(key, 0, _WHOLE))

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        end = max(begin, end)
        return self._first("reading", key, lambda node, name: node.read(name, begin, end))

    def size(self, key: str) -> int:
        return self._first("looking at", key, lambda node, name: node.find(name)).nbytes

    def list(self, prefix: str) -> Listing:
        """What any node has; of each object the copy that would be read."""
        beginning = f"{prefix}/" if prefix else ""
        folders, objects = [], []
        for name, held in sorted(self.held_below(prefix).items()):
            if name.endswith("/"):
                folders.append(name[:-1])
                continue
            key = beginning + name
            near = (each.name for each in self._in_order(key))
            nbytes = held[next(filter(held.__contains__, near), next(iter(held)))].nbytes
            modified_at = max(entry.modified_at for entry in held.values())
            objects.append(StoredObject(key, nbytes, modified_at))
        return Listing(tuple(folders), tuple(objects))

    def left(self, key: str) -> int:
        """The bytes of data files that still have room at ``key``, if each node stores equally many."""
        nodes, name = self.nodes(), self.name_of(key)
        least = min(self._all("looking for room", key, nodes.ring, lambda node: node.left(name)))
        return least * len(nodes.ring) // min(len(nodes.ring), 1 + nodes.peers)

    # ---- copies ------------------------------------------------------------------------------------

    def leave(self, key: str, why: str, node: str | None = None) -> bool:
        """See :class:`~dcp_datastates.storage.object_store.CopiedStore`."""
        name, order = self.name_of(key), self._in_order(key)
        found = zip(order, _gathered(order, lambda each: each.find(name)), strict=True)
        having = [each.name for each, entry in found if isinstance(entry, StoredObject)]
        damaged = node or next(iter(having), "")
        other = next((each for each in having if each != damaged), None)
        if other is None or damaged not in having:
            return False
        self._damaged.add((name, damaged))
        logger.warning(
            "%s: the copy on node %s is damaged (%s); reading that on node %s, which is then copied there",
            *(url_of(self.url, key), damaged, why, other),
        )
        self.on_loss(key)
        return True

    def places(self, prefix: str) -> dict[str, Sequence[str]]:
        """See :class:`~dcp_datastates.storage.object_store.CopiedStore`."""
        return {name: [*held] for name, held in self.held_below(prefix).items()}

    def elsewhere(self) -> dict[str, ObjectStore]:
        """See :class:`~dcp_datastates.storage.object_store.CopiedStore`."""
        others = self.nodes().others
        return {node.name: NodeStore(self.url, partial(Nodes, node, [node])) for node in others}

    def held(self, key: str) -> dict[str, StoredObject]:
        """The object as the nodes have it, by their names. Raises :class:`StorageError`."""
        ring, name = self.nodes().ring, self.name_of(key)
        found = self._all("looking at", key, ring, lambda node: node.find(name))
        return {node.name: each for node, each in zip(ring, found, strict=True) if each is not None}

    def held_below(self, prefix: str) -> dict[str, dict[str, StoredObject]]:
        """What lies directly below ``prefix``, by its name, which ends in a slash if it is a folder, and by node."""
        ring, below = self.nodes().ring, self.name_of(prefix)
        found = defaultdict[str, dict[str, StoredObject]](dict)
        answers = self._all("listing", prefix, ring, lambda node: node.list(below))
        for node, entries in zip(ring, answers, strict=True):
            for entry in entries:
                found[entry.key.removeprefix(f"{below}/")][node.name] = entry
        return found

    def copies_of(
        self, key: str, nbytes: int, held: Mapping[str, StoredObject]
    ) -> tuple[Sequence[Node], Sequence[Node]]:
        """Of an object of ``nbytes`` bytes, which the nodes have as ``held`` says: those that have it whole, as far as
        is known; and those that it is to be sent to: whose copy is damaged, and as many more as are missing.
        """
        nodes, name = self.nodes(), self.name_of(key)
        whole, damaged, without = [], [], []
        for node in nodes.homes(key):
            if (entry := held.get(node.name)) is None:
                without.append(node)
            elif entry.nbytes != nbytes or (name, node.name) in self._damaged:
                damaged.append(node)
            else:
                whole.append(node)
        wanted = len(nodes.ring) if rank_of(key) is None else 1 + nodes.peers
        missing = max(0, wanted - len(whole) - len(damaged))
        return whole, [*damaged, *without[:missing]]

    def spread(self, key: str) -> bool:
        """Whether there is the object, which from now on lies on all nodes: one that was lost and comes back has
        nothing. Raises :class:`StorageError`.
        """
        held = self.held(key)
        lacking = [node for node in self.nodes().ring if node.name not in held]
        if held and lacking:
            try:
                self.put_on(lacking, key, [self.get(key)], if_absent=True)
            except ObjectMissingError:  # it was deleted a moment ago
                return False
        return bool(held)

    def put_on(
        self,
        places: Sequence[Node],
        key: str,
        pieces: Iterable[Buffer],
        *,
        if_absent: bool = False,
        least: int | None = None,
    ) -> bool:
        """Store an object on ``places``; ``if_absent``: unless the first of them has one. The first ``least`` of them
        must have it (None: all); a further one that fails is left out.
        """
        name, needed = self.name_of(key), places[:least]
        left = [each for each in places if each in needed or each.name not in self._failing]
        copies: dict[Node, Writing] = {}

        def each(do: Callable[[Node], object], threads: int = _THREADS) -> None:
            for node, answer in zip([*left], _gathered(left, do, threads), strict=True):
                if not isinstance(answer, OSError):
                    continue
                if node in needed:
                    with self._explained("storing", key):
                        raise answer
                self._failing[node.name] = time.monotonic() + _FAILING_SECONDS
                logger.warning(
                    "%s: the copy on node %s has failed, and is made later: %s",
                    *(url_of(self.url, key), node.name, answer.strerror or answer),
                )
                left.remove(node)
                if node in copies:
                    copies[node].close()

        with contextlib.ExitStack() as stack:

            def begin(node: Node) -> None:
                made = node.unpublished(name, math.inf if node in needed else _COPY_SECONDS)
                copies[node] = stack.enter_context(contextlib.closing(made))

            each(begin)
            for piece in pieces:
                hit("node.piece.before")
                each(lambda node, piece=piece: copies[node].write(piece), 1)  # type: ignore[misc]
                del piece  # while waiting for the next
            each(lambda node: copies[node].complete())
            hit("node.publish.before")
            decides = left[0] if if_absent else None
            if decides is not None:
                with self._explained("storing", key):
                    if not copies[decides].publish(if_absent=True):
                        return False
                hit("node.publish.between")

            def publish(node: Node) -> None:
                if node is not decides:  # which has published it
                    copies[node].publish(if_absent)

            each(publish)
            hit("node.publish.after")
        self._damaged.difference_update((name, node.name) for node in left)
        if len(left) < len(places):
            self.on_loss(key)
        return True

    # ---- within ------------------------------------------------------------------------------------

    def _all(
        self, doing: str, key: str, nodes: Sequence[Node], ask: Callable[[Node], T]
    ) -> Sequence[T]:
        """What each of ``nodes``, all of them, answers. Raises the first error, once all have answered."""
        answers = []
        with self._explained(doing, key):
            for answer in _gathered(nodes, ask):
                if isinstance(answer, OSError):
                    raise answer
                answers.append(answer)
        now = time.monotonic()
        for name, ends_at in [*self._failing.items()]:  # other threads change it
            if ends_at <= now:
                self._failing.pop(name, None)
        return answers

    def _in_order(self, key: str) -> Sequence[Node]:
        """All nodes but those on which the object is known to be damaged: the own one, the one that it was last read
        from, and the others, the likeliest to have it first.
        """
        nodes, name = self.nodes(), self.name_of(key)
        order = dict.fromkeys([nodes.own, self._found.get(name, nodes.own), *nodes.homes(key)])
        return [node for node in order if (name, node.name) not in self._damaged]

    def _first(self, doing: str, key: str, ask: Callable[[Node, str], T | None]) -> T:
        """What the first node answers that has the object, and no copy that is known to be damaged. Asks the two
        likeliest one after the other, and then all others.
        """
        own, name, order = self.nodes().own, self.name_of(key), self._in_order(key)
        failures: dict[Node, OSError] = {}
        for group in order[:1], order[1:2], order[2:]:
            answers = _gathered(group, lambda node: ask(node, name))
            for node, answer in zip(group, answers, strict=True):
                if isinstance(answer, OSError):
                    failures[node] = answer
                    continue
                if answer is None:
                    continue
                if own in failures:  # which has the object, perhaps, and cannot read it
                    self.leave(key, str(failures[own]), own.name)
                if len(self._found) >= _REMEMBERED:
                    self._found.clear()
                self._found[name] = node
                return answer
        with self._explained(doing, key):
            raise next(iter(failures.values()), ObjectMissingError(url_of(self.url, key)))

    def name_of(self, key: str) -> str:
        """The object's name on the nodes."""
        return f"{self._bucket}/{key}".strip("/")

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


def _gathered(
    each: Sequence[S], ask: Callable[[S], T], threads: int = _THREADS
) -> list[T | OSError]:
    """What ``ask`` returns of each, or the error in its place; by as many ``threads``."""

    def asked(one: S) -> T | OSError:
        try:
            return ask(one)
        except OSError as error:
            return error

    if min(len(each), threads) < 2:
        return list(map(asked, each))
    with ThreadPoolExecutor(min(len(each), threads), "dcp_datastates-node") as executor:
        return list(executor.map(asked, each))
