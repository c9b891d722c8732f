"""How far one rank has come with reading its part of a save, for the others to see that it moves."""

from __future__ import annotations

import time

from dcp_datastates._native import SaveJob

__all__ = ["Progress"]


class Progress:
    """A number that changes as long as there is progress. Any thread reads it, DCP's thread moves it.

    Args:
        patience: seconds for which waiting for the read window is no lack of progress.
    """

    def __init__(self, patience: float) -> None:
        self._until = time.monotonic() + patience
        self._steps = 0
        self._job: SaveJob | None = None

    def step(self) -> None:
        """One more item is resolved."""
        self._steps += 1

    def follow(self, job: SaveJob) -> None:
        """The native job reads from now on."""
        self._job = job

    @property
    def value(self) -> int:
        """See the class."""
        job = self._job
        moved = 0 if job is None else job.bytes_read + job.bytes_written
        return self._steps + moved + int(10 * min(time.monotonic(), self._until))
