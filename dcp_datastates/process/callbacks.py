"""Users' functions that run when a save ends, in one thread that no save waits for."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from dcp_datastates.process.worker import Worker

__all__ = ["call_back", "finish_callbacks", "resolving"]

logger = logging.getLogger(__name__)

_NAME: Final = "dcp_datastates-callbacks"

_POLL_SECONDS: Final = 0.01

_worker = Worker(_NAME)
_resolving: Final[dict[object, None]] = {}
"""Futures with an outcome, whose callbacks come. No lock: single dict operations are atomic."""


def call_back(function: Callable[[], object]) -> None:
    """Call ``function`` in the callbacks' thread, after those of earlier calls. Never waits. What it raises is logged.

    The function may save, and may wait for saves: the threads that commit go on meanwhile.
    """
    if not _worker.post(functools.partial(_call, function)):
        _call(function)  # no thread can start any more, so no save can begin that it could wait for


@contextlib.contextmanager
def resolving(future: object) -> Iterator[None]:
    """Within this, ``future`` gets its outcome, which others may see, and then calls back."""
    _resolving[future] = None
    try:
        yield
    finally:
        _resolving.pop(future, None)


def finish_callbacks(seconds: float) -> bool:
    """Wait until all functions have run that were given before, or belong to a future that has its outcome, for at most
    ``seconds``. Returns whether they have.

    Returns immediately in the callbacks' thread, which cannot wait for itself.
    """
    if threading.current_thread().name == _NAME:
        return True
    until = time.monotonic() + seconds
    while _resolving and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    done = threading.Event()
    return not _worker.post(done.set) or done.wait(max(0.0, until - time.monotonic()))


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        logger.exception("a callback of a save raised")
