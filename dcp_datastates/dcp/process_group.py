"""How the ranks plan their saves together: they meet for each, over a tree of gloo groups (``commit/gloo_tree.py``).

Each rank counts its calls: the *entries*. An entry begins with the ranks' numbers going up the tree, and the greatest
and the least of them coming down. If these are the same, the steps of planning follow, in the same generation of the
tree. Once the tree is built, the store is asked for nothing.

**No two ranks pair different entries.** Steps follow only where all ranks have named the same entry in this
generation. A rank that does not finish the steps of an entry leaves the generation, so nothing that it says later is
taken for one of them. Ranks with different numbers have all seen that. Those with a smaller number fail their entry
and come with the next, until they have caught up; those with the greatest meet again.

**None waits for ever.** A rank that leaves closes its sockets: its neighbours fail the entry as well, and theirs
after them. Before, it notes in the store that the entry is given up, and why: a rank that comes late, and does not
find the others, finds the note. The failure detector knows what sockets do not tell: that a rank is dead, silent or
cut off. ``look`` bounds the wait for a rank that does not call or comes no further. If a note is lost, the others' next
entry tells the late rank, or ``look`` does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from dcp_datastates.commit.failure_detector import FailureDetector
from dcp_datastates.commit.gloo_tree import GlooTree, GroupBroken
from dcp_datastates.commit.rank_set import RankSet
from dcp_datastates.config import MAX_IN_FLIGHT
from dcp_datastates.dcp.destroy_hook import DestroyHook
from dcp_datastates.dcp.ranks import Ranks
from dcp_datastates.errors import RankLostError

__all__ = ["Collectives"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETURN_SECONDS: Final = 12.0
"""How long a rank that was silent may take to be heard again: a beat of its own, a look of the coordinator's and one of
this rank's, each after four seconds at most."""

_POLL_SECONDS: Final = 0.1

_NOTE_SECONDS: Final = 2.0
_NOTE_SECONDS_PER_RANK: Final = 1e-3
"""Between two looks whether the others have given up the entry that this rank waits for them with."""

_TRIES: Final = 8
"""How often connections may break before an entry begins: then the ranks cannot reach each other."""

_KEPT_ENTRIES: Final = 2 * MAX_IN_FLIGHT
"""Notes of so many entries stay. No rank is further behind another than saves may be in flight."""

_UNKNOWN: Final = "?"
"""Begins a note whose writer does not know who is to blame."""


