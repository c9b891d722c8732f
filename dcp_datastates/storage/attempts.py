"""The directories of attempts at a checkpoint's path: claimed, published from, withdrawn and removed.

An attempt is published by a rename from its *slot*, a directory ``publishing`` within its own, to ``.metadata``. A
process that removes the slot withdraws the attempt: after that, no rename from the slot can succeed, whether in
progress or late. The file system decides whether the rename or the removal comes first, so this holds without locks,
between hosts, and against a process that was taken for dead. The attempt's directory is created together with its slot,
and no process creates a slot again.

A deletion is an attempt, too: it moves ``.metadata`` *into* its slot, atomically. So a job that has withdrawn the
deletion, and publishes, cannot lose what it publishes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Final

from dcp_datastates.errors import CheckpointSupersededError, CommitOutcomeUnknown
from dcp_datastates.storage import local, operations, presence
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.local import METADATA_NAME, Signature, explained, signature_of

__all__ = [
    "claim",
    "is_deleted",
    "is_deletion",
    "is_rest",
    "mark_deleted",
    "present",
    "publish",
    "rank_of",
    "remove_attempt",
    "remove_files",
    "remove_unborn",
    "unpublish",
    "withdraw",
]

_DATA_FILE = re.compile(r"r(\d{5,})-\d+\.(?:safetensors|[0-9a-f]{16}-[0-9]{8,20}\.linked)")
"""``format/layout.py`` makes these names."""

_SLOT: Final = "publishing"

_DELETING: Final = "deleting"
"""A directory in the attempt's directory that marks its deletion: it exists from before ``.metadata`` is removed until
all files are gone.
"""

_DELETION: Final = "deletion"
"""A directory in the attempt's directory that says that this attempt is a deletion, from its beginning."""

_TRIES: Final = 100
"""After this many tries to empty a slot, it must contain files that are not this package's."""


def claim(directory: Path, attempt: Attempt, *, deletes: bool = False) -> bool:
    """Create the attempt's directory, with its slot; False if another process has claimed it.

    ``deletes``: the attempt is a deletion.
    """
    folder = directory / attempt.name
    unborn = directory / f".{attempt.name}"
    inside = [unborn / _SLOT, unborn / _DELETION] if deletes else [unborn / _SLOT]
    phase = "delete" if deletes else "plan"
    with explained("creating directory", folder):
        try:
            operations.make_directory(unborn, phase)
        except FileExistsError:
            return False
        try:
            for path in inside:
                operations.make_directory(path, phase)
            operations.rename(unborn, folder, phase)
        except OSError as error:
            for path in (*inside, unborn):
                with contextlib.suppress(OSError):
                    operations.remove_directory(path, phase)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
                return False
            raise
    return True


def present(directory: Path) -> list[Attempt]:
    """The attempts that have a directory below ``directory``, oldest first. Symbolic links and files do not count.

    Raises :class:`StorageError` if the directory cannot be read.
    """
    return sorted(
        attempt
        for entry in presence.entries_in(directory)
        if (attempt := Attempt.parse(entry.name)) is not None
        and not entry.is_symlink()
        and local.is_directory(entry)
    )


def publish(directory: Path, attempt: Attempt, data: bytes) -> None:
    """Make ``data`` the directory's ``.metadata``, atomically and durably.

    Writes a file in the slot, syncs it, renames it over ``.metadata``, and syncs the directory: a crash at any instant
    leaves either the old ``.metadata`` or the new one, complete.

    Raises:
        CheckpointSupersededError: the attempt was withdrawn.
        StorageError: the former ``.metadata`` is still there.
        CommitOutcomeUnknown: the new ``.metadata`` has, or may have, replaced the former, and could not be made
            durable.
    """
    source, target = directory / attempt.name / _SLOT / METADATA_NAME, directory / METADATA_NAME
    with explained("publishing", target, len(data)):
        try:
            operations.write_new_file(source, data, "publish")
            ours, before = signature_of(source), signature_of(target)
            if ours is None:
                raise _withdrawn(directory, attempt)
        except FileNotFoundError as error:
            raise _withdrawn(directory, attempt) from error
        except OSError:
            with contextlib.suppress(OSError):  # else the next save's cleanup removes it
                withdraw(directory, attempt)
            raise
        try:
            operations.rename(source, target, "publish")
        except OSError as error:
            # A failed rename may have happened all the same, or may still happen; once the slot is removed, it cannot.
            if not _was_renamed(directory, attempt, ours, before, error):
                if error.errno == errno.ENOENT:
                    raise _withdrawn(directory, attempt) from error
                raise
    try:
        operations.sync_directory(directory, "publish")
    except OSError as error:
        raise CommitOutcomeUnknown(
            f"{target} names attempt {attempt.name}, but making that durable failed: {error.strerror}; it loads now, "
            f"and may be the old one again after a crash"
        ) from error
    with contextlib.suppress(OSError):
        operations.remove_directory(source.parent, "publish")


def _withdrawn(directory: Path, attempt: Attempt) -> CheckpointSupersededError:
    return CheckpointSupersededError(
        f"attempt {attempt.name} at {str(directory)!r} was withdrawn: the other ranks have given this save up, or "
        f"another job saves to the same path"
    )


