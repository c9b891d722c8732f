"""Waiting for what a test waits for, and no longer; the limit is only there to end a test that fails."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from dcp_datastates.io import engine

__all__ = ["await_free_host_cache", "await_that", "host_cache_in_use"]


def await_that(holds: Callable[[], object], seconds: float = 60.0, otherwise: str = "") -> None:
    """Return as soon as ``holds()``. AssertionError, which says ``otherwise``, after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, otherwise or f"not within {seconds:g} s"
        time.sleep(0.005)


def host_cache_in_use() -> int:
    """How many segments of the host cache are taken: those of an earlier test's upload to a store that is gone are, for
    as long as the store's library tries it.
    """
    stats = engine.stats()
    return 0 if stats is None else stats.total_segments - stats.free_segments


def _waiting() -> int:
    stats = engine.stats()
    return 0 if stats is None else stats.waiting


def await_free_host_cache(seconds: float = 30.0, but_for: int = 0) -> None:
    """Return when no save holds a part of the host cache, but for so many segments. What the last save's threads hold
    goes soon after its outcome is known.
    """
    gc.collect()
    await_that(
        lambda: host_cache_in_use() <= but_for and not _waiting(),
        seconds,
        "a save kept its part of the host cache",
    )
