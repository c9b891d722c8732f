"""Deletes old checkpoints while training continues."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from dcp_datastates.checkpoints.find import Verification
from dcp_datastates.errors import DataStatesError
from dcp_datastates.torchtitan.steps import delete_old

__all__ = ["Purge"]

logger = logging.getLogger(__name__)


class Purge:
    """Keeps the ``keep`` newest good checkpoints in ``folder``, in a thread that lives while there is work.

    The trainer's thread calls :meth:`request` and :meth:`close`. A failure is logged, and the next request tries again.
    """

    def __init__(self, folder: Path, keep: int, verify: Verification) -> None:
        self._folder = folder
        self._keep = keep
        self._verify = verify
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
                for path in delete_old(self._folder, self._keep, self._verify):
                    logger.info("deleted checkpoint %s", path)
            except (DataStatesError, OSError) as error:
                logger.warning("old checkpoints were not deleted: %s", error)