def _was_renamed(
    directory: Path,
    attempt: Attempt,
    ours: Signature | None,
    before: Signature | None,
    error: OSError,
) -> bool:
    """Whether ``.metadata`` is now ``ours``, in place of ``before``. If not, it can no longer become so."""
    try:
        withdraw(directory, attempt)
        now = signature_of(directory / METADATA_NAME)
        deleted = is_deleted(directory, attempt)
    except OSError:
        raise CommitOutcomeUnknown(
            f"{directory / METADATA_NAME} may name attempt {attempt.name}, or may yet come to do so: storage fails "
            f"({error.strerror})"
        ) from error
    if now == ours:
        return True
    # The slot was gone: the rename did not happen, unless a server's answer was lost and the request repeated.
    if error.errno == errno.ENOENT or (now == before and not deleted):
        return False
    raise CommitOutcomeUnknown(
        f"{directory / METADATA_NAME} may have named attempt {attempt.name} for a while: storage failed "
        f"({error.strerror}), and another process has published or deleted there since"
    ) from error


def unpublish(directory: Path, deletion: Attempt) -> bool:
    """Move ``.metadata`` into the slot of ``deletion``, durably: this deletes the checkpoint.

    The caller has withdrawn all older attempts after ``deletion`` was claimed, and has then looked at ``.metadata``.
    Only a newer attempt can have replaced that file since, and it has withdrawn ``deletion`` before. Returns False if
    ``deletion`` was withdrawn, or ``.metadata`` is gone.
    """
    source, target = directory / METADATA_NAME, directory / deletion.name / _SLOT / METADATA_NAME
    try:
        operations.rename(source, target, "delete")
    except FileNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):  # another process completes this deletion
        operations.sync_directory(directory, "delete")
    return True


def withdraw(directory: Path, attempt: Attempt) -> None:
    """Make it impossible to publish the attempt from now on. ``.metadata`` shows whether it was published before.
    Idempotent.

    If this raises OSError, the attempt may or may not be withdrawn.
    """
    slot = directory / attempt.name / _SLOT
    for _ in range(_TRIES):
        try:
            operations.remove_directory(slot, "withdraw")
            return
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(FileNotFoundError):
            operations.unlink(slot / METADATA_NAME, "withdraw")
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(slot))


def mark_deleted(directory: Path, attempt: Attempt, phase: str) -> None:
    """Mark the attempt as being deleted, so that no rank concludes that it was never committed."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        operations.make_directory(directory / attempt.name / _DELETING, phase)


def is_deleted(directory: Path, attempt: Attempt) -> bool:
    """Whether a deletion of the checkpoint has removed the attempt, or is removing it. Raises OSError.

    For a rank that has written files: if the attempt was not deleted, its files are still there.
    """
    names = presence.names_in(directory / attempt.name)
    return not names or _DELETING in names


def is_deletion(directory: Path, attempt: Attempt) -> bool:
    """Whether the attempt is a deletion, not a save."""
    return presence.is_there(directory / attempt.name / _DELETION)


def is_rest(directory: Path, attempt: Attempt) -> bool:
    """Whether the attempt is a deletion, or what one has left; so it is no save in flight. Raises OSError."""
    return is_deletion(directory, attempt) or is_deleted(directory, attempt)


def rank_of(name: str) -> int | None:
    """The rank that writes a data file with this name; None if it is not a name of this package."""
    match = _DATA_FILE.fullmatch(name)
    return int(match[1]) if match else None


def remove_files(
    directory: Path, attempt: Attempt, rank: int, world: int, phase: str = "cleanup"
) -> None:
    """Remove ``rank``'s share of the files of ``attempt``, as far as possible; never raises.

    The caller must know that the attempt can no longer be published. Each of ``world`` ranks removes the files whose
    rank number equals its own modulo ``world`` (an earlier job may have had more ranks), and only files with this
    package's names. The rank that finds the attempt's directory empty removes it; a foreign file in it keeps the
    directory.
    """
    folder = directory / attempt.name
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    if rank == 0 and _SLOT in names:
        with contextlib.suppress(OSError):
            withdraw(directory, attempt)
    for name in names:
        owner = rank_of(name)
        if owner is not None and owner % world == rank:
            with contextlib.suppress(OSError):
                operations.unlink(folder / name, phase)
    with contextlib.suppress(OSError):
        # the marks stay as long as there are files
        marks = os.listdir(folder)
        if rank == 0 and {_DELETING, _DELETION}.issuperset(marks):
            for mark in marks:
                operations.remove_directory(folder / mark, phase)
        operations.remove_directory(folder, phase)


def remove_attempt(directory: Path, attempt: Attempt, phase: str = "cleanup") -> None:
    """Remove the files of all ranks, as :func:`remove_files` does."""
    remove_files(directory, attempt, 0, 1, phase)


def remove_unborn(directory: Path, before: Attempt | None = None) -> None:
    """Remove the leftovers of interrupted claims older than ``before`` (None: all). If such a claim is only slow, it
    claims again.

    Never raises.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            attempt = Attempt.parse(name[1:]) if name.startswith(".") else None
            if attempt is not None and (before is None or attempt < before):
                folder = directory / name
                for path in (folder / _SLOT, folder / _DELETION, folder):
                    with contextlib.suppress(OSError):
                        operations.remove_directory(path, "cleanup")
