"""Deletes one checkpoint in a file system, in an order such that a crash leaves none that loads wrongly.

A deletion claims an attempt, as a save does (docs/commit.md, "Deleting"). It withdraws all older attempts, checks that
``.metadata`` is still the file that is to be deleted, and moves it into its own slot: with one rename, which fails if a
newer save has begun to publish. From then on the rest is not a checkpoint any more. Then the data files go, by this
package's names; then the directories, unless they contain foreign files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dcp_datastates.checkpoints.listing import Found, open_found
from dcp_datastates.checkpoints.not_deleted import NotDeleted
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import StorageError
from dcp_datastates.storage import attempts, claims, local, lock, operations, presence, readme
from dcp_datastates.storage.attempt import Attempt

__all__ = ["delete_committed", "delete_rest"]

logger = logging.getLogger(__name__)

_PHASE: Final = "delete"
_LOCK_SECONDS: Final = 1.0


def delete_committed(path: Path, victim: Found, dry_run: bool, whole: bool) -> None:
    """See :func:`checkpoints.delete.delete_committed`."""
    with _locked(path):
        seen = local.signature(path)
        now = open_found(path)
        if now is None or now.attempt != victim.attempt:
            raise NotDeleted(path, "it was deleted or replaced meanwhile")
        _check_unused(path, victim)
        if dry_run:
            return
        claimed = _unpublish(path, victim, seen)
        if not _remove(path, claimed, whole) and (left := sorted(presence.names_in(path))):
            names = ", ".join(map(repr, left[:3]))
            logger.warning("%s is deleted, but not its directory: it holds %s", path, names)


def _check_unused(path: Path, victim: Found) -> list[Attempt]:
    """Raise :class:`NotDeleted` if the checkpoint is pinned, or a save is in flight; returns the attempts there."""
    if pinned := pins(path):
        raise NotDeleted(path, f"it is pinned ({', '.join(pinned)}); dcp_datastates.unpin first")
    claimed = attempts.present(path)
    for attempt in claimed:
        if attempts.is_rest(path, attempt):
            continue
        held = lock.in_flight(path / attempt.name)
        if held or (held is None and (victim.committed is None or attempt > victim.attempt)):
            raise _in_flight(path, attempt, held)
    return claimed


def _unpublish(path: Path, victim: Found, seen: local.Signature | None) -> list[Attempt]:
    """Remove ``.metadata``, if it is still the file ``seen``; returns the attempts that may be removed then."""
    try:
        deletion = claims.claim_deletion(path)
    except StorageError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _unlink(path, victim, seen)
    try:
        # Pins and saves that come after the claim see it, and withdraw it.
        claimed = _check_unused(path, victim)
        _withdraw(path, [attempt for attempt in claimed if attempt != deletion.attempt])
        _check_still_there(path, seen)
        # The older ones, too: one of them may have been committed, and replaced by the victim.
        for attempt in {*claimed, victim.attempt} - {deletion.attempt}:
            attempts.mark_deleted(path, attempt, _PHASE)
        if not attempts.unpublish(path, deletion.attempt):
            raise NotDeleted(path, "it was replaced, pinned or deleted a moment ago")
    except BaseException:
        attempts.remove_attempt(path, deletion.attempt, _PHASE)
        raise
    finally:
        deletion.hold.release()
    return claimed


def _unlink(path: Path, victim: Found, seen: local.Signature | None) -> list[Attempt]:
    """As :func:`_unpublish`, on a full file system, where no directory can be made: no save can begin there, either."""
    claimed = _check_unused(path, victim)
    _withdraw(path, claimed)
    _check_still_there(path, seen)
    # Without locks, another process may be deleting it at the same time.
    with contextlib.suppress(FileNotFoundError):
        operations.unlink(path / local.METADATA_NAME, _PHASE)
    with contextlib.suppress(FileNotFoundError):
        operations.sync_directory(path, _PHASE)
    return claimed


def _check_still_there(path: Path, seen: local.Signature | None) -> None:
    if local.signature(path) != seen:
        raise NotDeleted(path, "it was replaced a moment ago")


def delete_rest(path: Path, dry_run: bool, whole: bool) -> bool:
    """See :func:`checkpoints.delete.delete_rest`. Without locks, a slow save looks like an abandoned one: then only the
    rest of an interrupted deletion is deleted.
    """
    with _locked(path):
        if presence.is_there(path / local.METADATA_NAME):
            raise NotDeleted(path, "it was committed a moment ago")
        claimed = attempts.present(path)
        for attempt in claimed:
            held = lock.in_flight(path / attempt.name)
            if held or (held is None and not attempts.is_rest(path, attempt)):
                raise _in_flight(path, attempt, held)
        if dry_run:
            return True
        _withdraw(path, claimed)
        if presence.is_there(path / local.METADATA_NAME):
            raise NotDeleted(path, "it was committed a moment ago")
        for attempt in claimed:
            (path / attempt.archive_pin).unlink(missing_ok=True)  # of a save that was killed
        return _remove(path, claimed, whole)


def _in_flight(path: Path, attempt: Attempt, held: bool | None) -> NotDeleted:
    if held:
        return NotDeleted(
            path, f"a save is in flight there, attempt {attempt.name}: wait until it ends"
        )
    return NotDeleted(
        path,
        f"attempt {attempt.name} may be a save in flight, and the file system has no locks to tell: if no job saves "
        f"there, remove the directory by hand",
    )


def _withdraw(path: Path, claimed: list[Attempt]) -> None:
    """Withdraw the attempts: a save in flight (on a host that locks do not reach, say) can no longer commit."""
    for attempt in claimed:
        attempts.withdraw(path, attempt)


def _remove(path: Path, claimed: list[Attempt], whole: bool) -> bool:
    """Remove the attempts, and the directory if it is then empty; returns whether the directory is gone. ``whole``:
    remove other files, too.
    """
    readme.remove(path)
    for attempt in claimed:
        attempts.remove_attempt(path, attempt, _PHASE)
    attempts.remove_unborn(path)  # one that is only slow begins again
    if whole:
        _remove_others(path)
    try:
        operations.remove_directory(path, _PHASE)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        if error.errno != errno.ENOENT:
            raise
    operations.sync_directory(path.parent, _PHASE)
    return True


def _remove_others(path: Path) -> None:
    """Remove the files and directories that no save of this package has made."""
    for entry in presence.entries_in(path):
        ours = Attempt.parse(entry.name.removeprefix(".")) is not None
        if ours or entry.name == local.METADATA_NAME:  # without locks, a save may have come
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        else:
            operations.unlink(Path(entry), _PHASE)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep every process from publishing at ``path``; raises :class:`NotDeleted`."""
    with local.explained("deleting the checkpoint", path):
        try:
            with lock.exclusive(path, _LOCK_SECONDS):
                yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotDeleted(path, "it was deleted meanwhile") from error
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise NotDeleted(path, "a save is being published there") from error
            raise
