"""The vote's tree of small gloo groups: the ranks' bytes go up the tree, and what they come to goes down.

One gloo group of N ranks costs 2 N² requests to the store and N sockets per rank. Here the ranks form groups of 8
(mostly the ranks of one host), the first ranks of these form groups of 8 again, and so on. 16,384 ranks need five
levels, at most 7 + 7 + 7 + 7 + 3 connections on one rank, and some eight requests per rank to connect. Up to 8 ranks
form one group.

When a connection breaks, all ranks leave the whole tree and connect anew. Each time is a *generation*: the ranks meet
(``meetings.py``) under its number, then connect. A rank that leaves closes its sockets: its neighbours' operations
fail, so the neighbours leave too, then their neighbours. Where the network is cut, the ranks' beats tell: they contain
the generation that a rank is in, or comes to next (:attr:`GlooTree.generation`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import struct
from collections.abc import Callable, Iterator
from typing import Final

from dcp_datastates.ranks.connection import Connection
from dcp_datastates.ranks.gloo_group import GlooGroup, GroupBroken, Place, Rendezvous
from dcp_datastates.ranks.meetings import Check, GivenUp, Meetings
from dcp_datastates.ranks.rank_set import RankSet

logger = logging.getLogger(__name__)

_WIDTH: Final = 8
"""Ranks in a group: consecutive ranks share a host, and most hosts have 8."""


def places(rank: int, world: int) -> Iterator[Place]:
    """The groups that ``rank`` is in, from the lowest level up. The rank leads all of them but the last."""
    level, count = 0, world
    while count > 1:
        index, place = divmod(rank, _WIDTH)
        size = min(_WIDTH, count - index * _WIDTH)
        if size > 1:
            yield Place(f"{level}.{index}", place, size)
        if place:
            return
        rank, count, level = index, -(-count // _WIDTH), level + 1


class GlooTree:
    """The ranks of ``rank_set``, connected when first needed and anew after :meth:`leave`.

    The ranks connect at most once in a generation. All ranks call the same operations in the same order. An operation
    calls its ``check`` repeatedly while it waits, and raises what ``check`` raises, or :class:`GroupBroken`. The caller
    must then call :meth:`leave`. Only one thread uses a tree. A rank alone is connected.

    Args:
        name: prefix of the tree's keys in the store.
        newest: the newest generation of which the other ranks' beats tell.
    """

    def __init__(self, rank_set: RankSet, name: str, newest: Callable[[], int] = lambda: 0) -> None:
        self._rank_set = rank_set
        self._name = name
        self._newest = newest
        self.generation = 0
        """The generation that this rank is in, or comes to next."""
        self._met = False  # whether this rank takes part in the generation: it is connected, or is connecting
        self._groups: list[tuple[Place, GlooGroup]] = []
        self._closed = False
        self._keys: list[str] = []
        """Set by this rank; deleted once all ranks are connected."""

    def join(self, check: Check) -> bool:
        """Connect with the other ranks if necessary. Returns whether this call connected them; then all ranks are
        connected.

        Raises :class:`GroupBroken`, or what ``check`` raises, after it has left the tree.
        """
        if self._rank_set.world == 1:
            return False
        self._check_open()
        if self._met:
            return False
        late = self._meet(self._watched(check))
        self._met = True
        try:
            self._build(self._watched(check))
            self.gather(b"", check)
            self.broadcast(b"", check)  # now all ranks are connected
            if late is not None:
                raise late
            self._clean_up()
        except BaseException:
            self.leave()
            raise
        return True

    def _meet(self, check: Check) -> BaseException | None:
        """Come to the next generation, with all ranks. Returns an error if it was too late to stay away: the others
        connect.
        """
        # The others may have come to many while this rank was stopped.
        self.generation = max(self.generation, self._newest(), 1)
        while True:
            met = False
            try:
                error = self._meetings.meet(self.generation, b"", list, check).error
                met = True
                return error
            except GivenUp as stop:
                if not stop.early:
                    why = f"another rank has given these connections up: {stop.why}"
                    raise GroupBroken(why) from None
            finally:
                self.generation += not met
            check()

    @functools.cached_property
    def _meetings(self) -> Meetings:
        return Meetings(self._rank_set, self._name)

    @functools.cached_property
    def _store(self) -> Connection:
        return self._rank_set.connect(self._meetings.name)

    def _watched(self, check: Check) -> Check:
        """A check that calls ``check``, and raises if another rank has left."""

        def look() -> None:
            self._check_open()
            check()
            if self._newest() > self.generation:
                raise GroupBroken("another rank has given these connections up")

        return look

    def _check_open(self) -> None:
        if self._closed:
            raise GroupBroken("these connections were closed: the process is ending")

    def leave(self) -> None:
        """End this generation, for all ranks. Returns soon, whatever the other ranks do. Idempotent; never raises."""
        # First: without its groups, a rank would be told what it says itself.
        was_met, self._met = self._met, False
        self.generation += was_met
        groups, self._groups = self._groups, []
        for _, group in reversed(groups):
            try:
                group.leave()
            except Exception:
                logger.exception("a group could not be left")
        self._clean_up()

    def close(self) -> None:
        """Close the groups when this process no longer takes part; the store may be gone already.

        Any thread. An operation in progress raises, and so does :meth:`join` from now on.
        """
        self._closed = True
        self.leave()

    def gather(self, data: bytes, check: Check) -> list[bytes] | None:
        """All ranks' bytes, of any length, on rank 0; None elsewhere."""
        gathered = _SIZE.pack(len(data)) + data
        for place, group in self._joined():
            gathered = group.gather(gathered, self._watched(check))
            if place.rank:
                return None
        parts, at = [], 0
        while at < len(gathered):
            start = at + _SIZE.size
            at = start + _SIZE.unpack_from(gathered, at)[0]
            parts.append(gathered[start:at])
        return parts

    def broadcast(self, data: bytes | None, check: Check) -> bytes:
        """The bytes that rank 0 passes, on all ranks."""
        told = (data or b"") if self._rank_set.rank == 0 else b""
        for _, group in reversed(self._joined()):
            told = group.broadcast(told, self._watched(check))
        return told

    def _joined(self) -> list[tuple[Place, GlooGroup]]:
        groups = list(self._groups)  # another thread may close the tree
        if self._rank_set.world > 1 and not (groups and self._met and not self._closed):
            raise GroupBroken("these connections were given up")
        return groups

    def _build(self, check: Check) -> None:
        """Connect the lowest group first."""
        for place in places(self._rank_set.rank, self._rank_set.world):
            name = f"{self.generation}/{place.name}"
            rendezvous = Rendezvous(self._store, name, place.size, check)
            prefix = f"{self._meetings.name}/{name}/gloo"
            plain_store = functools.partial(self._rank_set.raw_store, prefix)
            try:
                group = GlooGroup(place, rendezvous, plain_store, lambda: self._rank_set.address)
            finally:
                self._keys += rendezvous.keys
            self._groups.append((place, group))

    def _clean_up(self) -> None:
        """Delete this rank's keys, unless the store may not answer any more."""
        keys, self._keys = self._keys, []
        with contextlib.suppress(Exception):
            for key in keys:
                if not self._closed:
                    self._store.delete_key(key)


_SIZE: Final = struct.Struct("<Q")
"""Precedes each rank's bytes on their way up."""
