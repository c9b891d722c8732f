"""When the stages of a save were over, in seconds from its call."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

__all__ = ["Clock"]

_PATIENCE_SECONDS = 30.0


class Clock:
    """Runs from its construction on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def end_of(self, stage: Future[Any]) -> Future[float]:
        """When ``stage`` was over, well or not: by a callback, for others may be told of it late."""
        end: Future[float] = Future()
        stage.add_done_callback(lambda _: end.set_result(self.elapsed()))
        return end

    @staticmethod
    def seconds(end: Future[float]) -> float:
        """Of a stage that is over. Callbacks come just behind the result."""
        return end.result(_PATIENCE_SECONDS)
