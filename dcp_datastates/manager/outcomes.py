"""The outcomes of a manager's saves, as the training loop learns of them."""

from __future__ import annotations

from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.errors import CheckpointSkipped

__all__ = ["Outcomes"]


class Outcomes:
    """The saves in flight, and what came of those before them. The training thread uses it.

    Args:
        strict: whether :meth:`finish` raises failures.
    """

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._open: list[tuple[int, SaveHandle]] = []
        """The saves whose outcome is not known to the loop, by their steps."""
        self._failure: BaseException | None = None
        self.failures = 0
        """How many saves have failed. Those that ``when_behind`` left out do not count."""

    def add(self, step: int, handle: SaveHandle) -> None:
        """A save has begun."""
        self._open.append((step, handle))

    def failed_at_once(self, error: BaseException) -> None:
        """A save could not begin."""
        self.failures += 1
        self._failure = self._failure or error

    def take(self) -> None:
        """Count the failures among the saves that have ended."""
        for each in [each for each in self._open if each[1].committed.done()]:
            self._open.remove(each)
            error = each[1].committed.exception()
            if error is not None and not isinstance(error, CheckpointSkipped):
                self.failed_at_once(error)

    def wait(self) -> None:
        """Wait until the outcomes of all saves are known."""
        for _, handle in self._open:
            handle.wait()

    def finish(self) -> None:
        """:meth:`wait`; with ``strict``, raise the first failure that was not raised yet."""
        self.wait()
        self.take()
        failure, self._failure = self._failure, None
        if self._strict and failure is not None:
            raise failure

    def of(self, step: int) -> list[SaveHandle]:
        """The saves of ``step`` whose outcome is not known to the loop."""
        return [handle for each, handle in self._open if each == step]
