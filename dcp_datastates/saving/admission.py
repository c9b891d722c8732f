"""What happens when saves come faster than they commit: wait, skip this one, or drop the oldest unbegun.

A rank leaves a save out by itself, and at once, so that its memory is free. The other ranks are told when they come to
plan that save, in the first message: a save that any rank leaves out is left out by all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, Protocol

from dcp_datastates.config import WhenBehind
from dcp_datastates.process.forks import ProcessLock, after_fork
from dcp_datastates.process.waiting import WaitLog

__all__ = ["LEFT_OUT", "Waiting", "enter", "in_flight", "make_room"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_SKIPPED: Final = 1
_DROPPED: Final = 2
LEFT_OUT: Final = {
    _SKIPPED: "earlier saves are late: all ranks skip this one (skip)",
    _DROPPED: "a newer save came before this one had begun: all ranks drop it (newest)",
}
"""Why a save is left out."""


class Waiting(Protocol):
    """A save, as those see it who wait for it."""

    path: Path | None
    exit_timeout: float
    doing: str
    left_out: int

    @property
    def is_known(self) -> bool:
        """Whether its outcome is known."""

    @property
    def over(self) -> bool:
        """Whether its outcome is known, and it is planned to its end."""

    def wait_briefly(self, seconds: float) -> None:
        """Return when it is over, or after ``seconds``. Starts its reads."""

    def give_up(self, why: str) -> None:
        """It is over here: what becomes of it is not waited for."""

    def leave_out(self, why: int) -> bool:
        """Leave it out, if its planning has not begun; whether that is so. ``why`` is a key of :data:`LEFT_OUT`."""


_lock = ProcessLock()  # guards _saves
_saves: list[Waiting] = []


def in_flight() -> list[Waiting]:
    """This process's asynchronous saves whose outcome is not known, oldest first."""
    global _saves
    with _lock:
        _saves = [save for save in _saves if not save.over]
        return list(_saves)


def enter(save: Waiting) -> None:
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
    saves = [save for save in in_flight() if not save.left_out and not save.is_known]
    if len(saves) < limit:
        return 0
    if mode == "skip":
        return _SKIPPED
    for save in saves:  # the oldest that has not begun
        if save.leave_out(_DROPPED):
            break
    return 0


@after_fork
def _forget_in_child() -> None:
    _saves.clear()
