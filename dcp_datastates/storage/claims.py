"""Claims an attempt: unique at its path, and newer than every commit that its job could have seen.

Attempts order checkpoints (``latest``, ``retain``), and must not depend on clocks: a new attempt's number is greater
than those of all attempts at its path, and of all checkpoints beside it, in the path's parent. The number is this
process's own, so no two processes claim the same. A claim by another process at the same time need not see this one:
each may commit, and the newer one is what the path holds.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcp_datastates.errors import CheckpointExistsError, StorageError
from dcp_datastates.storage import attempts, local, presence
from dcp_datastates.storage.attempt import Attempt, next_attempt
from dcp_datastates.storage.local_store import make_folder
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.self_test import what_works_for

_CLAIMS: Final = 100
"""How many numbers are tried: if a server's reply is lost, a directory just made looks like another process's."""


@dataclass(frozen=True)
class Claim:
    """A claimed attempt.

    Attributes:
        after: the newest attempt at the path or beside it before the claim; None if there was none, or the parent
            directory cannot be listed.
        older: the attempts that were at the path at the claim, oldest first.
        alone: whether a store's index has no sign of another save to the path. A directory's claim cannot tell.
    """

    attempt: Attempt
    after: Attempt | None
    older: tuple[Attempt, ...] = ()
    alone: bool = False


class Neighbours:
    """The checkpoints beside those that a job saves. Each directory is read only if it is new there, or was changed.

    One thread at a time uses it.
    """

    def __init__(self) -> None:
        self._root: ObjectPath | None = None
        # Only entries that exist now, so that it does not grow with the job.
        self._known: dict[str, tuple[int, int] | None] = {}
        self.newest: Attempt | None = None
        """The newest attempt that was seen by :meth:`look`, and those of :meth:`note`."""
        self._home: tuple[int, str] | None = None
        """The number of the file system of the latest :meth:`note_saved`, and the name there."""

    def check_mounted(self, root: ObjectPath) -> int:
        """A checkpoint is about to be saved in the directory ``root``: returns the number of the file system there.
        Raises :class:`StorageError` if that of the latest :meth:`note_saved` is no longer mounted: the checkpoint would
        lie below the mount point, on another one.

        A file system that was unmounted and mounted again may have another number; what lies there tells it.
        """
        self._enter(root)
        device = _device_of(Path(str(root)))
        if self._home is not None and self._home[0] != device:
            before = {*self._known, self._home[1]}
            if before.isdisjoint(presence.names_in(str(root))):
                raise StorageError(
                    errno.ENODEV,
                    f"the file system that was mounted at or above {str(root)!r} at the save before is gone, with "
                    f"{min(before)!r} on it: mount it again, or begin a new job with another root",
                    str(root),
                )
        return device

    def note_saved(self, name: str, device: int) -> None:
        """Note that there is a directory ``name`` in the root of :meth:`check_mounted`, which returned ``device``."""
        self._home = device, name

    def look(self, root: ObjectPath) -> set[str] | None:
        """Look for the checkpoints in ``root``, for :attr:`newest`. Raises :class:`StorageError` for an object store,
        which has an index of them: returns the names of those that are there or may come to be there soon.
        """
        self._enter(root)
        if not root.is_local:
            entries = attempts.entries(root)
            for entry in entries:
                self.note(entry.attempt)
            return {entry.name for entry in entries}
        try:
            with os.scandir(str(root)) as there:
                names = [entry.name for entry in there if local.is_directory(entry)]
        except OSError:  # a directory may be writable, but not readable
            return None
        known, self._known = self._known, {}
        for name in names:
            try:
                status = os.stat(str(root / name))
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
        return None

    def _enter(self, root: ObjectPath) -> None:
        if root != self._root:
            self._root, self._known, self.newest, self._home = root, {}, None, None

    def note(self, attempt: Attempt) -> None:
        """Note that this job has claimed or seen ``attempt`` in the latest root."""
        self.newest = attempt if self.newest is None else max(attempt, self.newest)


def _device_of(path: Path) -> int:
    while (status := presence.status_of(path)) is None and path != path.parent:
        path = path.parent
    assert status is not None, "the root of all paths exists"
    return status.st_dev


def claim(location: Location, neighbours: Neighbours, overwrite: bool) -> Claim:
    """Claim a new attempt at ``location``: steps 1 and 2 of docs/design/commit.md. In an object store, this is one
    LIST if no save to the path is known, else two, and nothing is written. In a file system, the attempt's directory is
    made. The first claim in a root tries what storage can do, now that nothing waits for it.

    Raises :class:`CheckpointExistsError` if a checkpoint is there and ``overwrite`` is False; :class:`StorageError`.
    """
    directory, device = stored(location), 0
    if directory.is_local:
        device = neighbours.check_mounted(directory.parent)
        local.make_directories(Path(str(directory)))
    what_works_for(directory)
    for _ in range(_CLAIMS):
        beside = neighbours.look(directory.parent)
        alone = beside is not None and directory.name not in beside
        if not overwrite:
            check_absent(directory)
        there = [] if alone and overwrite else attempts.present(directory)
        after = max([*there, *filter(None, [neighbours.newest])], default=None)
        attempt = next_attempt(after)
        neighbours.note(attempt)
        if directory.is_local:
            if not make_folder((directory / attempt.name).key, "plan"):
                continue
            neighbours.note_saved(directory.name, device)
        return Claim(attempt, after, tuple(there), alone)
    raise StorageError(
        errno.EEXIST,
        f"the directories of {_CLAIMS} new attempts exist already; is this a file system?",
        str(directory),
    )


def check_absent(directory: Location) -> None:
    """Raise :class:`CheckpointExistsError` if a checkpoint is at ``directory``."""
    if attempts.is_taken(directory):
        raise CheckpointExistsError(
            f"a committed checkpoint is at {str(directory)!r} and overwrite=False; "
            f"pass overwrite=True to replace it, or another path"
        )
