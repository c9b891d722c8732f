"""The outcomes of a manager's saves, as the training loop learns of them."""

from __future__ import annotations

from collections.abc import Callable

from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.errors import CheckpointSkipped, ConfigurationError

__all__ = ["OnCommit", "OnFailure", "Outcomes"]

OnCommit = Callable[[int, SaveHandle], object]
OnFailure = Callable[[int, BaseException], object]


class Outcomes:
    """The saves in flight, and what came of those before them. The training thread uses it.

    Args:
        most: so many failures in a row end the loop: :meth:`finish` raises the last. None: no number does.
        on_commit: is called with the step and the handle of each committed save.
        on_failure: is called with the step and the error of each failed save.

    Raises :class:`ConfigurationError` for a number below 1.
    """

    def __init__(
        self, most: int | None, on_commit: OnCommit | None, on_failure: OnFailure | None
    ) -> None:
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigurationError(
                f"max_failures={most!r} must be a whole number, 1 or more; None for no limit"
            )
        for name, hook in (("on_commit", on_commit), ("on_failure", on_failure)):
            if hook is not None and not callable(hook):
                raise ConfigurationError(f"{name}={hook!r} must be a function, or None")
        self._most = most
        self._on_commit, self._on_failure = on_commit, on_failure
        self._open: list[tuple[int, SaveHandle]] = []
        """The saves whose outcome is not known to the loop, by their steps."""
        self._in_a_row: list[BaseException] = []
        self.failures = 0
        """How many saves have failed. Those that ``when_behind`` left out do not count."""

    def add(self, step: int, handle: SaveHandle) -> None:
        """A save has begun."""
        self._open.append((step, handle))

    def failed_at_once(self, step: int, error: BaseException) -> None:
        """A save could not begin."""
        self.failures += 1
        self._in_a_row.append(error)
        if self._on_failure is not None:
            self._on_failure(step, error)

    def take(self) -> None:
        """Learn what came of the saves that have ended. Raises what a hook raises."""
        for each in [each for each in self._open if each[1].committed.done()]:
            self._open.remove(each)
            step, handle = each
            error = handle.committed.exception()
            if error is None:
                self._in_a_row.clear()
                if self._on_commit is not None:
                    self._on_commit(step, handle)
            elif not isinstance(error, CheckpointSkipped):
                self.failed_at_once(step, error)

    def wait(self) -> None:
        """Wait until the outcomes of all saves are known."""
        for _, handle in self._open:
            handle.wait()

    def check(self) -> None:
        """Raise the last failure if there are too many in a row. Waits for the saves in flight if they decide that: all
        ranks see the same.
        """
        if self._most is not None and len(self._in_a_row) + len(self._open) >= self._most:
            self.finish()

    def finish(self) -> None:
        """Wait until the outcomes of all saves are known, and raise the last failure if there are too many in a row;
        once.
        """
        self.wait()
        self.take()
        if self._most is not None and len(self._in_a_row) >= self._most:
            failure = self._in_a_row[-1]
            self._in_a_row.clear()
            raise failure

    def of(self, step: int) -> list[SaveHandle]:
        """The saves of ``step`` whose outcome is not known to the loop."""
        return [handle for each, handle in self._open if each == step]
