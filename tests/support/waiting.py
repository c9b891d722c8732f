"""Waiting for what a test waits for, and no longer; the limit is only there to end a test that fails."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["await_that"]


def await_that(holds: Callable[[], object], seconds: float = 60.0, otherwise: str = "") -> None:
    """Return as soon as ``holds()``. AssertionError, which says ``otherwise``, after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, otherwise or f"not within {seconds:g} s"
        time.sleep(0.005)
