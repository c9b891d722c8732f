"""Deleting old checkpoints, never one that may still be needed.

One victim after the other, in an order that a crash cannot turn against the reader: ``.metadata`` goes first and
its directory is synced, so what is left is no checkpoint any more; then the data files; then the
directory, if nothing foreign is in it. What a crash leaves in between, the next call removes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch.distributed as dist

from dcp_datastates.attempt import Attempt
from dcp_datastates.checkpoints.answers import DEFAULT_TIMEOUT, from_first_rank
from dcp_datastates.checkpoints.find import Verification, check_verification, flaw
from dcp_datastates.checkpoints.listing import (
    Found,
    checkpoints,
    directories,
    newest_first,
    open_found,
)
from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage import local, lock, operations

__all__ = ["Retained", "retain", "retain_here"]

logger = logging.getLogger(__name__)

_PHASE: Final = "retain"
_LOCK_SECONDS: Final = 1.0


def retain(
    root: str | os.PathLike[str],
    *,
    keep: int,
    verify: Verification = "structure",
    process_group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Path]:
    """Delete the checkpoints in the directory ``root`` that are older than the ``keep`` newest good ones.

    Good is what :func:`~dcp_datastates.latest` takes with the same ``verify``: by default, the metadata can be
    read and every data file is there with its exact size; with ``"full"``, every byte of the ``keep`` newest
    is read, and only then is a flipped bit in them noticed before an older, sound one goes. Damaged
    checkpoints do not count, and are deleted once they are older than ``keep`` good ones; so the last good
    one never is. Left alone are: what is not a checkpoint of this package (stock DCP's, too), symbolic links,
    foreign files in a checkpoint's directory, and a checkpoint that a save is replacing: one with an attempt
    that a live process holds, or, where that cannot be known, one that is newer than the committed one.

    Every rank of ``process_group`` (default: all ranks) calls this; the first one deletes, and all return, or
    raise, the same. Calling it again is safe, also while another process does.

    Returns:
        What was deleted, newest first.

    Raises:
        ConfigurationError: ``keep`` is below 1; ``root`` is a file or itself a checkpoint.
        StorageError: ``root`` cannot be read, or the system refused to delete something.
        NoAnswerError: the first rank did not answer in ``timeout`` seconds.
    """
    directory = local.local_path(root)
    _check(keep, verify)
    return from_first_rank(
        lambda: retain_here(directory, keep=keep, verify=verify).deleted,
        "which checkpoints were deleted",
        process_group,
        timeout,
    )


@dataclass(frozen=True)
class Retained:
    """What became of the checkpoints in a directory. Newest first."""

    kept: list[Path] = field(default_factory=list)
    """The good ones that count."""
    deleted: list[Path] = field(default_factory=list)


def retain_here(
    root: str | os.PathLike[str],
    *,
    keep: int,
    verify: Verification = "structure",
    among: Callable[[Path], bool] | None = None,
) -> Retained:
    """What :func:`retain` has its first rank do, by this process alone; any thread.

    Args:
        root: as there.
        keep: as there.
        verify: as there.
        among: which directories in ``root`` count and may be deleted; None: all.
    """
    _check(keep, verify)
    root = local.local_path(root)
    good: list[Attempt] = []
    retained = Retained()
    for found in newest_first(
        path
        for path in checkpoints(root)
        if not path.is_symlink() and (among is None or among(path))
    ):
        if len(good) == keep:
            if _delete(found):
                retained.deleted.append(found.path)
        elif problem := flaw(found, verify):
            logger.warning("not counting checkpoint %s: %s", found.path, problem)
        else:
            good.append(found.attempt)
            retained.kept.append(found.path)
    if len(good) == keep:
        for path in directories(root):
            mine = path not in retained.deleted and (among is None or among(path))
            if mine and _finish_deleting(path, good[-1]):
                retained.deleted.append(path)
    return retained


def _check(keep: int, verify: str) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigurationError(
            f"keep={keep!r} must be a whole number, 1 or more: the last checkpoint is never deleted"
        )
    check_verification(verify)


def _delete(victim: Found) -> bool:
    path = victim.path
    if victim.committed is None and not victim.is_damaged:
        logger.warning("not deleting checkpoint %s: %s", path, victim.problem)
        return False
    with _locked(path) as locked:
        if not locked:
            return False
        now = open_found(path)
        if now is None or now.attempt != victim.attempt:
            return False  # deleted or replaced since it was looked at
        attempts = local.attempts(path)
        committed = None if victim.committed is None else victim.attempt
        busy = [attempt for attempt in attempts if _may_be_in_flight(path, attempt, committed)]
        if busy:
            logger.info("not deleting checkpoint %s: attempt %s is in flight", path, busy[0].name)
            return False
        with _explained(path):
            # Where there are no locks, somebody else may be deleting it, too.
            with contextlib.suppress(FileNotFoundError):
                operations.unlink(path / local.METADATA_NAME, _PHASE)
            with contextlib.suppress(FileNotFoundError):
                operations.sync_directory(path, _PHASE)
            if not _remove(path, attempts) and path.exists():
                names = ", ".join(map(repr, sorted(os.listdir(path))[:3]))
                logger.warning("%s is deleted, but not its directory: it holds %s", path, names)
    return True


def _finish_deleting(path: Path, oldest: Attempt) -> bool:
    """Remove what a deletion that was cut off has left: attempts that nobody holds or will need.

    Only where locks work: a save that is merely slow looks just the same.
    """
    if path.is_symlink() or os.path.lexists(path / local.METADATA_NAME):
        return False
    attempts = local.attempts(path)
    if not attempts or attempts[-1] >= oldest:
        return False
    with _locked(path) as locked:
        if not locked or os.path.lexists(path / local.METADATA_NAME):
            return False
        if any(lock.in_flight(path / attempt.name) is not False for attempt in attempts):
            return False
        with _explained(path):
            return _remove(path, attempts)


def _remove(path: Path, attempts: list[Attempt]) -> bool:
    """Remove the attempts and, if nothing else is in it, the directory; whether that is gone."""
    for attempt in attempts:
        local.remove_attempt(path, attempt, _PHASE)
    try:
        operations.remove_directory(path, _PHASE)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        if error.errno != errno.ENOENT:
            raise
    operations.sync_directory(path.parent, _PHASE)
    return True


def _may_be_in_flight(path: Path, attempt: Attempt, committed: Attempt | None) -> bool:
    held = lock.in_flight(path / attempt.name)
    if held is None:
        return committed is None or attempt > committed
    return held


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Keep anybody from publishing at ``path``; False if it is gone, or somebody is about to."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.exclusive(path, _LOCK_SECONDS))
        except (FileNotFoundError, NotADirectoryError):
            yield False
            return
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise StorageError(
                    error.errno, f"locking the checkpoint failed: {error.strerror}", str(path)
                ) from error
            logger.info("not deleting checkpoint %s: a save is being published there", path)
            yield False
            return
        yield True


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            error.errno, f"deleting the checkpoint failed: {error.strerror}", str(path)
        ) from error
