"""Admission: what a call does when saves come faster than they commit: wait, or skip itself.

A rank decides alone to leave a save out. The first message of planning tells the other ranks: if any rank leaves a save
out, all do.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from dcp_datastates.config import WhenBehind
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.saving.operation import SaveOperation

__all__ = ["enter", "in_flight", "make_room"]

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


def make_room(limit: int, mode: WhenBehind) -> bool:
    """Apply ``when_behind`` (``mode``) before a call makes another save. Waits only for ``"wait"``.

    Returns whether the caller must leave the new save out.
    """
    if mode == "wait":
        await_room(limit)
        return False
    saves = [save for save in in_flight() if not save.left_out and not save.committed.done()]
    return len(saves) >= limit
