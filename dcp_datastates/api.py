"""``async_save`` that brings all it needs: a writer, a planner, a process group for DCP, and futures that tell.

DCP's own future is the end of DCP's collectives: on ranks other than the coordinator no writer code runs
after ``write_data``, and a rank that dies leaves the others waiting in them until the group's timeout. Here the
saves run in background mode and the future is the commit group's; a lost rank is named by its heart, and DCP's
collectives, which run on a group that nobody else uses, are cut short.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_datastates.commit import CommitGroup, commit_group
from dcp_datastates.config import MAX_IN_FLIGHT
from dcp_datastates.dcp_group import make_dcp_group
from dcp_datastates.decision import Decision, Outcome, Reason
from dcp_datastates.errors import (
    ConfigurationError,
    DataStatesError,
    RankLostError,
    SaveAbandonedError,
    SaveFailedError,
)
from dcp_datastates.heart import Heart, Loss
from dcp_datastates.lane import meet, unblock
from dcp_datastates.peers import ALONE, Peers, is_current
from dcp_datastates.save import Save
from dcp_datastates.writer import DataStatesWriter

__all__ = ["async_save"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT: Final = timedelta(seconds=60)
"""For making that group, once all ranks are there."""

_COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
"""Of the group for DCP's collectives, as by DCP's default. Hearts, and not gloo, tell who is lost; this is for a
rank that lives and never comes, because its own async_save raised and the job went on."""

_RETURN_SECONDS: Final = 8.0
"""How long a rank that was silent may take to be heard again: two beats of a rank that is idle."""

_POLL_SECONDS: Final = 0.1

_KEPT_CALLS: Final = 2 * MAX_IN_FLIGHT
"""No rank is further behind another than saves may be in flight."""


def async_save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    writer: DataStatesWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> AsyncSaveResponse:
    """Save ``state_dict`` to ``path`` behind the training, and say when it is captured and when committed.

    Collective: every rank of ``process_group`` calls it, in the same order as its other saves.

    Args:
        state_dict: what :func:`torch.distributed.checkpoint.async_save` takes.
        path: the checkpoint's directory. None if ``writer`` has one.
        writer: to use a writer again; else one is made from ``path`` and ``options``.
        planner: DCP's default planner if None.
        process_group: the ranks that save, if they are not all. Only its membership is used.
        options: of :class:`DataStatesWriter`.

    Returns:
        DCP's ``AsyncSaveResponse``: ``staging_completion`` is done when the state may be changed freely
        (``optimizer.step()`` need not wait for it: the gate does); ``upload_completion`` when the checkpoint is
        committed on all ranks. It raises this package's error that failed the save, with the rank's
        number: :class:`RankLostError` within half a minute if a rank died, :class:`CommitOutcomeUnknown` if
        the coordinator may have published before it was lost.

    Raises:
        ConfigurationError: an option has a value that cannot work.
        RankLostError: a rank of the group is lost already.
    """
    if writer is None:
        writer = DataStatesWriter(path, process_group=process_group, **options)
    elif options or process_group is not None:
        raise ConfigurationError(
            f"writer= has options of its own; pass {', '.join([*options, 'process_group'])} to it instead"
        )
    if path is None and not writer.checkpoint_id:
        raise ConfigurationError("no path to save to: pass path, or a writer that has one")
    group = commit_group(writer.peers)
    collectives = _collectives_of(group)
    with writer.in_background() as saves:
        future = dcp.async_save(  # type: ignore[attr-defined]
            cast("dict[str, Any]", state_dict),
            checkpoint_id=path if path is not None else None,
            storage_writer=writer,
            planner=planner,
            process_group=None if collectives is None else collectives.get(),
            no_dist=group.peers is ALONE,
        )
    assert isinstance(future, Future)
    (save,) = saves
    future.add_done_callback(lambda ended: _dcp_ended(save, collectives, ended))
    assert save.snapshot is not None
    return AsyncSaveResponse(save.snapshot.captured, save.committed)


def _dcp_ended(save: Save, collectives: _Collectives | None, future: Future[Any]) -> None:
    """If the commit group has nothing to decide, DCP's failure is the save's."""
    error = future.exception()
    if error is None:
        if not save.has_round:
            save.fail(SaveAbandonedError("DCP ended this save without writing anything"))
        return
    if isinstance(error, CheckpointException):
        reasons = {rank: Reason.of(failure[0]) for rank, failure in error.failures.items()}
        only = [failure[0] for failure in error.failures.values()]
        if save.group.peers.world == 1 and len(only) == 1:
            save.fail(only[0])
            return
        decision = Decision(Outcome.FAILED, reasons)
        told = decision.error(repr(str(save.path)), save.group.peers.world)
        assert told is not None
        told.__cause__ = error
        save.fail(told)
        return
    if collectives is not None:
        collectives.note_broken()  # a connection broke; the heart knows why within seconds
    if not save.has_round:
        save.group.explain(error, lambda cause: save.fail(_as_ours(cause, save)))


def _as_ours(error: BaseException, save: Save) -> BaseException:
    """No rank is lost: it may have been this one, for a while."""
    if isinstance(error, DataStatesError):
        return error
    ours = SaveFailedError(
        f"the save to {str(save.path)!r} failed on rank {save.group.peers.rank}: {error}"
    )
    ours.__cause__ = error
    return ours


# --- the group for DCP's collectives --------------------------------------------------------------

_lock = threading.Lock()  # guards _groups
_groups: dict[CommitGroup, _Collectives] = {}


class _Collectives:
    """A gloo group for DCP alone, replaced when a rank was lost.

    What a call does is decided in the store, for all ranks: one that went on while another raised would wait for
    it for ever. A group that a rank knows to be broken is noted there too: one that was stopped
    meanwhile does not know.
    """

    def __init__(self, peers: Peers, heart: Heart) -> None:
        self._peers = peers
        self._heart = heart
        self._store = peers.connect("collectives")
        self._calls = 0
        self._made_by: int | None = None  # the call that made the group
        self._group: dist.ProcessGroup | None = None
        self.broken = False

    def get(self) -> dist.ProcessGroup:
        """The group to use in this call, the same on every rank. Raises :class:`RankLostError`, on every rank
        that is there: the first to call, or to find in vain that another does not come, decides.
        """
        call, self._calls = self._calls, self._calls + 1
        if call >= _KEPT_CALLS and self._peers.rank == 0:
            self._store.delete_key(f"call/{call - _KEPT_CALLS}")
        self._heart.quicken()
        try:
            lost = self._lost_for_good()
            renew = self.broken or self._group is None or self._is_noted_broken()
            wanted = lost or str(call if renew else self._made_by)
            decided = self._store.compare_set(f"call/{call}", "", wanted).decode()
            if not decided.isdigit():
                raise RankLostError(decided)
            if int(decided) != self._made_by or self._group is None:
                self._renew(int(decided))
        finally:
            self._heart.slow()
        assert self._group is not None
        return self._group

    def _lost_for_good(self) -> str:
        """Who is lost; empty if nobody is. A rank that was silent, and is back, may not have been heard yet."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while losses := self._heart.losses():
            if time.monotonic() > deadline or any(loss.certain for loss in losses):
                return "; ".join(map(str, losses[:3]))
            time.sleep(_POLL_SECONDS)
        return ""

    def _renew(self, call: int) -> None:
        former, self._group = self._group, None
        if former is not None:
            dist.destroy_process_group(former)
        refused = f"refused/{call}"

        def check() -> None:
            if self._store.check([refused]):
                raise RankLostError(self._store.get(refused).decode())
            if self._heart.losses() and (lost := self._lost_for_good()):
                self._store.set(refused, lost)
                raise RankLostError(lost)

        # Making a group cannot be interrupted: so first see that everybody is there.
        meet(self._store, str(call), self._peers, check)
        made = make_dcp_group(self._peers, str(call), _CONNECT_TIMEOUT, _COLLECTIVE_TIMEOUT)
        self._group, self._made_by, self.broken = made, call, False

    def note_broken(self) -> None:
        """The group is of no use any more; the next call makes another. Any thread."""
        self.broken = True
        with contextlib.suppress(Exception):  # the store may be gone, and the job with it
            self._store.set(f"broken/{self._made_by}", "")

    def _is_noted_broken(self) -> bool:
        return bool(self._store.check([f"broken/{self._made_by}"]))

    def cut(self, losses: list[Loss]) -> None:
        """Called by the heart: whoever waits in the group waits in vain."""
        if self._group is not None and not self.broken:
            self.note_broken()
            logger.warning("%s; cutting DCP's collectives short", "; ".join(map(str, losses[:3])))
            backend = self._group._get_backend(torch.device("cpu"))
            unblock(backend, self._peers.rank, self._peers.world)


def _collectives_of(group: CommitGroup) -> _Collectives | None:
    if group.heart is None:
        return None
    with _lock:
        found = _groups.get(group)
        if found is None:
            for former in [other for other in _groups if not is_current(other.peers)]:
                del _groups[former]
            found = _groups[group] = _Collectives(group.peers, group.heart)
            group.heart.listen(found.cut)
    return found


def _forget_in_child() -> None:
    # Nothing of it may be destroyed here: see commit.py.
    global _lock
    _lock = threading.Lock()
    for collectives in _groups.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(collectives))
    _groups.clear()


os.register_at_fork(after_in_child=_forget_in_child)
