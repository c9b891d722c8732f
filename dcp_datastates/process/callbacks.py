"""Users' functions that run when a save ends, in one thread that no save waits for."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Final

from dcp_datastates.process.forks import after_fork
from dcp_datastates.process.worker import Worker

__all__ = ["call_back", "finish_callbacks"]

logger = logging.getLogger(__name__)

_NAME: Final = "dcp_datastates-callbacks"

_worker = Worker(_NAME)


def call_back(function: Callable[[], object]) -> None:
    """Call ``function`` in the callbacks' thread, after those of earlier calls. Never waits. What it raises is logged.

    The function may save, and may wait for saves: the threads that commit go on meanwhile.
    """
    if not _worker.post(functools.partial(_call, function)):
        _call(function)  # no thread can start any more, so no save can begin that it could wait for


def finish_callbacks(seconds: float) -> bool:
    """Wait until all functions that were given before have run, for at most ``seconds``. Returns whether they have.

    Returns immediately in the callbacks' thread, which cannot wait for itself.
    """
    if threading.current_thread().name == _NAME:
        return True
    done = threading.Event()
    return not _worker.post(done.set) or done.wait(seconds)


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        logger.exception("a callback of a save raised")


@after_fork
def _forget_in_child() -> None:
    global _worker
    _worker = Worker(_NAME)
