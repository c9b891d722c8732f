"""The end of the process: the functions that run, in order, before the interpreter waits for threads, and after that;
and how long threads wait for a hanging device, or for storage, from then on. At the end of a forked child
(``forks.py``) none runs.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (registers its wait for DCP's threads: before us, so it comes after us)
import enum
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from dcp_datastates.process.forks import in_child

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 10.0


class Phase(enum.IntEnum):
    """The phases in which functions run at the end of the process."""

    BEGIN = 0
    """First: functions that let saves in flight continue, and that limit waits for devices."""
    FINISH = 1
    """Wait for saves in flight, within a bound."""
    GIVE_UP = 2
    """From now on, give up waits for storage that does not answer, too."""
    LEAVE = 3
    """Last: wait, within a bound, for other processes that use this one."""


_functions: Final[dict[Phase, list[Callable[[], None]]]] = {phase: [] for phase in Phase}


def at_end(function: Callable[[], None], phase: Phase = Phase.BEGIN) -> None:
    """Call ``function`` when the process is about to end, before the interpreter joins threads.

    Within a phase, functions run in reverse order of registration. If a function raises, the error is logged and the
    others still run.
    """
    _functions[phase].append(function)


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` when the interpreter has joined threads. Returns what ``atexit.unregister`` takes."""
    return atexit.register(lambda: None if in_child() else function())


_reached: Final[dict[Phase, float]] = {}


def has_reached(phase: Phase) -> bool:
    """Whether the end of the process has come to ``phase``."""
    return phase in _reached


def patience_is_over(since: float, phase: Phase = Phase.BEGIN) -> bool:
    """Whether a wait that has made no progress since ``since`` (of ``time.monotonic``) must give up: 10 s after the end
    of the process has come to ``phase``, and never before. That is BEGIN for a device, GIVE_UP for storage.
    """
    reached = _reached.get(phase)
    return reached is not None and time.monotonic() - max(since, reached) > _PATIENCE_SECONDS


def _end() -> None:
    if in_child():
        return
    for phase in Phase:
        _reached[phase] = time.monotonic()
        for function in reversed(_functions[phase]):
            try:
                function()
            except Exception:
                logger.exception("an error at the end of the process")


# A private function, but concurrent.futures uses it, and no other hook runs before that wait.
_register = getattr(threading, "_register_atexit", None)
(_register or atexit.register)(_end)
