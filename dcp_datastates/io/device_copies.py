"""Copies that devices make by themselves, into memory that may have another owner when they are done."""

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
    """Those of one save. Any thread may wait for them, several at once."""

    def __init__(self) -> None:
        self._events: list[DeviceEvent] = []
        self._failure: Exception | None = None
        self.abandoned = False
        """The process ends, and a device still may write: the memory must never be given back."""

    def add(self, event: DeviceEvent) -> None:
        """They go on until ``event``."""
        self._events.append(event)

    def wait(self) -> None:
        """Return when no device has anything to do with them any more.

        Raises :class:`DeviceError`, then, if one has failed (always: what was copied is not whole); and if a device
        hangs when the process ends.
        """
        began = time.monotonic()
        for (
            event
        ) in self._events.copy():  # no lock: a signal handler may interrupt who waits, and wait too
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
        with contextlib.suppress(ValueError):  # another thread has seen it, too
            self._events.remove(event)
        return True
