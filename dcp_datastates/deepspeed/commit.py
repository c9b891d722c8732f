"""What follows a commit: placeholders, and DeepSpeed's file ``latest``. Training waits for it only with ``wait``.

1. All ranks agree on the outcome of the save, as on that of every save of this package. Every rank is told it.
2. If the checkpoint is committed, a thread of rank 0 writes the placeholders, and then ``latest``, each
   durably: the thread that deletes old checkpoints in other integrations.

The saves of a job are committed in the order of their calls, and one thread takes them in that order: ``latest`` never
goes back to an older tag. A save that fails changes neither. A kill between 1 and 2 leaves ``latest`` at the previous
tag; the next save continues.
"""

from __future__ import annotations

import logging
from pathlib import Path

from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.deepspeed.export import LATEST, names_in
from dcp_datastates.deepspeed.placeholders import replace_durably, write_placeholders
from dcp_datastates.manager.save_tracker import SaveTracker
from dcp_datastates.storage.object_path import Location

__all__ = ["saves", "write_when_committed"]

logger = logging.getLogger(__name__)


def _log(directory: Location, error: BaseException) -> None:
    logger.error(
        "the save of tag %r to %r failed, and training goes on; %r still names the tag before it: %s: %s",
        *(directory.name, str(directory.parent), LATEST, type(error).__name__, error),
    )


_saves = SaveTracker(on_failure=_log)


def saves() -> SaveTracker:
    """The saves of this process, of all engines."""
    return _saves


def write_when_committed(handle: SaveHandle, save_dir: Path, tag: str, save_latest: bool) -> None:
    """Write the placeholders, and ``latest``, once the newest save, that of ``handle``, is committed."""

    def write() -> None:
        if handle.committed.exception() is not None:
            return  # a later save is committed
        try:
            write_placeholders(save_dir / tag, names_in(save_dir / tag))
            if save_latest:
                replace_durably(save_dir / LATEST, tag.encode(), "latest")
        except Exception as error:
            _saves.failed(save_dir / tag, error)

    _saves.when_committed(write)
