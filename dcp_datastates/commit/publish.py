"""Publishing: the one moment at which a save becomes a checkpoint, and the tidying after it.

The coordinator comes here when every rank's bytes and directory entries are on stable storage. In order:

1. take the path's lock;
2. see that ``.metadata`` is still the file that it was when this attempt was claimed, or one that this
   process has published since: a job that was stopped for long must not overwrite its successor's;
3. make the new ``.metadata`` durable under a temporary name, rename it, sync the directory;
4. let go; only then does anything old go, each rank removing its own files.

Where a file system has no locks (NFS refuses ``flock`` on a directory), another job may publish between 2 and
3. Then the later rename wins: one of two complete checkpoints stands there, and the loser's job was told
that it had committed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.attempt import Attempt
from dcp_datastates.commit.round import Consolidated, Round
from dcp_datastates.errors import (
    CheckpointExistsError,
    CheckpointSupersededError,
    DataStatesError,
)
from dcp_datastates.failpoints import hit
from dcp_datastates.metadata import FileRecord, Note, decode, encode, encode_columns, read_note
from dcp_datastates.planning.whole import PlannedMetadata
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.lock import asking, exclusive

__all__ = [
    "check_overwrite",
    "make_durable",
    "publish",
    "published_attempt",
    "tidy_after_commit",
    "tidy_after_failure",
]

logger = logging.getLogger(__name__)

DCP_VERSION: Final = "1.0.0"
"""What stock DCP of torch 2.11 to 2.13 notes as ``Metadata.version``."""

_REMEMBERED: Final = 64

_lock = threading.Lock()  # guards _published
_published: OrderedDict[Path, tuple[local.Signature, Attempt]] = OrderedDict()
"""Which file ``.metadata`` was when this process last published there, and of which attempt."""


def check_overwrite(directory: Path, overwrite: bool) -> None:
    """Raise :class:`CheckpointExistsError` if a checkpoint is there and may not be replaced."""
    if not overwrite and (directory / local.METADATA_NAME).exists():
        raise CheckpointExistsError(
            f"a committed checkpoint is at {str(directory)!r} and overwrite=False; "
            f"pass overwrite=True to replace it, or another path"
        )


def publish(
    round_: Round, consolidated: Consolidated, waiting: Callable[[], None] = lambda: None
) -> None:
    """Commit ``round_``; calls ``waiting`` now and then while another process publishes there.

    Raises :class:`StorageError`, :class:`CheckpointSupersededError`, :class:`CheckpointExistsError` or
    :class:`ConfigurationError`: then what was there before still is; or :class:`CommitOutcomeUnknown`.
    """
    directory, attempt = round_.directory, round_.attempt
    assert directory is not None
    assert attempt is not None
    data = _document(directory, attempt, consolidated)
    hit("publish.lock.before")
    with exclusive(directory, round_.timeout, waiting):
        hit("publish.lock.after")
        check_overwrite(directory, round_.overwrite)
        _check_not_superseded(directory, attempt, round_.seen)
        try:
            local.publish(directory, attempt, data)
        finally:
            # An outcome that is not known may be this one; and one that is known must not be lost here.
            with contextlib.suppress(DataStatesError):
                _remember(directory, attempt)
    operations.tell(directory, attempt.name)


def _remember(directory: Path, attempt: Attempt) -> None:
    """Never raises: what is published is, whether or not it can be looked at now."""
    try:
        signature = local.signature(directory)
    except OSError as error:
        logger.warning("could not look at what was just published at %s: %s", directory, error)
        return
    if signature is not None:
        with _lock:
            _published[directory] = (signature, attempt)
            _published.move_to_end(directory)
            while len(_published) > _REMEMBERED:
                _published.popitem(last=False)


def make_durable(directory: Path) -> None:
    """Sync the name ``.metadata``, for who found it there: its coordinator may have died before it did."""
    operations.sync_directory(directory, "publish")


def published_attempt(directory: Path) -> Attempt:
    """Which attempt is committed there. Raises OSError or :class:`CheckpointCorruptError`."""
    path = directory / local.METADATA_NAME
    return read_note(decode(path.read_bytes(), path), path).attempt


def _document(directory: Path, attempt: Attempt, consolidated: Consolidated) -> bytes:
    if isinstance(consolidated.metadata, PlannedMetadata):
        return _planned_document(directory, attempt, consolidated.metadata)
    files: dict[str, FileRecord] = {}
    storage_data: dict[object, _StorageInfo] = {}
    for rank_results in consolidated.results:
        for result in rank_results:
            if isinstance(result.storage_data, FileRecord):
                files[result.storage_data.relative_path] = result.storage_data
            else:
                storage_data[result.index] = result.storage_data
    metadata = consolidated.metadata
    metadata.storage_data = storage_data
    metadata.storage_meta = StorageMeta(checkpoint_id=str(directory), save_id=attempt.name)
    metadata.version = DCP_VERSION
    return encode(metadata, Note(attempt, files))


def _planned_document(directory: Path, attempt: Attempt, metadata: PlannedMetadata) -> bytes:
    files = {}
    for report in metadata.reports:
        for name, nbytes, table_offset in report.files:
            path = f"{attempt.name}/{name}"
            files[path] = FileRecord(path, nbytes, table_offset)
    return encode_columns(
        metadata.whole.catalog,
        metadata.whole.placement(metadata.reports, attempt.name),
        StorageMeta(checkpoint_id=str(directory), save_id=attempt.name),
        DCP_VERSION,
        Note(attempt, files),
    )


def _check_not_superseded(directory: Path, attempt: Attempt, seen: local.Signature | None) -> None:
    now = local.signature(directory)
    with _lock:
        ours, newest = _published.get(directory, (None, None))
    if now == seen:
        return
    if now is not None and now == ours:
        # This process's own, perhaps of another set of ranks (no_dist, say). A newer one has tidied up
        # already, and where there are no locks it took this attempt's files for left over.
        if newest is not None and newest > attempt:
            raise CheckpointSupersededError(
                f"a newer save of this process, attempt {newest.name}, was committed to "
                f"{str(directory)!r} before attempt {attempt.name}; it stands"
            )
        return
    raise CheckpointSupersededError(
        f"another job has replaced, or removed, the checkpoint at {str(directory)!r} since attempt "
        f"{attempt.name} began; that job's checkpoint stands. Were two jobs started on one path?"
    )


def tidy_after_commit(round_: Round, rank: int, world: int) -> None:
    """Remove ``rank``'s share of all older attempts that nobody holds. Never raises."""
    directory, attempt = round_.directory, round_.attempt
    if directory is None or attempt is None:
        return
    for older in local.attempts(directory):
        # Without locks, in_flight() is None. An older attempt of another job that is still under way can
        # then not commit any more in any case: step 2 above refuses it.
        if not older < attempt:
            continue
        with asking(directory / older.name) as held:
            if not held:
                logger.debug("removing attempt %s of %s", older.name, directory)
                local.remove_files(directory, older, rank, world)


def tidy_after_failure(round_: Round, rank: int, world: int) -> None:
    """Remove ``rank``'s share of the attempt itself. Never raises."""
    if round_.directory is not None and round_.attempt is not None:
        local.remove_files(round_.directory, round_.attempt, rank, world)