class Collectives:
    """The meetings of ``rank_set`` for planning. Of the planning thread.

    Args:
        rank_set: the ranks.
        detector: knows who is lost.
        on_destroy: called when the job destroys its process groups.
    """

    def __init__(
        self, rank_set: RankSet, detector: FailureDetector, on_destroy: Callable[[], None]
    ) -> None:
        self._rank_set = rank_set
        self._detector = detector
        # Now, in the thread of the call: torch names some groups by the number of groups that there are.
        self._hook = DestroyHook(f"dcp_datastates/{rank_set.digest}", on_destroy)
        self._store = rank_set.connect("planning")
        self._tree = GlooTree(rank_set, "planning")
        # Whose entries these are: a store may outlive a default group, and with it the notes of a former one. The
        # coordinator's clock, known to all once they have met.
        self._since = time.time_ns() if rank_set.rank == 0 else 0
        self._noted: list[int] = []  # entries that this rank has noted
        self._in_step = False  # all ranks know that this one fails its entry: it need not leave
        self._look: Callable[[], None] = lambda: None
        self._looked = 0.0

    @contextlib.contextmanager
    def entry(
        self,
        entry: int,
        look: Callable[[], None],
        said: int = 0,
        hear: Callable[[int], None] = lambda greatest: None,
    ) -> Iterator[Ranks]:
        """DCP's steps for this ``entry``, a number that every rank counts, once all ranks have come to it.

        With its number each rank says another, ``said``; the greatest goes to ``hear``. If that raises, it must raise
        on all ranks, and ends the entry. In the block, all ranks make the same steps. If it raises anything but DCP's
        ``CheckpointException``, which all ranks see, the entry fails on all of them.

        ``look`` is called by what waits; it raises :class:`RankLostError` if it has waited for too long. Raises that if
        a rank is lost, or the others have given this entry up; :class:`GroupBroken` if connections broke and it is
        not known why.
        """
        self._look, self._in_step = look, False
        self._forget_notes(entry)
        try:
            greatest = self._meet(entry, said)
            self._in_step = True
            hear(greatest)
            self._in_step = False
            yield Ranks(
                self._rank_set.rank,
                self._rank_set.world,
                lambda data: self._step(entry, lambda: self._tree.gather(data, self._check)),
                lambda parts: self._step(entry, lambda: self._tree.scatter(parts, self._check)),
            )
        except BaseException as error:
            if not self._in_step and not isinstance(error, CheckpointException):
                self._note(entry, error)
                self._tree.leave()
            raise

    def close(self) -> None:
        """Let go of the connections. Idempotent."""
        self._tree.close()
        self._hook.close()

    def _meet(self, entry: int, said: int) -> int:
        """The greatest of what the ranks said."""
        self._looked = 0.0
        check = functools.partial(self._check_meeting, entry)
        tries = 0
        newest, oldest, greatest = entry, 0, 0
        while newest != -oldest:
            try:
                self._tree.join(check)
                # The coordinator's clock goes with it.
                newest, oldest, self._since, greatest = self._tree.max(
                    [entry, -entry, self._since, said], check
                )
            except GroupBroken as broken:
                self._tree.leave()
                self._find_note(entry)
                tries += 1
                if tries > _TRIES:
                    raise
                logger.info("the ranks connect for planning again: %s", broken)
                check()
                time.sleep(tries * _POLL_SECONDS)
                continue
            if newest > entry:
                self._in_step = True
                self._find_note(entry)
                raise RankLostError(
                    f"the other ranks have given this save up, and have come to one {newest - entry} later"
                )
        return greatest

    def _step(self, entry: int, step: Callable[[], T]) -> T:
        try:
            return step()
        except GroupBroken:
            self._find_note(entry)  # that was there before the connection broke
            raise

    def _check(self) -> None:
        """Called by what waits in a step."""
        if losses := self._detector.losses():
            raise RankLostError("; ".join(map(str, losses[:3])))
        self._look()

    def _check_meeting(self, entry: int) -> None:
        """Called while the ranks are waited for."""
        if self._detector.losses() and (lost := self._lost_for_good()):
            raise RankLostError(lost)
        now = time.monotonic()
        if now - self._looked > max(_NOTE_SECONDS, _NOTE_SECONDS_PER_RANK * self._rank_set.world):
            if self._looked:  # not at once: mostly, all ranks are about to come
                self._find_note(entry)
            self._looked = now
        self._look()

    def _lost_for_good(self) -> str:
        """Who is lost; empty if no rank is. A rank that was silent, and is back, may not have been heard yet."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while losses := self._detector.losses():
            if time.monotonic() > deadline or any(loss.certain for loss in losses):
                return "; ".join(map(str, losses[:3]))
            time.sleep(_POLL_SECONDS)
        return ""

    # ---- notes in the store; without the store, the failure detector says so ----------------------------------

    def _note(self, entry: int, error: BaseException) -> None:
        if not self._since:
            return
        why = str(error) or type(error).__name__
        if isinstance(error, GroupBroken):
            why = f"{_UNKNOWN}{why}"
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(self._key(entry), "", why)
            self._noted.append(entry)

    def _find_note(self, entry: int) -> None:
        """Raise what is noted of the entry, if it is given up."""
        with contextlib.suppress(RuntimeError):
            if self._since and self._store.check([self._key(entry)]):
                why = self._store.get(self._key(entry)).decode()
                if why.startswith(_UNKNOWN):
                    raise GroupBroken(why[len(_UNKNOWN) :])
                raise RankLostError(why)

    def _forget_notes(self, entry: int) -> None:
        with contextlib.suppress(RuntimeError):
            while self._noted and self._noted[0] <= entry - _KEPT_ENTRIES:
                self._store.delete_key(self._key(self._noted[0]))
                self._noted.pop(0)

    def _key(self, entry: int) -> str:
        return f"given_up/{self._since}/{entry}"
