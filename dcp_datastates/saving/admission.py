"""Admission: what a call does when saves come faster than they commit: wait, skip itself, or drop the oldest unbegun
save.

A rank decides alone, and at once, to leave a save out, so that its memory is free. The first message of planning tells
the other ranks: if any rank leaves a save out, all do.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import wait
from typing import Final

from dcp_datastates.config import WhenBehind
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.saving.call import DROPPED, SKIPPED
from dcp_datastates.saving.operation import SaveOperation

__all__ = ["await_reads", "enter", "in_flight", "make_room"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_lock = threading.RLock()  # guards _saves
_saves: list[SaveOperation] = []


def in_flight() -> list[SaveOperation]:
    """This process's asynchronous saves whose outcome is not known, oldest first."""
    global _saves
    with _lock:
        _saves = [save for save in _saves if not save.over]
        return list(_saves)


def enter(save: SaveOperation) -> None:
    """Count ``save`` as in flight until it is over."""
    with _lock:
        _saves.append(save)


def await_room(limit: int) -> None:
    """Block, without the GIL, until fewer than ``limit`` saves are in flight. Opens their read windows.

    A save without progress ends within its ``commit_timeout``, so this wait is bounded, too.
    """
    log = WaitLog(logger, "async_save")
    while len(waiting := in_flight()) >= limit:
        oldest = waiting[0]
        oldest.wait_briefly(_POLL_SECONDS)
        log.look(
            f"{len(waiting)} saves are in flight (max_in_flight={limit}), the oldest to {str(oldest.path)!r}: "
            f"{oldest.doing}"
        )


def await_reads(save: SaveOperation) -> None:
    """Block, without the GIL, until the saves called before ``save`` are read, or have failed. Opens no read window."""
    earlier = [each for each in in_flight() if each.call.order < save.call.order]
    wait([each.reads.captured for each in earlier if each.reads is not None])


def make_room(limit: int, mode: WhenBehind) -> int:
    """Apply ``when_behind`` (``mode``) before a call makes another save. Waits only for ``"wait"``.

    Returns why the caller must leave the new save out, a key of :data:`LEFT_OUT`; 0 to go ahead.
    """
    if mode == "wait":
        await_room(limit)
        return 0
    saves = [save for save in in_flight() if not save.left_out and not save.committed.done()]
    if len(saves) < limit:
        return 0
    if mode == "skip":
        return SKIPPED
    for save in saves:  # drop the oldest that has not begun
        if save.leave_out(DROPPED):
            break
    return 0
