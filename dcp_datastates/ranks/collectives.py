"""Collectives for planning: the ranks meet once per save, over a tree of gloo groups (``ranks/gloo_tree.py``).

Each rank numbers its calls: the *entries*. An entry begins with one reduction over the tree, which gives every rank the
greatest and the least of the ranks' numbers. If they are equal, the steps of planning follow, in the same generation of
the tree. Once the tree is connected, an entry needs no requests to the store.

**No two ranks pair different entries.** Steps follow only if all ranks have sent the same number in this generation. A
rank that does not finish the steps of an entry leaves the generation, so its later messages cannot be taken for steps
of that entry. If the numbers differ, all ranks see that: a rank with a smaller number fails its entry and continues
with the next until it has caught up; ranks with the greatest number meet again.

**No rank waits forever.** A rank that leaves closes its sockets: its neighbours fail the entry too, then their
neighbours. Before it leaves, it writes a note to the store that the entry is given up, and why: a rank that arrives
late finds the note in place of the other ranks. If a rank is dead, silent or cut off, sockets may not show it; the
failure detector does.

**A note is for its own save.** A rank may come to an entry that others have given up under another name: they made a
call that this rank has left out. Its save is not the one that failed (:class:`OtherEntryGivenUp`), and it goes on with
the next entry.

``look`` bounds the wait for a rank that does not call or makes no progress. If a note is lost,
the late rank learns from the other ranks' next entry, or from ``look``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dcp_datastates.config import MAX_IN_FLIGHT
from dcp_datastates.errors import RankLostError
from dcp_datastates.ranks.beats import Loss
from dcp_datastates.ranks.failure_detector import FailureDetector
from dcp_datastates.ranks.gloo_tree import GlooTree, GroupBroken
from dcp_datastates.ranks.rank_set import RankSet

__all__ = ["Collectives", "Exchange", "OtherEntryGivenUp"]

T = TypeVar("T")

_RETURN_SECONDS: Final = 12.0
"""How long it may take to notice that a silent rank is back: its beat, the coordinator's read and this rank's read,
each after four seconds at most.
"""

_POLL_SECONDS: Final = 0.1

_NOTE_SECONDS: Final = 2.0
_NOTE_SECONDS_PER_RANK: Final = 1e-3
"""Time between two requests for a note about the entry, while this rank waits for the others, per rank."""

_TRIES: Final = 8
"""How many broken connections an entry tolerates before it begins; then the ranks count as unable to connect."""

_KEPT_ENTRIES: Final = 2 * MAX_IN_FLIGHT
"""How many entries' notes stay in the store. A rank is at most as many saves behind as may be in flight."""


class OtherEntryGivenUp(Exception):
    """Other ranks have given up an entry of this number and of another name. The next entry may be that of this rank's
    save.
    """


@dataclass(frozen=True)
class Exchange:
    """One gather and one scatter of bytes, in this order."""

    gather: Callable[[bytes], Sequence[bytes] | None]
    """Returns all ranks' bytes on rank 0, None elsewhere."""
    scatter: Callable[[Sequence[bytes] | None], bytes]
    """Returns this rank's element of what rank 0 passes."""


ALONE: Final = Exchange(lambda data: [data], lambda parts: (parts or [b""])[0])
"""The exchange of a rank alone."""


