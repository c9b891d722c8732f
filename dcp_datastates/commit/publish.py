"""Publication, which turns a save into a checkpoint, and the cleanup after it.

The coordinator publishes when every rank's bytes and directory entries are on stable storage. The numbers are the steps
of docs/commit.md:

8. withdraw all older attempts at the path (``storage/attempts.py``): a job that was stopped for long, or a coordinator
   that other ranks took for dead, can no longer publish one of them;
9. check that ``.metadata`` is still the file of the time when this attempt was claimed, or a file that this process has
   published since: a job must not overwrite its successor's checkpoint;
10. make the new ``.metadata`` durable in the attempt's slot, rename it, sync the directory.

Only then do the ranks remove older attempts, each rank its own files (12). Step 8 withdraws every older attempt that
could still be published: a later claim sees this attempt, and takes a newer number (``storage/claims.py``). So after
step 10, ``.metadata`` never names an older attempt again, and the attempts that were there when the ranks voted may be
removed. The attempt that ``.metadata`` names is always complete, whichever process is late, and with or without locks.
The coordinator takes the path's lock, if it is free, only so that a process that deletes there waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.commit.round import Document, Round
from dcp_datastates.errors import CheckpointSupersededError, DataStatesError
from dcp_datastates.format.metadata import decode, read
from dcp_datastates.process.forks import ProcessLock
from dcp_datastates.storage import attempts, local, operations, presence, readme
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.bounded import is_hung
from dcp_datastates.storage.claims import DirectoryClaim, not_replaced
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.lock import asking, if_free

__all__ = [
    "check_overwrite",
    "find_older",
    "publish",
    "published_attempt",
    "settle",
    "tidy_after_commit",
    "tidy_after_failure",
    "warn_if_replaced",
]

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 64

_lock = ProcessLock()  # guards _published
_published: OrderedDict[Path, tuple[local.Signature, Attempt]] = OrderedDict()
"""By directory: the file and the attempt that this process published there last."""


def check_overwrite(directory: Path, overwrite: bool) -> None:
    """Raise :class:`CheckpointExistsError` if a checkpoint is there and ``overwrite`` is False."""
    if not overwrite and presence.is_there(directory / local.METADATA_NAME):
        raise not_replaced(directory)


def publish(round_: Round, document: Document, waiting: Callable[[], None] = lambda: None) -> None:
    """Commit ``round_``, with the bytes that ``document`` makes.

    Calls ``waiting`` now and then while another process holds the path's lock.

    Raises :class:`StorageError`, :class:`CheckpointSupersededError`, :class:`CheckpointExistsError` or
    :class:`ConfigurationError`: then the former checkpoint still stands; or :class:`CommitOutcomeUnknown`.
    """
    directory, attempt, claim = round_.directory, round_.attempt, round_.claim
    assert isinstance(directory, Path)
    assert attempt is not None
    assert isinstance(claim, DirectoryClaim)
    meta = StorageMeta(checkpoint_id=str(round_.path), save_id=attempt.name)
    data = document(meta, claim)
    published = False
    hit("publish.lock.before")
    try:
        with if_free(directory, waiting), local.explained("publishing", directory):
            hit("publish.lock.after")
            check_overwrite(directory, round_.overwrite)
            warn_if_replaced(directory)
            _withdraw_older(directory, attempt)
            _check_not_superseded(directory, attempt, claim.seen)
            if round_.archives:
                (directory / attempt.archive_pin).touch()  # durable with .metadata
            try:
                attempts.publish(directory, attempt, data)
                published = True
            finally:
                # An unknown outcome may be a commit; and an error here must not hide a known outcome.
                with contextlib.suppress(DataStatesError):
                    _remember(directory, attempt)
            readme.write(directory)
        operations.tell(directory, attempt.name)
    except Exception:
        if not published:
            raise
        logger.exception("after %s was committed", directory)  # the commit stands


def _remember(directory: Path, attempt: Attempt) -> None:
    """Never raises an error of storage: the publication stands, whether or not the file can be read now."""
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


def warn_if_replaced(directory: Path) -> None:
    """Warn, once, if another process has replaced the checkpoint that this process last published there. Never
    raises.
    """
    with _lock:
        signature, ours = _published.get(directory, (None, None))
    if signature is None or ours is None:
        return
    try:
        now = local.signature(directory)
        if now is None or now == signature:
            return
        there = published_attempt(directory)
    except (OSError, DataStatesError) as error:
        logger.debug("could not look at what is at %s: %s", directory, error)
        return
    if there == ours:  # the same file through another mount, say
        return
    with _lock:
        if _published.get(directory) != (signature, ours):
            return
        del _published[directory]
    logger.warning(
        "the checkpoint that was committed at %s as attempt %s was replaced by attempt %s of another process; do two "
        "jobs save to one path?",
        directory,
        ours.name,
        there.name,
    )


def _withdraw_older(directory: Path, attempt: Attempt) -> None:
    for older in attempts.present(directory):
        if older < attempt:
            with local.explained("withdrawing an older attempt", directory / older.name):
                attempts.withdraw(directory, older)


def settle(directory: Path, attempt: Attempt) -> bool | None:
    """Step 16: whether the attempt is committed, durably. If not, it can no longer be. Any rank may call this at any
    time.

    None if that can no longer be known: another job has committed there since, or the attempt was deleted. Raises
    OSError if storage cannot be read, and :class:`CheckpointCorruptError`.
    """
    attempts.withdraw(directory, attempt)
    there = _now_published(directory)
    if there == attempt:
        # The coordinator may have died before it synced the directory.
        operations.sync_directory(directory, "publish")
        return True
    if there is not None and there > attempt:
        return None
    # Check this last: a deletion marks the attempt before it removes ``.metadata``.
    return None if attempts.is_deleted(directory, attempt) else False


def _now_published(directory: Path) -> Attempt | None:
    # An NFS client may cache a missing name for half a minute; opening the directory makes it ask the server.
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        return published_attempt(directory)
    except FileNotFoundError:
        return None


def published_attempt(directory: Path) -> Attempt:
    """The attempt that is committed there. Raises OSError or :class:`CheckpointCorruptError`."""
    path = directory / local.METADATA_NAME
    return decode(read(path)[0], path).note.attempt


def _check_not_superseded(directory: Path, attempt: Attempt, seen: local.Signature | None) -> None:
    now = local.signature(directory)
    with _lock:
        ours, newest = _published.get(directory, (None, None))
    if now == seen:
        return
    if now is not None and now == ours:
        # This process published it, perhaps with another rank set (no_dist, say). A newer save has cleaned up already,
        # and without locks it may have removed this attempt's files as leftovers.
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


def find_older(round_: Round) -> list[Attempt]:
    """Step 5: the older attempts at the path, which may be removed if the round commits.

    A rank looks before it votes: the coordinator withdraws those attempts before the commit. A rank that looked later
    could find the checkpoint of a later job, if this one had been deleted meanwhile.
    """
    directory, attempt = round_.directory, round_.attempt
    if not isinstance(directory, Path) or attempt is None:
        return []
    try:
        return [older for older in attempts.present(directory) if older < attempt]
    except OSError as error:
        logger.warning("could not look for older attempts at %s: %s", directory, error)
        return []


def tidy_after_commit(round_: Round, superseded: Sequence[Attempt], rank: int, world: int) -> None:
    """Remove ``rank``'s files of the attempts that :func:`find_older` found, unless a process holds them. Never
    raises.
    """
    directory, attempt = round_.directory, round_.attempt
    if not isinstance(directory, Path) or attempt is None:
        return
    for older in superseded:
        with asking(directory / older.name) as held:
            if not held:
                logger.debug("removing attempt %s of %s", older.name, directory)
                attempts.remove_files(directory, older, rank, world)
    if rank == 0:
        attempts.remove_unborn(directory, attempt)
        with _lock:
            before = [path for path in _published if path != directory][-1:]
        for path in before:  # a job with a directory per step publishes only once in each
            if not is_hung(path):
                warn_if_replaced(path)


def tidy_after_failure(round_: Round, rank: int, world: int) -> None:
    """Remove ``rank``'s files of the round's own attempt. Never raises."""
    directory = round_.directory
    if isinstance(directory, Path) and round_.attempt is not None:
        attempts.remove_files(directory, round_.attempt, rank, world)
        if round_.archives and rank == 0:
            with contextlib.suppress(OSError):
                (directory / round_.attempt.archive_pin).unlink(missing_ok=True)
