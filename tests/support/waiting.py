"""Waiting for what a test waits for, and no longer; the limit is only there to end a test that fails."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from dcp_datastates.io import engine

__all__ = ["await_free_host_cache", "await_that"]


def await_that(holds: Callable[[], object], seconds: float = 60.0, otherwise: str = "") -> None:
    """Return as soon as ``holds()``. AssertionError, which says ``otherwise``, after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, otherwise or f"not within {seconds:g} s"
        time.sleep(0.005)


def await_free_host_cache(seconds: float) -> None:
    """Return when no save holds a part of the host cache, or waits for one."""
    gc.collect()

    def is_free() -> bool:
        stats = engine.stats()
        return stats is None or (stats.free_segments == stats.total_segments and not stats.waiting)

    await_that(is_free, seconds, "a save kept its part of the host cache")
