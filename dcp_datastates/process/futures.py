"""Futures that start the reads that they wait for: a thread that waits for a save cannot start the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, wait

from dcp_datastates.errors import DataStatesError

__all__ = ["AskedFuture", "resolved", "without_traceback"]


class AskedFuture(Future[None]):
    """A future of a save. Asking for its result or its error starts the reads of all saves in flight.

    Args:
        start: the thread that asks calls it, unless the future is done; it must not wait.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        super().__init__()
        self._start = start
        self.asked = False
        """Whether a caller has asked for the result or the error."""
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> None:
        self._ask()
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._ask()
        return super().exception(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds; return whether the future is done. Never raises, and does not count as
        asking.
        """
        if not self.done():
            self._start()
        return bool(wait([self], timeout).done)

    def peek(self) -> BaseException | None:
        """The error, if the future is done and has one. Does not count as asking."""
        return super().exception(0) if self.done() else None

    def _ask(self) -> None:
        self.asked = True
        if not self.done():
            self._start()


def resolved() -> Future[None]:
    """A future that is done, without an error."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def without_traceback(error: BaseException) -> BaseException:
    """A copy without traceback: its frames would retain the state's tensors, in a reference cycle."""
    try:
        return copy.copy(error)
    except Exception:
        return DataStatesError(f"{type(error).__name__}: {error}")
