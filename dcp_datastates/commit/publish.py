"""Publishing: the one moment at which a save becomes a checkpoint, and the tidying after it.

The coordinator comes here when every rank's bytes and directory entries are on stable storage (the numbers are
those of docs/commit.md):

8. withdraw all older attempts at the path (``storage/attempts.py``): a job that was stopped for long, or a coordinator
   that was taken for dead, cannot publish one of them any more;
9. see that ``.metadata`` is still the file that it was when this attempt was claimed, or one that this
    process has published since: a job must not overwrite its successor's;
10. make the new ``.metadata`` durable in the attempt's slot, rename it, sync the directory.

Only then does anything old go, each rank removing its own files (12). Step 8 meets every older attempt that may yet
be published, for a claim that comes later sees this one and is newer (``storage/claims.py``). So once step 10 has
succeeded, ``.metadata`` never names an older attempt again, and all that were there when the ranks voted may go:
whatever is late, and whether or not there are locks, what ``.metadata`` names is whole. The lock of the path is taken
so that a job which deletes there waits.
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
from dcp_datastates.errors import (
    CheckpointExistsError,
    CheckpointSupersededError,
    DataStatesError,
)
from dcp_datastates.format.metadata import decode
from dcp_datastates.process.forks import ProcessLock
from dcp_datastates.storage import attempts, local, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.lock import asking, exclusive

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
"""Which file ``.metadata`` was when this process last published there, and of which attempt."""


def check_overwrite(directory: Path, overwrite: bool) -> None:
    """Raise :class:`CheckpointExistsError` if a checkpoint is there and may not be replaced."""
    if not overwrite and (directory / local.METADATA_NAME).exists():
        raise CheckpointExistsError(
            f"a committed checkpoint is at {str(directory)!r} and overwrite=False; "
            f"pass overwrite=True to replace it, or another path"
        )


def publish(round_: Round, document: Document, waiting: Callable[[], None] = lambda: None) -> None:
    """Commit ``round_``, with the bytes that ``document`` makes.

    Calls ``waiting`` now and then while another process publishes there.

    Raises :class:`StorageError`, :class:`CheckpointSupersededError`, :class:`CheckpointExistsError` or
    :class:`ConfigurationError`: then what was there before still is; or :class:`CommitOutcomeUnknown`.
    """
    directory, attempt, claim = round_.directory, round_.attempt, round_.claim
    assert directory is not None
    assert attempt is not None
    assert claim is not None
    meta = StorageMeta(checkpoint_id=str(round_.path), save_id=attempt.name)
    data = document(meta, claim)
    published = False
    hit("publish.lock.before")
    try:
        with exclusive(directory, round_.timeout, waiting):
            hit("publish.lock.after")
            check_overwrite(directory, round_.overwrite)
            warn_if_replaced(directory)
            _withdraw_older(directory, attempt)
            _check_not_superseded(directory, attempt, claim.seen)
            try:
                attempts.publish(directory, attempt, data)
                published = True
            finally:
                # An outcome that is not known may be this one; and one that is known must not be lost here.
                with contextlib.suppress(DataStatesError):
                    _remember(directory, attempt)
        operations.tell(directory, attempt.name)
        with _lock:
            before = [path for path in _published if path != directory][-1:]
        for path in before:  # a job that saves each step elsewhere comes to this one only
            warn_if_replaced(path)
    except Exception:
        if not published:
            raise
        logger.exception("after %s was committed", directory)  # which it is, all the same


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


def warn_if_replaced(directory: Path) -> None:
    """Say so, once, if what this process last published there has become another's. Never raises."""
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
    if there == ours:  # the same file, as seen through another mount, say
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
    """Step 16: whether the attempt is committed, durably; from now on it cannot be any more. Any rank, at any time.

    None if that cannot be known any more: another job has committed there since, or it was deleted. Raises OSError if
    storage does not tell, and :class:`CheckpointCorruptError`.
    """
    attempts.withdraw(directory, attempt)
    there = _now_published(directory)
    if there == attempt:
        # Its coordinator may have died before it did:
        operations.sync_directory(directory, "publish")
        return True
    if there is not None and there > attempt:
        return None
    # Looked at last: a deletion says so before ``.metadata`` goes.
    return None if attempts.is_deleted(directory, attempt) else False


def _now_published(directory: Path) -> Attempt | None:
    # A client of NFS may remember for half a minute that a name was not there; opening the directory has it ask.
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        return published_attempt(directory)
    except FileNotFoundError:
        return None


def published_attempt(directory: Path) -> Attempt:
    """Which attempt is committed there. Raises OSError or :class:`CheckpointCorruptError`."""
    path = directory / local.METADATA_NAME
    return decode(path.read_bytes(), path).note.attempt


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


def find_older(round_: Round) -> list[Attempt]:
    """Step 5: which attempts may go if the round commits: those at the path that are older.

    A rank looks before it votes. What it finds then is withdrawn before the commit; what it found later might be the
    checkpoint of a job that came after, where this one had been deleted meanwhile.
    """
    directory, attempt = round_.directory, round_.attempt
    if directory is None or attempt is None:
        return []
    try:
        return [older for older in attempts.present(directory) if older < attempt]
    except OSError as error:
        logger.warning("could not look for older attempts at %s: %s", directory, error)
        return []


def tidy_after_commit(round_: Round, superseded: Sequence[Attempt], rank: int, world: int) -> None:
    """Remove ``rank``'s share of what :func:`find_older` has found and no process holds. Never raises."""
    directory, attempt = round_.directory, round_.attempt
    if directory is None or attempt is None:
        return
    for older in superseded:
        with asking(directory / older.name) as held:
            if not held:
                logger.debug("removing attempt %s of %s", older.name, directory)
                attempts.remove_files(directory, older, rank, world)
    if rank == 0:
        attempts.remove_unborn(directory, attempt)


def tidy_after_failure(round_: Round, rank: int, world: int) -> None:
    """Remove ``rank``'s share of the attempt itself. Never raises."""
    if round_.directory is not None and round_.attempt is not None:
        attempts.remove_files(round_.directory, round_.attempt, rank, world)
