"""One rank's progress in reading its part of a save, for the other ranks to see."""

from __future__ import annotations

import time

from dcp_datastates._native import SaveJob

__all__ = ["Progress"]


class Progress:
    """A number that changes while there is progress. The thread that plans the save advances it; any thread reads it.

    Args:
        patience: seconds for which waiting for the read window counts as progress.
    """

    doing = "reading"

    def __init__(self, patience: float) -> None:
        self._until = time.monotonic() + patience
        self._steps = 0
        self._job: SaveJob | None = None

    def step(self) -> None:
        """Count one more resolved item."""
        self._steps += 1

    def follow(self, job: SaveJob) -> None:
        """Include the progress of the native ``job`` from now on."""
        self._job = job

    @property
    def value(self) -> int:
        job = self._job
        moved = 0 if job is None else job.bytes_read + job.bytes_written
        return self._steps + moved + int(10 * min(time.monotonic(), self._until))
