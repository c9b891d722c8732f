"""Which process group DCP's collectives run on, in saves by this package's ``async_save``; agreed by all ranks.

A group that nobody else uses, made anew when ranks were lost. What a call of ``async_save`` does is decided in
the store, for all ranks: one that went on while another raised would wait for it for ever. A group that a rank
knows to be broken is noted there too: one that was stopped meanwhile does not know.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from datetime import timedelta
from typing import Final

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.heart import Heart, Loss
from dcp_datastates.commit.lane import meet
from dcp_datastates.commit.peers import Connection, Peers, is_current
from dcp_datastates.config import MAX_IN_FLIGHT
from dcp_datastates.dcp_group import DcpGroup
from dcp_datastates.errors import RankLostError, SaveFailedError

__all__ = ["Collectives", "collectives_of"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT: Final = timedelta(seconds=60)
"""For making that group, once all ranks are there."""

_COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
"""Of the group, as by DCP's default. Hearts, and not gloo, tell who is lost; this is for a
rank that lives and never comes, because its own async_save raised and the job went on."""

_RETURN_SECONDS: Final = 8.0
"""How long a rank that was silent may take to be heard again: two beats of a rank that is idle."""

_POLL_SECONDS: Final = 0.1

_LOOK_SECONDS: Final = 0.5
"""Between two looks, in an operation, whether others have given the group up."""

_KEPT_CALLS: Final = 2 * MAX_IN_FLIGHT
"""No rank is further behind another than saves may be in flight."""


class Collectives:
    """The group that DCP uses among ``peers``. :meth:`get` is the training thread's; the rest, any thread's."""

    def __init__(self, peers: Peers, heart: Heart) -> None:
        self._peers = peers
        self._heart = heart
        self._store = peers.connect("collectives")
        self._calls = 0
        self._made_by: int | None = None  # the call that made the group
        self._group: DcpGroup | None = None

    def get(self) -> DcpGroup:
        """The group to use in this call, the same on every rank. Raises :class:`RankLostError`, on every rank
        that is there: the first to call, or to find in vain that another does not come, decides.
        """
        call, self._calls = self._calls, self._calls + 1
        if call >= _KEPT_CALLS and self._peers.rank == 0:
            self._store.delete_key(f"call/{call - _KEPT_CALLS}")
        self._heart.quicken()
        try:
            lost = self._lost_for_good()
            group = self._group
            renew = group is None or group.is_cut or self._is_noted_broken()
            wanted = lost or str(call if renew else self._made_by)
            decided = self._store.compare_set(f"call/{call}", "", wanted).decode()
            if not decided.isdigit():
                raise RankLostError(decided)
            if int(decided) != self._made_by or group is None:
                group = self._renew(int(decided))
        finally:
            self._heart.slow()
        return group

    def _lost_for_good(self) -> str:
        """Who is lost; empty if nobody is. A rank that was silent, and is back, may not have been heard yet."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while losses := self._heart.losses():
            if time.monotonic() > deadline or any(loss.certain for loss in losses):
                return "; ".join(map(str, losses[:3]))
            time.sleep(_POLL_SECONDS)
        return ""

    def _renew(self, call: int) -> DcpGroup:
        former, self._group = self._group, None
        if former is not None:
            former.close()
        refused = f"refused/{call}"

        def check() -> None:
            if self._store.check([refused]):
                raise RankLostError(self._store.get(refused).decode())
            if self._heart.losses() and (lost := self._lost_for_good()):
                self._store.set(refused, lost)
                raise RankLostError(lost)

        # Making a group cannot be interrupted: so first see that everybody is there.
        meet(self._store, str(call), self._peers, check)
        self._group = DcpGroup(
            self._peers,
            str(call),
            connecting=_CONNECT_TIMEOUT,
            operation=_COLLECTIVE_TIMEOUT,
            check=_Watch(self._peers.connect("collectives"), call).check,
        )
        self._made_by = call
        return self._group

    def note_broken(self) -> None:
        """The group is of no use any more, on any rank; the next call makes another."""
        if self._group is not None:
            self._group.cut()
        with contextlib.suppress(Exception):  # the store may be gone, and the job with it
            self._store.set(f"broken/{self._made_by}", "")

    def _is_noted_broken(self) -> bool:
        return bool(self._store.check([f"broken/{self._made_by}"]))

    def cut(self, losses: list[Loss]) -> None:
        """Called by the heart: whoever waits in the group waits in vain."""
        if self._group is not None and not self._group.is_cut:
            logger.warning("%s; cutting DCP's collectives short", "; ".join(map(str, losses[:3])))
            self.note_broken()


class _Watch:
    """Looks whether other ranks have given up the group that call ``made_by`` made. For the thread that waits in it."""

    def __init__(self, store: Connection, made_by: int) -> None:
        self._store = store
        self._key = f"broken/{made_by}"
        self._looked = time.monotonic()

    def check(self) -> None:
        """Raises :class:`SaveFailedError` if they have."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        broken = False
        with contextlib.suppress(RuntimeError):  # the store is gone: the heart will say so
            broken = self._store.check([self._key])
        if broken:
            raise SaveFailedError("other ranks have given up the collectives of this save")


_lock = threading.Lock()  # guards _all
_all: dict[CommitGroup, Collectives] = {}


def collectives_of(group: CommitGroup) -> Collectives | None:
    """Those of the ranks that commit together as ``group``; None for a process alone."""
    if group.heart is None:
        return None
    with _lock:
        found = _all.get(group)
        if found is None:
            for former in [other for other in _all if not is_current(other.peers)]:
                del _all[former]
            found = _all[group] = Collectives(group.peers, group.heart)
            group.heart.listen(found.cut)
    return found


def _forget_in_child() -> None:
    # Nothing of it may be destroyed here: see ``commit/group.py``.
    global _lock
    _lock = threading.Lock()
    for collectives in _all.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(collectives))
    _all.clear()


os.register_at_fork(after_in_child=_forget_in_child)
