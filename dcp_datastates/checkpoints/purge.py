"""Deletes old checkpoints while training continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from dcp_datastates.errors import DataStatesError

__all__ = ["Purge"]

logger = logging.getLogger(__name__)


class Purge:
    """Calls ``delete``, which returns what it has deleted, in a thread that lives while there is work.

    Any thread may call :meth:`request` and :meth:`close`. A failure is logged, and the next request tries again.
    """

    def __init__(self, delete: Callable[[], list[Path]]) -> None:
        self._delete = delete
        self._lock = threading.Lock()  # guards _wanted, _thread
        self._wanted = False
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Request a deletion of old checkpoints; never waits. Requests during a deletion are combined into one."""
        with self._lock:
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dcp_datastates-purge")
                self._thread.start()

    def close(self) -> None:
        """Return when all requested deletions are done."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                self._wanted = False
            try:
                for path in self._delete():
                    logger.info("deleted checkpoint %s", path)
            except (DataStatesError, OSError) as error:
                logger.warning("old checkpoints were not deleted: %s", error)
