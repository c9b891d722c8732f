"""What becomes known at the end of a save: its record, which goes to the log and to listeners."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final

from dcp_datastates.errors import CheckpointSkipped, CommitOutcomeUnknown, SaveAbandonedError
from dcp_datastates.process.futures import Listeners, call_back
from dcp_datastates.ranks.failure_detector import FailureDetector
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.results import Outcome, SaveRecord, SaveStats
from dcp_datastates.storage.job_notes import Note, leave, note_in
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.text import step_of

logger = logging.getLogger(__name__)

listeners: Final[Listeners[SaveRecord]] = Listeners()


class SaveOrigin(Enum):
    """Which API and which thread run a save."""

    PACKAGE = "dcp_datastates.async_save"
    """This package's planning thread."""
    DCP_ASYNC = "dcp.async_save"
    """DCP, in a thread that it starts."""
    DCP = "dcp.save"
    """DCP, in the thread of the call."""


def on_save(listener: Callable[[SaveRecord], object]) -> Callable[[], None]:
    """Call ``listener`` with the :class:`SaveRecord` of each save of this process, after its outcome is known.

    Listeners and callbacks of futures run in one thread, one after another; no save waits for them, so they may save,
    and wait for saves. What a listener raises is logged.

    Returns:
        A function that ends this.
    """
    return listeners.add_of_user(listener)


def record_of(
    origin: SaveOrigin,
    rank_set: RankSet,
    path: object,
    attempt: str | None,
    stats: SaveStats,
    error: BaseException | None,
) -> SaveRecord:
    """The record of a save as it stands now."""
    name, timeline = str(path), stats.timeline
    written, seconds = stats.written_bytes or 0, timeline.seconds
    return SaveRecord(
        path=name,
        step=step_of(name),
        rank=rank_set.rank,
        world=rank_set.world,
        api=origin.value,
        attempt=attempt,
        outcome="committed" if error is None else _outcome(error),
        error=None if error is None else f"{type(error).__name__}: {error}",
        began_at=timeline.began_at,
        seconds=seconds,
        phases=timeline.phases(),
        call_seconds=seconds if origin is SaveOrigin.DCP else stats.call_seconds,
        gate_seconds=stats.gate_seconds,
        gated_after=timeline.gated_after,
        room_seconds=stats.room_seconds,
        cache_seconds=stats.cache_seconds,
        eager_bytes=stats.eager_bytes,
        deferred_bytes=stats.deferred_bytes,
        written_bytes=written,
        read_rate=written / stats.read_seconds if stats.read_seconds else 0.0,
        write_rate=written / stats.total_seconds if stats.total_seconds else 0.0,
    )


def _outcome(error: BaseException) -> Outcome:
    match error:
        case CheckpointSkipped():
            return "skipped"
        case SaveAbandonedError():
            return "abandoned"
        case CommitOutcomeUnknown():
            return "unknown"
    return "failed"


def conclude(record: SaveRecord, error: BaseException | None) -> None:
    """Log the outcome, committed or failed with ``error``, and tell the listeners. Never raises."""
    extra = {"save_record": record}
    if error is None:
        of = f" of {record.world} ranks" if record.world > 1 else ""
        is_call = record.api == SaveOrigin.DCP.value
        waited = "" if is_call else f", training waited {1e3 * record.stall_seconds:.1f} ms"
        logger.log(
            logging.INFO if record.rank == 0 else logging.DEBUG,
            "%s",
            f"committed {record.path!r}{of} in {record.seconds:.2f} s; this rank wrote "
            f"{record.written_bytes / 2**20:.1f} MiB ({record.write_rate / 1e9:.2f} GB/s){waited}",
            extra=extra,
        )
    else:
        text = str(error) or type(error).__name__
        if not text.startswith("the save to "):
            text = f"the save to {record.path!r} failed: {text}"
        level = logging.WARNING if isinstance(error, CheckpointSkipped) else logging.ERROR
        kind, after = type(error).__name__, record.seconds
        logger.log(level, "%s (%s, %.1f s after the call)", text, kind, after, extra=extra)
    listeners.tell(record)


_MOST_PAUSE: Final = 5.0


def note_failure(
    record: SaveRecord, path: Location | None, detector: FailureDetector | None = None
) -> None:
    """Have the error noted beside the checkpoints, in the background: by rank 0, or if that is lost, by another."""
    if path is None or record.error is None or record.outcome == "skipped":
        return
    if f"[Errno {errno.ENODEV}]" in record.error:  # what is at the root's place is another one
        return
    if record.rank and (detector is None or detector.lost_coordinator is None):
        return
    note = Note(error=record.error, checkpoint=path.name, attempt=record.attempt)
    call_back(partial(_note, path.parent, note, record.world / 1000 if record.rank else 0.0))


def _note(root: Location, note: Note, pause: float) -> None:
    if pause:
        time.sleep(random.uniform(0.0, min(_MOST_PAUSE, pause)))
        there = note_in(root)
        if there and (there.checkpoint, there.attempt) == (note.checkpoint, note.attempt):
            return
    leave(root, note)


def conclude_call(
    origin: SaveOrigin, rank_set: RankSet, path: object, stats: SaveStats, error: BaseException
) -> None:
    """A call raises ``error``, and no save has begun. The caller has the error, so the log has it at DEBUG only."""
    if stats.timeline.end():  # else there was a save, which has its record
        record = record_of(origin, rank_set, path, None, stats, error)
        logger.debug(
            "the call for %r raised %s", record.path, record.error, extra={"save_record": record}
        )
        listeners.tell(record)
        note_failure(record, path if isinstance(path, Path | ObjectPath) else None)
