"""Claims an attempt: unique at its path, and newer than every commit that its job could have seen.

Attempts order checkpoints (``latest``, ``retain``), and must not depend on clocks: a new attempt's number is greater
than those of all attempts at its path, and of all checkpoints committed beside it, in the path's parent directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcp_datastates.errors import CheckpointExistsError, StorageError
from dcp_datastates.storage import attempts, local, presence, self_test
from dcp_datastates.storage.attempt import Attempt, next_attempt, next_deletion
from dcp_datastates.storage.lock import Hold
from dcp_datastates.storage.object_path import Location

__all__ = [
    "Claim",
    "DirectoryClaim",
    "Neighbours",
    "check_sane",
    "claim",
    "claim_deletion",
    "not_replaced",
]

_CLAIMS: Final = 100
_ABSURD: Final = 0xE << 60
"""An incarnation in the year 2481. No save exceeds it: its own successors would be the newest for ever."""


@dataclass(frozen=True)
class Claim:
    """A claimed attempt, held while its save, or its deletion, is in flight.

    Attributes:
        after: the newest attempt at the path or beside it before the claim; None if there was none, or the parent
            directory cannot be listed.
    """

    attempt: Attempt
    after: Attempt | None

    def release(self) -> None:
        """The attempt is in flight no more. Idempotent. Waits for storage."""


@dataclass(frozen=True)
class DirectoryClaim(Claim):
    """A claimed attempt in a file system.

    Attributes:
        seen: the file that ``.metadata`` was before the claim.
        hold: the lock that marks the attempt as in flight.
    """

    seen: local.Signature | None
    hold: Hold

    def release(self) -> None:
        self.hold.release()


class Neighbours:
    """The checkpoints beside those that a job saves. Each is read only if it is new there, or was replaced.

    One thread at a time uses it.
    """

    def __init__(self) -> None:
        self._root: Location | None = None
        self._known: dict[
            str, tuple[int, int] | None
        ] = {}  # only entries that exist now, so that it does not grow with the job
        self._newest: Attempt | None = None
        self._device: int | None = None
        self._saved: set[str] = set()

    def check_mounted(self, root: Path) -> int:
        """A checkpoint is about to be saved in ``root``: returns the number of the file system there. Raises
        :class:`StorageError` if that of the latest :meth:`note_saved` is no longer mounted: the checkpoint would lie
        below the mount point, on another one.

        A file system that was unmounted and mounted again may have another number; what lies there tells it.
        """
        self._enter(root)
        device, before = _device_of(root), {*self._known, *self._saved}
        if self._device not in (None, device) and before.isdisjoint(presence.names_in(root)):
            raise StorageError(
                errno.ENODEV,
                f"the file system that was mounted at or above {str(root)!r} at the save before is gone, with "
                f"{min(before)!r} on it: mount it again, or begin a new job with another root",
                str(root),
            )
        return device

    def note_saved(self, name: str, device: int) -> None:
        """Note that there is a directory ``name`` in the root of :meth:`check_mounted`, which returned ``device``."""
        self._device, self._saved = device, {name}

    def newest(self, root: Path) -> Attempt | None:
        """The newest attempt among the checkpoints committed in ``root`` and those of :meth:`note`."""
        self._enter(root)
        try:
            with os.scandir(root) as entries:
                names = [entry.name for entry in entries if local.is_directory(entry)]
        except OSError:  # a directory may be writable, but not readable
            return None
        known, self._known = self._known, {}
        for name in names:
            try:
                status = os.stat(root / name / local.METADATA_NAME)
                found = status.st_ino, status.st_mtime_ns
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:  # it may be a checkpoint, so the next save is newer
                found = None
            self._known[name] = found
            if found is None or known.get(name) != found:
                with contextlib.suppress(OSError):  # other users' directories may not be readable
                    for attempt in attempts.present(root / name)[-1:]:
                        self.note(attempt)
        return self._newest

    def newest_of(self, root: Location, seen: Iterable[Attempt]) -> Attempt | None:
        """As :meth:`newest`, where the caller has ``seen`` the attempts in ``root``."""
        self._enter(root)
        for attempt in seen:
            self.note(attempt)
        return self._newest

    def _enter(self, root: Location) -> None:
        if root != self._root:
            self._root, self._known, self._newest = root, {}, None
            self._device, self._saved = None, set()

    def note(self, attempt: Attempt) -> None:
        """Note that this job has claimed or seen ``attempt`` in the latest ``root`` of :meth:`newest`."""
        if attempt.incarnation >= _ABSURD:
            return
        self._newest = attempt if self._newest is None else max(attempt, self._newest)


def _device_of(path: Path) -> int:
    """The number of the file system that ``path`` is on, or would be."""
    while (status := presence.status_of(path)) is None and path != path.parent:
        path = path.parent
    assert status is not None, "the root of all paths exists"
    return status.st_dev


def claim(directory: Path, neighbours: Neighbours) -> DirectoryClaim:
    """Claim a new attempt at ``directory``, which is made if it is missing: steps 1 and 2 of docs/commit.md.

    The first claim below a root tries what its file system can do (:mod:`self_test`).

    Two jobs that claim at one path at the same time get different attempts, and at least one of them sees the other's:
    so a publisher has seen and withdrawn every older attempt that could still be published.
    """
    device = neighbours.check_mounted(directory.parent)
    local.make_directories(directory)
    self_test.what_works_for(directory)
    with local.explained("claiming a save's directory", directory):
        made = _claim(directory, neighbours)
    neighbours.note(made.attempt)
    neighbours.note_saved(directory.name, device)
    return made


def claim_deletion(directory: Path) -> DirectoryClaim:
    """Claim an attempt that deletes what is committed at ``directory``.

    The same holds as for a save: the deleting process has seen every older attempt that could still be published, and a
    job that publishes a newer one has seen this deletion, and withdraws it first.
    """
    with local.explained("claiming a deletion's directory", directory):
        return _claim(directory, None)


def not_replaced(directory: Location) -> CheckpointExistsError:
    """The error for a save that must not replace the checkpoint there."""
    return CheckpointExistsError(
        f"a committed checkpoint is at {str(directory)!r} and overwrite=False; "
        f"pass overwrite=True to replace it, or another path"
    )


def check_sane(directory: Location, newest: Attempt | None) -> None:
    """Raise :class:`StorageError` if the ``newest`` attempt there has a number that no save exceeds."""
    if newest is not None and newest.incarnation >= _ABSURD:
        raise StorageError(
            None,
            f"the directory {newest.name!r} there has the name of an attempt in the year 2481 or later; no save has "
            f"made it: remove it",
            str(directory),
        )


def _claim(directory: Path, neighbours: Neighbours | None) -> DirectoryClaim:
    for _ in range(_CLAIMS):
        seen = local.signature(directory)
        beside = None if neighbours is None else neighbours.newest(directory.parent)
        there = [*attempts.present(directory), *([] if beside is None else [beside])]
        after = max(there, default=None)
        check_sane(directory, after)
        deletes = neighbours is None
        attempt = next_deletion(after) if deletes else next_attempt(after)
        if not attempts.claim(directory, attempt, deletes=deletes):
            continue  # another job has claimed it
        # If a job commits in between, it removes attempts that no process holds, as leftovers.
        hold = Hold.on(directory / attempt.name)
        if hold is None:
            continue
        if attempts.present(directory)[-1:] == [attempt]:
            return DirectoryClaim(attempt, after, seen, hold)
        hold.release()
        attempts.remove_attempt(directory, attempt)
    raise StorageError(
        None,
        "other jobs keep taking away the directory of this attempt; are several saving to one path?",
        str(directory),
    )
