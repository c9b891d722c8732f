"""Asynchronous copies by devices, into memory that must not be freed or reused before they are done."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from dcp_datastates._native import DeviceEvent
from dcp_datastates.errors import DeviceError
from dcp_datastates.process.ending import patience_is_over

__all__ = ["DeviceCopies"]

_POLL_SECONDS: Final = 0.1


class DeviceCopies:
    """The device copies of one save. Any thread may wait for them, several at once."""

    def __init__(self) -> None:
        self._events: list[DeviceEvent] = []
        self._failure: Exception | None = None
        self.abandoned = False
        """The process is ending, and a device may still write: the memory must never be freed."""

    def add(self, event: DeviceEvent) -> None:
        """Add copies that are done at ``event``."""
        self._events.append(event)

    def wait(self) -> None:
        """Return when no device uses the memory any more.

        Then raises :class:`DeviceError` if a copy has failed (every call does, since the copies are incomplete), or if
        a device hangs at the end of the process.
        """
        began = time.monotonic()
        # No lock: a signal handler may interrupt a thread that waits here, and wait too.
        for event in self._events.copy():
            while not (self.abandoned or self._is_over(event)):
                self.abandoned = patience_is_over(began)
        if self.abandoned:
            raise DeviceError("a device did not do what it was given before the process ended")
        if self._failure is not None:
            raise DeviceError(str(self._failure)) from self._failure

    def _is_over(self, event: DeviceEvent) -> bool:
        try:
            if not event.wait(_POLL_SECONDS):
                return False
        except RuntimeError as error:
            self._failure = self._failure or error
        with contextlib.suppress(ValueError):  # another thread has removed it
            self._events.remove(event)
        return True
