"""The end of the process: what must be said before the interpreter waits for DCP's threads, and how long a device
that hangs is waited for from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["at_end", "patience_is_over"]

_PATIENCE_SECONDS: Final = 10.0

_began: float | None = None


def at_end(function: Callable[[], None]) -> None:
    """Have ``function`` called when the process is about to end, before threads are joined."""
    # Private, but what concurrent.futures itself uses, and the only hook before that wait.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(function)


def patience_is_over(since: float) -> bool:
    """Whether who waits for a device since then (of ``time.monotonic``) gives up: never before the process ends."""
    return _began is not None and time.monotonic() - max(since, _began) > _PATIENCE_SECONDS


def _begin() -> None:
    global _began
    _began = time.monotonic()


at_end(_begin)
