"""What follows a commit: placeholders, and DeepSpeed's file ``latest``. Training waits for it only with ``wait``.

1. All ranks agree on the outcome of the save, as on that of every save of this package. Every rank is told it.
2. If the checkpoint is committed, a thread of rank 0 writes the placeholders, and then ``latest``, each durably.

The saves of a job are committed in the order of their calls, and one thread takes them in that order: ``latest`` never
goes back to an older tag. A save that fails changes neither. A kill between 1 and 2 leaves ``latest`` at the previous
tag; the next save continues.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.deepspeed.export import LATEST, names_in
from dcp_datastates.deepspeed.placeholders import replace_durably, write_placeholders
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.forks import ProcessLock, after_fork
from dcp_datastates.process.worker import Worker

__all__ = ["Save", "failed_saves", "note_failure", "wait_for_all", "watch"]

logger = logging.getLogger(__name__)

_AT_END_SECONDS: Final = 60.0
"""How long the end of the process waits for the thread that writes ``latest``, after the last save."""


@dataclass(eq=False)
class Save:
    """One call of ``save_checkpoint`` on this rank."""

    handle: SaveHandle
    save_dir: Path
    tag: str
    writes: bool
    """Whether this process writes the placeholders."""
    writes_latest: bool
    """Whether this process writes ``latest``."""
    finished: threading.Event = field(default_factory=threading.Event)
    """Set when the outcome is known, and this process has nothing more to write."""


_lock = ProcessLock()  # guards what follows
_saves: dict[Save, None] = {}
"""The saves that are not finished, the oldest first."""
_failed = 0
_writer = Worker("dcp_datastates-deepspeed")


def failed_saves() -> int:
    """How many saves of this process have failed. Each was logged as an error."""
    return _failed


def note_failure(save_dir: str | os.PathLike[str], tag: str, error: BaseException) -> None:
    """Count a save that failed, and log it."""
    global _failed
    with _lock:
        _failed += 1
    logger.error(
        "the save of tag %r to %r failed, and training goes on; %r still names the tag before it: %s: %s",
        *(tag, os.fspath(save_dir), LATEST, type(error).__name__, error),
    )


def watch(save: Save) -> None:
    """Do what follows the commit of ``save``. Returns at once; one thread calls this in the order of the saves."""
    with _lock:
        _saves[save] = None
    save.handle.committed.add_done_callback(lambda outcome: _told(save, outcome))


def wait_for_all(captured_only: bool = False) -> None:
    """Wait until every save of this process is finished, or has at least read all tensors. Never raises for a failed
    save.
    """
    for save in tuple(_saves):
        if captured_only:
            save.handle.captured.exception()
        else:
            save.handle.wait()
            save.finished.wait()


def _told(save: Save, outcome: Future[None]) -> None:
    """Called once, in the thread that resolves the outcome. It must not wait for storage."""
    error = outcome.exception()
    if error is not None:
        note_failure(save.save_dir, save.tag, error)
    if error is not None or not save.writes:
        _finish(save)
    elif not _writer.post(lambda: _write(save)):
        note_failure(save.save_dir, save.tag, RuntimeError("no thread can be started"))
        _finish(save)


def _write(save: Save) -> None:
    try:
        directory = save.save_dir / save.tag
        write_placeholders(directory, names_in(directory))
        if save.writes_latest:
            replace_durably(save.save_dir / LATEST, save.tag.encode(), "latest")
    except Exception as error:
        note_failure(save.save_dir, save.tag, error)
    finally:
        _finish(save)


def _finish(save: Save) -> None:
    with _lock:
        _saves.pop(save, None)
    save.finished.set()


def _finish_at_end() -> None:
    """All saves are over by now; only this module's thread may still have work."""
    for save in tuple(_saves):
        if not save.finished.wait(_AT_END_SECONDS):
            logger.error(
                "the process ends, and %r of %r could not be written", LATEST, str(save.save_dir)
            )


@after_fork
def _forget_in_child() -> None:
    global _writer
    _saves.clear()
    _writer = Worker("dcp_datastates-deepspeed")


at_end(_finish_at_end, Phase.GIVE_UP)
