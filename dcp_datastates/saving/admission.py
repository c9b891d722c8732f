"""The saves that are in flight: what a call does when they come faster than they commit (wait, or skip itself), and how
a process finishes the last ones before it ends, and before it destroys its process groups.

A rank decides alone to leave a save out. The first message of planning tells the other ranks: if any rank leaves a save
out, all do.

:class:`Saves` are those of one writer, and those of them whose outcome the caller does not know yet.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from dcp_datastates.config import WhenBehind
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.futures import finish_callbacks
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.saving.operation import SaveOperation

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
_FIRST_LINE_SECONDS: Final = 3.0
_CALLBACK_SECONDS: Final = 10.0

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


def finish_saves() -> None:
    """Wait until no save is in flight, for each save at most its ``exit_timeout``, and until callbacks have run, for a
    bounded time. Callbacks may save.

    A save that is not over by then fails, which is logged. Never raises.
    """
    _finish_in_flight()
    if not finish_callbacks(_CALLBACK_SECONDS):
        logger.warning(
            "callbacks of saves still run after %g s: the process goes on without them",
            _CALLBACK_SECONDS,
        )
    _finish_in_flight()


def _finish_in_flight() -> None:
    began = time.monotonic()
    log = WaitLog(logger, "the end of this process", _FIRST_LINE_SECONDS)
    while saves := in_flight():
        oldest = saves[0]
        waited = time.monotonic() - began
        if waited >= oldest.config.exit_timeout:
            oldest.give_up(f"the process ends, and has waited for {waited:.0f} s: {oldest.doing}")
            continue
        oldest.wait_briefly(min(_POLL_SECONDS, oldest.config.exit_timeout - waited))
        log.look("; ".join(f"{_named(save)} ({save.doing})" for save in saves[:3]))


def _named(save: SaveOperation) -> str:
    return f"the save to {str(save.path)!r}"


at_end(finish_saves, Phase.FINISH)


class Saves:
    """The saves of one writer. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows
        self._kept: list[SaveOperation] = []
        self._newest: SaveOperation | None = None

    @property
    def newest(self) -> SaveOperation | None:
        return self._newest

    def add(self, save: SaveOperation) -> None:
        with self._lock:
            self._newest = save
            self._kept = [other for other in self._kept if not _is_told(other)]
            self._kept.append(save)

    def wait(self) -> None:
        """Wait until every save is over. Raises the error of a failed save whose outcome the caller has not asked for.

        Only saves that this package runs raise here: for the others, DCP's future or call raises.
        """
        with self._lock:
            saves = list(self._kept)
        for save in saves:
            save.wait()
        with self._lock:
            self._kept = [save for save in self._kept if save not in saves]
        for save in saves:
            if save.own and not save.committed.asked:
                save.committed.result()


def _is_told(save: SaveOperation) -> bool:
    return save.over and (not save.own or save.committed.asked or save.committed.peek() is None)
