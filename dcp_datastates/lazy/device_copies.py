"""Copies that devices make by themselves, into memory that may be somebody else's when they are done."""

from __future__ import annotations

import threading
import time
from typing import Final

from dcp_datastates._native import DeviceEvent
from dcp_datastates.ending import patience_is_over
from dcp_datastates.errors import DeviceError

__all__ = ["DeviceCopies"]

_POLL_SECONDS: Final = 0.1


class DeviceCopies:
    """Those of one capture. Any thread may wait for them, several at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; held by who waits
        self._events: list[DeviceEvent] = []
        self._failure: Exception | None = None
        self.abandoned = False
        """The process ends, and a device still may write: the memory must never be given back."""

    def add(self, event: DeviceEvent) -> None:
        """They go on until ``event``."""
        with self._lock:
            self._events.append(event)

    def wait(self) -> None:
        """Return when no device has anything to do with them any more.

        Raises :class:`DeviceError`, then, if one has failed (always: what was copied is not whole); and if a device
        hangs when the process ends.
        """
        began = time.monotonic()
        with self._lock:
            while self._events and not self.abandoned:
                try:
                    if not self._events[-1].wait(_POLL_SECONDS):
                        self.abandoned = patience_is_over(began)
                        continue
                except RuntimeError as error:
                    self._failure = self._failure or error
                self._events.pop()
            if self.abandoned:
                raise DeviceError("a device did not do what it was given before the process ended")
            if self._failure is not None:
                raise DeviceError(str(self._failure)) from self._failure
