"""How fast a process sends to other nodes, or carries to the archive."""

from __future__ import annotations

import threading
import time


class Pace:
    """A limit, ``rate``, in bytes per second; 0: none. Any thread."""

    def __init__(self, rate: float = 0.0) -> None:
        self.rate = rate
        self._lock = threading.RLock()  # guards _next
        self._next = 0.0

    def delay(self, nbytes: int) -> float:
        """For how many seconds to wait before ``nbytes`` more."""
        with self._lock:
            now = time.monotonic()
            begin = max(self._next, now)
            if self.rate:
                self._next = begin + nbytes / self.rate
        return begin - now
