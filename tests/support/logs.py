"""What the package says in its log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["lines"]


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
