"""Signals that announce the end of the job: a handler that only takes note."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from dcp_datastates.config import parse_duration
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.forks import in_child


class Signals:
    """Notes whether one of ``numbers`` has come, until :meth:`close`. The main thread makes and closes it.

    A handler that the program had set before is called, too. The default action, which would end the process, is not;
    but a second Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(self, numbers: Iterable[int], deadline: float | str | None = None) -> None:
        self.came = False
        """Whether a signal has come to this process."""
        self.until: float | None = None
        """When the deadline of the job's end passes, by ``time.monotonic()``; None before :meth:`stop`."""
        self._deadline = None if deadline is None else parse_duration(deadline, name="deadline")
        self._came_at: float | None = None
        self._before: dict[int, Any] = {}
        try:
            chosen = list(dict.fromkeys(signal.Signals(number) for number in numbers))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"on_signal={numbers!r} must be signals, such as (signal.SIGTERM,): {error}"
            ) from None
        if chosen and threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "on_signal needs the main thread: Python sets signal handlers there only; make the manager there"
            )
        for number in chosen:
            try:
                self._before[number] = signal.signal(number, self._note)
            except OSError as error:
                self.close()
                raise ConfigurationError(
                    f"on_signal={number.name}: the system lets no program handle it ({error.strerror})"
                ) from None
        if deadline is not None and not self._before:
            raise ConfigurationError(
                f"deadline={deadline!r} counts from a signal, and on_signal names none; give one, such as SIGTERM"
            )

    def stop(self) -> None:
        """The job ends: the deadline counts from the signal, or, if it came to another rank, from now."""
        if self._deadline is not None:
            self.until = (self._came_at or time.monotonic()) + self._deadline

    def left(self, most: float) -> float:
        """The seconds until the deadline passes, ``most`` at the most."""
        return most if self.until is None else min(most, max(0.0, self.until - time.monotonic()))

    @property
    def watched(self) -> tuple[int, ...]:
        """The signals that it handles."""
        return tuple(self._before)

    def close(self) -> None:
        """Put the former handlers back. Idempotent."""
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if in_child():  # for which the signal means what it meant
            signal.signal(number, self._before.get(number) or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # No log and no lock here: the handler interrupts any code, also code that holds them.
        again, self.came = self.came, True
        if not again:
            self._came_at = time.monotonic()
        before = self._before.get(number)
        if callable(before) and (again or before is not signal.default_int_handler):
            before(number, frame)  # a second Ctrl-C interrupts
