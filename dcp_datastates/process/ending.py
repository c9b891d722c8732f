"""The end of the process: what is done before the interpreter waits for threads, in which order, and how long a
device that hangs is waited for from then on.
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

__all__ = ["Phase", "at_end", "patience_is_over"]

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 10.0

_began: float | None = None


class Phase(enum.IntEnum):
    """When a function runs, of those that are called at the end."""

    BEGIN = 0
    """At once: what lets saves in flight go on, and limits how long a device is waited for."""
    FINISH = 1
    """Saves in flight are waited for, within a bound."""
    GIVE_UP = 2
    """From now on a file operation that does not return is given up, too."""


_functions: Final[dict[Phase, list[Callable[[], None]]]] = {phase: [] for phase in Phase}


def at_end(function: Callable[[], None], phase: Phase = Phase.BEGIN) -> None:
    """Have ``function`` called when the process is about to end, before threads are joined.

    Within a phase, what was registered last is called first. An exception is logged and stops no other function.
    """
    _functions[phase].append(function)


def patience_is_over(since: float) -> bool:
    """Whether who waits for a device since then (of ``time.monotonic``) gives up: never before the process ends."""
    return _began is not None and time.monotonic() - max(since, _began) > _PATIENCE_SECONDS


def _end() -> None:
    global _began
    _began = time.monotonic()
    for phase in Phase:
        for function in reversed(_functions[phase]):
            try:
                function()
            except Exception:
                logger.exception("an error at the end of the process")


# Private, but what concurrent.futures itself uses, and the only hook before that wait.
_register = getattr(threading, "_register_atexit", None)
(_register or atexit.register)(_end)
