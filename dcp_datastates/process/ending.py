"""The end of the process: the functions that run, in order, before the interpreter waits for threads, and after that;
and how long threads wait for a hanging device from then on. At the end of a forked child (``forks.py``) none runs.
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

__all__ = ["Phase", "at_end", "at_exit", "patience_is_over"]

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 10.0

_began: float | None = None


class Phase(enum.IntEnum):
    """The phases in which functions run at the end of the process."""

    BEGIN = 0
    """First: functions that let saves in flight continue, and that limit waits for devices."""
    FINISH = 1
    """Wait for saves in flight, within a bound."""
    GIVE_UP = 2
    """From now on, give up file operations that do not return, too."""
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

    def call() -> None:
        if not in_child():
            function()

    return atexit.register(call)


def patience_is_over(since: float) -> bool:
    """Whether a wait for a device that began at ``since`` (of ``time.monotonic``) must give up: never before the
    process ends.
    """
    return _began is not None and time.monotonic() - max(since, _began) > _PATIENCE_SECONDS


def _end() -> None:
    global _began
    if in_child():
        return
    _began = time.monotonic()
    for phase in Phase:
        for function in reversed(_functions[phase]):
            try:
                function()
            except Exception:
                logger.exception("an error at the end of the process")


# A private function, but concurrent.futures uses it, and no other hook runs before that wait.
_register = getattr(threading, "_register_atexit", None)
(_register or atexit.register)(_end)