class Collectives:
    """The collectives of ``rank_set`` for planning. One thread at a time uses them.

    Args:
        detector: finds the lost ranks.
        name: distinguishes several collectives of the same ranks.
        numbered: whether the ranks number their entries. If not, an entry pairs the ranks that come; whatever makes
            them come must pair them rightly.
    """

    def __init__(
        self,
        rank_set: RankSet,
        detector: FailureDetector[Any],
        name: str = "planning",
        *,
        numbered: bool = True,
    ) -> None:
        self._rank_set = rank_set
        self._detector = detector
        self._numbered = numbered
        self._store = rank_set.connect(name)
        self._tree = GlooTree(rank_set, name)
        self._noted: list[int] = []  # entries that this rank has noted
        self._unnoted: dict[int, str] = {}  # notes from before the job's ranks were known
        self._in_step = (
            False  # no rank waits for this one: if it fails its entry, it need not leave
        )
        self._look: Callable[[], None] = lambda: None
        self._looked = 0.0
        self._name = ""

    @contextlib.contextmanager
    def entry(
        self,
        entry: int,
        look: Callable[[], None],
        said: int = 0,
        hear: Callable[[int], None] = lambda greatest: None,
        name: str = "",
    ) -> Iterator[Exchange]:
        """Meet the other ranks for this ``entry`` (each rank counts them), then provide an exchange. ``name`` is that
        of the save on all ranks; empty if it is not known.

        Each rank also sends the number ``said``; every rank passes the greatest to ``hear``. If ``hear`` raises, it
        must raise on all ranks, and the entry ends. If the block raises before the exchange is over, the entry fails on
        all ranks.

        While waiting, this calls ``look``, which raises :class:`RankLostError` if the wait has become too long. Raises
        :class:`RankLostError`, too, if a rank is lost or the other ranks have given this entry up; :class:`GroupBroken`
        if connections broke for an unknown reason; :class:`OtherEntryGivenUp` if they have given up one of another
        name, before any rank has met this one.
        """
        self._look, self._in_step, self._name = look, False, name
        self._forget_notes(entry)
        try:
            greatest = self._meet(entry, said)
            self._in_step = True
            hear(greatest)
            self._in_step = False
            yield Exchange(
                lambda data: self._step(entry, lambda: self._tree.gather(data, self._check)),
                lambda parts: self._last_step(entry, parts),
            )
        except BaseException as error:
            if not self._in_step:
                self._note(entry, error)
                self._tree.leave()
            raise

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._tree.close()

    def _meet(self, entry: int, said: int) -> int:
        """Meet the other ranks; return the greatest number that a rank ``said``."""
        self._looked = 0.0
        check = functools.partial(self._check_meeting, entry)
        tries = 0
        while True:
            try:
                self._tree.join(check)
                self._write_notes()
                newest, oldest, greatest = self._tree.meet(entry, [said], check)
            except GroupBroken:
                self._find_note(entry)
                tries += 1
                if tries > _TRIES:
                    raise
                check()
                time.sleep(tries * _POLL_SECONDS)
                continue
            if newest == oldest:
                return greatest[0]
            if newest > entry:
                self._in_step = True
                self._find_note(entry)
                raise RankLostError(
                    f"the other ranks have given this save up, and have come to one {newest - entry} later"
                )

    def _step(self, entry: int, step: Callable[[], T]) -> T:
        try:
            return step()
        except GroupBroken:
            with contextlib.suppress(
                OtherEntryGivenUp
            ):  # the ranks have met: it is too late for the next entry
                self._find_note(entry)  # a rank writes the note before it closes its connections
            raise

    def _last_step(self, entry: int, parts: Sequence[bytes] | None) -> bytes:
        mine = self._step(entry, lambda: self._tree.scatter(parts, self._check))
        self._in_step = True
        return mine

    def _check(self) -> None:
        """Called repeatedly while a step waits."""
        if losses := self._detector.losses():
            raise Loss.error_of(losses)
        self._look()

    def _check_meeting(self, entry: int) -> None:
        """Called repeatedly while this rank waits for the others."""
        if self._detector.losses() and (lost := self._lost_for_good()):
            raise Loss.error_of(lost)
        now = time.monotonic()
        if now - self._looked > max(_NOTE_SECONDS, _NOTE_SECONDS_PER_RANK * self._rank_set.world):
            if self._looked:  # not at once: usually all ranks are about to come
                self._find_note(entry)
            self._looked = now
        self._look()

    def _lost_for_good(self) -> list[Loss]:
        """The lost ranks. Waits a while: a silent rank's return may not be visible yet."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while losses := self._detector.losses():
            if time.monotonic() > deadline or any(loss.certain for loss in losses):
                return losses
            time.sleep(_POLL_SECONDS)
        return []

    # ---- notes in the store; without the store, the failure detector says so ----------------------------------

    def _note(self, entry: int, error: BaseException) -> None:
        if not self._numbered:
            return
        why = str(error) or type(error).__name__
        # Of a broken connection, its writer does not know which rank is at fault.
        self._unnoted[entry] = json.dumps([self._name, why, not isinstance(error, GroupBroken)])
        self._write_notes()

    def _write_notes(self) -> None:
        with contextlib.suppress(RuntimeError):
            while self._unnoted and self._rank_set.incarnation.is_known:
                entry = next(iter(self._unnoted))
                self._store.compare_set(_key(entry), "", self._unnoted.pop(entry))
                self._noted.append(entry)

    def _find_note(self, entry: int) -> None:
        """Raise the noted reason if another rank has given the entry up."""
        with contextlib.suppress(RuntimeError):
            if (
                self._numbered
                and self._rank_set.incarnation.is_known
                and self._store.check([_key(entry)])
            ):
                name, why, is_known = json.loads(self._store.get(_key(entry)))
                if name and self._name and name != self._name:
                    raise OtherEntryGivenUp(why)
                raise (RankLostError if is_known else GroupBroken)(why)

    def _forget_notes(self, entry: int) -> None:
        while len(self._unnoted) > _KEPT_ENTRIES:
            del self._unnoted[next(iter(self._unnoted))]
        with contextlib.suppress(RuntimeError):
            while self._noted and self._noted[0] <= entry - _KEPT_ENTRIES:
                self._store.delete_key(_key(self._noted[0]))
                self._noted.pop(0)


def _key(entry: int) -> str:
    return f"given_up/{entry}"
