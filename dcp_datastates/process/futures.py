"""Futures that start what they wait for: who asks for the outcome of a save runs no backward pass meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

__all__ = ["AskedFuture", "resolved"]


class AskedFuture(Future[None]):
    """A future of a save's. Asking for its result or its error lets the reads of all saves in flight start.

    Args:
        start: called by the thread that asks, unless the future is done; never waits.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        super().__init__()
        self._start = start
        self.asked = False
        """Whether it was asked."""
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> None:
        self._ask()
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._ask()
        return super().exception(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is done within ``timeout`` seconds; raises nothing, and does not count as asking."""
        if not self.done():
            self._start()
        return bool(wait([self], timeout).done)

    def peek(self) -> BaseException | None:
        """The error, if it is known and there is one; this does not count as asking."""
        return super().exception(0) if self.done() else None

    def _ask(self) -> None:
        self.asked = True
        if not self.done():
            self._start()


def resolved() -> Future[None]:
    """A future that is done, and has not failed."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
