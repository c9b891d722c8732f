"""What happens when saves come faster than they commit: wait, skip this one, or drop the oldest unbegun.

A rank leaves a save out by itself, and at once, so that its memory is free. The other ranks are told when they come to
plan that save, in the first message: a save that any rank leaves out is left out by all.
"""

from __future__ import annotations

import logging
from typing import Final

from dcp_datastates.config import WhenBehind
from dcp_datastates.process.forks import ProcessLock, after_fork
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.saving.call import DROPPED, SKIPPED
from dcp_datastates.saving.operation import SaveOperation

__all__ = ["enter", "in_flight", "make_room"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_lock = ProcessLock()  # guards _saves
_saves: list[SaveOperation] = []


def in_flight() -> list[SaveOperation]:
    """This process's asynchronous saves whose outcome is not known, oldest first."""
    global _saves
    with _lock:
        _saves = [save for save in _saves if not save.over]
        return list(_saves)


def enter(save: SaveOperation) -> None:
    """``save`` is in flight from now on."""
    with _lock:
        _saves.append(save)


def await_room(limit: int) -> None:
    """Block, without the GIL, until fewer than ``limit`` saves are in flight. Opens their windows.

    Every save ends within its ``commit_timeout`` without progress, so this does, too.
    """
    log = WaitLog(logger, "async_save")
    while len(waiting := in_flight()) >= limit:
        oldest = waiting[0]
        oldest.wait_briefly(_POLL_SECONDS)
        log.look(
            f"{len(waiting)} saves are in flight (max_in_flight={limit}), the oldest to {str(oldest.path)!r}: "
            f"{oldest.doing}"
        )


def make_room(limit: int, mode: WhenBehind) -> int:
    """What a call does about the saves in flight, before it makes another. Waits only for ``"wait"``.

    Returns why the new save is to be left out, a key of :data:`LEFT_OUT`; 0 if it is not.
    """
    if mode == "wait":
        await_room(limit)
        return 0
    saves = [save for save in in_flight() if not save.left_out and not save.committed.done()]
    if len(saves) < limit:
        return 0
    if mode == "skip":
        return SKIPPED
    for save in saves:  # the oldest that has not begun
        if save.leave_out(DROPPED):
            break
    return 0


@after_fork
def _forget_in_child() -> None:
    _saves.clear()
