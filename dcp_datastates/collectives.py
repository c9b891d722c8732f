"""Which process group a save's planning runs on, in saves by this package's ``async_save``; agreed by all ranks.

A group that nothing else uses, made anew when ranks were lost. What the ranks do in a save is decided in
the store, for all of them: one that went on while another gave up would wait for it for ever. A group that a rank
knows to be broken is noted there too, and why: one that was stopped meanwhile does not know.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from dcp_datastates.commit.heart import Heart, Loss
from dcp_datastates.commit.lane import meet
from dcp_datastates.commit.peers import Peers
from dcp_datastates.config import MAX_IN_FLIGHT
from dcp_datastates.dcp_group import DcpGroup
from dcp_datastates.errors import RankLostError

__all__ = ["Collectives"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT: Final = timedelta(seconds=60)
"""For making that group, once all ranks are there."""

_COLLECTIVE_TIMEOUT: Final = timedelta(days=1)
"""Nothing is timed out by gloo: ``look`` knows who is late, and says so sooner."""

_RETURN_SECONDS: Final = 12.0
"""How long a rank that was silent may take to be heard again: a beat of its own, a look of the coordinator's and one of
this rank's, each after four seconds at most."""

_POLL_SECONDS: Final = 0.1

_LOOK_SECONDS: Final = 0.5
"""Between two looks, in an operation, whether others have given the group up."""

_KEPT_ENTRIES: Final = 2 * MAX_IN_FLIGHT
"""No rank is further behind another than saves may be in flight."""


class Collectives:
    """The group for planning among ``peers``.

    Of the planning thread; :meth:`cut` is any thread's.

    Args:
        peers: the ranks.
        heart: knows who is lost.
        on_destroy: called when the job destroys its process groups.
    """

    def __init__(self, peers: Peers, heart: Heart, on_destroy: Callable[[], None]) -> None:
        self._peers = peers
        self._heart = heart
        self._on_destroy = on_destroy
        self._store = peers.connect("collectives")
        self._made_by: int | None = None  # the entry that made the group
        self._group: DcpGroup | None = None
        self._look: Callable[[], None] = lambda: None
        self._looked = 0.0

    def get(self, entry: int, look: Callable[[], None]) -> DcpGroup:
        """The group to use for this ``entry``, a number that every rank counts: the same one on every rank.

        ``look`` is called by what waits from here on, until the next entry; it raises :class:`RankLostError` if it has
        waited for too long. Raises that, on every rank that is there: the first to come, or to find in vain that
        another does not, decides.
        """
        self._look = look
        if entry > _KEPT_ENTRIES and self._peers.rank == 0:
            self._store.delete_key(f"call/{entry - _KEPT_ENTRIES}")
        lost = self._lost_for_good()
        group = self._group
        renew = group is None or group.is_cut or bool(self._why_broken())
        wanted = lost or str(entry if renew else self._made_by)
        decided = self._store.compare_set(f"call/{entry}", "", wanted).decode()
        if not decided.isdigit():
            raise RankLostError(decided)
        if int(decided) != self._made_by or group is None:
            group = self._renew(int(decided))
        return group

    def _lost_for_good(self) -> str:
        """Who is lost; empty if no rank is. A rank that was silent, and is back, may not have been heard yet."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while losses := self._heart.losses():
            if time.monotonic() > deadline or any(loss.certain for loss in losses):
                return "; ".join(map(str, losses[:3]))
            time.sleep(_POLL_SECONDS)
        return ""

    def _renew(self, entry: int) -> DcpGroup:
        former, self._group = self._group, None
        if former is not None:
            former.close()
        refused = f"refused/{entry}"

        def refuse(why: str) -> RankLostError:
            return RankLostError(self._store.compare_set(refused, "", why).decode())

        def check() -> None:
            if self._store.check([refused]):
                raise RankLostError(self._store.get(refused).decode())
            if self._heart.losses() and (lost := self._lost_for_good()):
                raise refuse(lost)
            try:
                self._look()
            except RankLostError as late:
                raise refuse(str(late)) from None

        # Making a group cannot be interrupted: so first see that all ranks are there.
        meet(self._store, str(entry), self._peers, check)
        self._group = DcpGroup(
            self._peers,
            str(entry),
            connecting=_CONNECT_TIMEOUT,
            operation=_COLLECTIVE_TIMEOUT,
            check=self._check,
            on_destroy=self._on_destroy,
        )
        self._made_by = entry
        return self._group

    def _check(self) -> None:
        """Called by what waits in the group: raises :class:`RankLostError` if the group was given up, or must be."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        with contextlib.suppress(RuntimeError):  # the store is gone: the heart will say so
            if why := self._why_broken():
                raise RankLostError(why)
        try:
            self._look()
        except RankLostError as late:
            raise RankLostError(self._note(str(late))) from None

    def note_broken(self, why: str) -> None:
        """The group is of no use any more, on any rank; the next entry makes another."""
        if self._group is not None:
            self._group.cut()
        with contextlib.suppress(RuntimeError):  # the store may be gone, and the job with it
            self._note(why)

    def _note(self, why: str) -> str:
        """Note why the group is broken, unless that is noted; returns what is."""
        return self._store.compare_set(f"broken/{self._made_by}", "", why).decode()

    def _why_broken(self) -> str:
        key = f"broken/{self._made_by}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def cut(self, losses: list[Loss]) -> None:
        """Called by the heart, which must not wait: the planning thread, if it waits in the group, waits in vain."""
        if self._group is None or self._group.is_cut:
            return
        self._group.cut()
        # A rank that was stopped, and goes on, must find it noted before it comes with its next save.
        why, made_by = "; ".join(map(str, losses[:3])), self._made_by
        logger.info("%s; the ranks' planning is broken off", why)

        def note() -> None:
            with contextlib.suppress(RuntimeError):  # the store may be gone, and the job with it
                self._peers.connect("collectives").compare_set(f"broken/{made_by}", "", why)

        threading.Thread(target=note, name="dcp_datastates-note", daemon=True).start()
