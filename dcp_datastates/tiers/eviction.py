"""Makes room on a full fast tier: archived checkpoints go first, then saves wait for what is being archived."""

from __future__ import annotations

import logging
import math
import shutil
import time
from typing import Final

from dcp_datastates.checkpoints.copy import committed_at
from dcp_datastates.checkpoints.delete import delete_committed
from dcp_datastates.checkpoints.listing import Found, checkpoints, newest_first
from dcp_datastates.errors import DataStatesError, StorageError
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.text import size
from dcp_datastates.tiers.archive import Archive
from dcp_datastates.tiers.ram_store import RamStore

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.5


def make_room(fast: Location, archive: Archive, nbytes: int, seconds: float) -> None:
    """Return when ``fast`` has room for ``nbytes``: its file system, or the memory of the nodes.

    Deletes checkpoints that are archived, the oldest first, but never the newest of all. If that is not enough, waits
    until more is archived, for at most ``seconds``: the save that follows may then fail, for want of space.
    """
    if _free(fast) >= nbytes:
        return
    log = WaitLog(logger, f"the save to {fast}", 0.0)
    deadline = time.monotonic() + seconds
    while True:
        is_over = archive.wait(0.0)  # before the look at what is archived
        older = [*newest_first(checkpoints(fast))][1:]
        while older and _free(fast) < nbytes:
            _evict(older.pop(), archive)
        if _free(fast) >= nbytes:
            return
        if is_over or time.monotonic() >= deadline:
            logger.warning(
                "%s has room for %s, and a save needs about %s; what is archived is deleted there already",
                *(fast, size(_free(fast)), size(nbytes)),
            )
            return
        log.look(f"it needs room, which comes when more is archived in {archive.slow}")
        archive.wait(_LOOK_SECONDS)


def _free(fast: Location) -> float:
    if not isinstance(fast, ObjectPath):
        return shutil.disk_usage(fast).free
    if not isinstance(fast.store, RamStore):  # no store tells
        return math.inf
    try:
        return fast.store.left()
    except StorageError as error:  # the save will say so, too
        logger.warning("whether there is room for a save is not known: %s", error)
        return math.inf


def _evict(found: Found, archive: Archive) -> None:
    try:
        if archive.holds(found.path):
            return
        if committed_at(archive.slow / found.path.name) == found.attempt:
            delete_committed(found)
            logger.info("deleted %s, which is archived, to make room", found.path)
    except DataStatesError as error:  # it is pinned, or the archive does not answer
        logger.warning("%s stays, though it is in the way: %s", found.path, error)
