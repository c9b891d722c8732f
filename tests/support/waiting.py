"""Waiting for what a test waits for, and no longer; the limit is only there to end a test that fails."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator

from dcp_datastates.io import engine


def await_that(holds: Callable[[], object], seconds: float = 100.0, otherwise: str = "") -> None:
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


@contextlib.contextmanager
def lines(level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines of ``level`` and above that the package logs meanwhile, in whichever thread."""
    logger = logging.getLogger("dcp_datastates")
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, former or level))
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)


@contextlib.contextmanager
def little_work(seconds: float) -> Iterator[None]:
    """The block takes at most so many seconds of this process's processor time, in all of its threads."""
    started = time.process_time()
    yield
    taken = time.process_time() - started
    assert taken < seconds, f"{taken:.1f} s of work, of which {seconds:g} are allowed"
