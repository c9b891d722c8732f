"""The attempts below a checkpoint's prefix in an object store, and which of them is what the path holds.

The newest committed attempt is the checkpoint at a path. So an attempt that is committed late, after a newer one, is
never loaded, and a prefix needs no object that says which attempt counts.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import decisions
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.attempts import rank_of
from dcp_datastates.storage.bounded import step
from dcp_datastates.storage.decisions import DECISION_NAME, LONGEST_MARK, State, StoredDecision
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import StoredObject

__all__ = [
    "Contents",
    "attempts_in",
    "delete_objects",
    "has_data",
    "newest_committed",
    "present",
    "remove_data",
    "survey",
]

_TRIES: Final = 20
"""How often a reader looks again because attempts come and go while it looks."""

_DELETED_AT_ONCE: Final = 1000
"""The most keys that S3 deletes by one request."""


@dataclass
class Contents:
    """The objects below one attempt's prefix."""

    data: list[StoredObject] = field(default_factory=list)
    """The files of ranks."""
    decision: StoredObject | None = None
    others: list[StoredObject] = field(default_factory=list)
    """Markers, and what other programs have put there."""

    @property
    def is_committed(self) -> bool:
        """Whether the decision is to commit the attempt: it is longer than any other."""
        return self.decision is not None and self.decision.nbytes > LONGEST_MARK


def attempts_in(folders: Iterable[str]) -> list[Attempt]:
    """The attempts among the names of folders, oldest first."""
    return sorted(attempt for name in folders if (attempt := Attempt.parse(name)) is not None)


def present(directory: ObjectPath) -> list[Attempt]:
    """The attempts below ``directory``, oldest first: one LIST. Raises :class:`StorageError`."""
    return attempts_in(directory.store.list(directory.key).folders)


def newest_committed(directory: ObjectPath) -> tuple[Attempt, StoredDecision] | None:
    """The checkpoint at ``directory``: the newest attempt there that is committed, and its decision. None if none is.

    One LIST and one GET in the usual case. Raises :class:`StorageError`.
    """
    seen: list[Attempt] | None = None
    for _ in range(_TRIES):
        there = present(directory)
        for attempt in reversed(there):
            decision = decisions.read(directory, attempt)
            if decision is not None and decision.state is State.COMMITTED:
                return attempt, decision
        # A save may have committed a newer attempt, and removed the older one, while this process looked.
        if not there or there == seen:
            return None
        seen = there
    raise StorageError(
        errno.EBUSY,
        "saves there replace one another faster than this process can read what is committed",
        str(directory),
    )


def has_data(directory: ObjectPath, attempt: Attempt) -> bool:
    """Whether a rank's file of the attempt is there. Raises :class:`StorageError`."""
    folder = directory / attempt.name
    return any(rank_of(_name(each)) is not None for each in folder.store.walk(folder.key))


def survey(directory: ObjectPath) -> dict[Attempt, Contents]:
    """All objects of all attempts below ``directory``: one LIST for each 1,000 of them. Raises
    :class:`StorageError`.
    """
    found: dict[Attempt, Contents] = {}
    beginning = f"{directory.key}/" if directory.key else ""
    for each in directory.store.walk(directory.key):
        folder, _, name = each.key.removeprefix(beginning).partition("/")
        attempt = Attempt.parse(folder)
        if attempt is None or not name:
            continue
        contents = found.setdefault(attempt, Contents())
        if name == DECISION_NAME:
            contents.decision = each
        elif rank_of(name) is not None:
            contents.data.append(each)
        else:
            contents.others.append(each)
    return found


def remove_data(directory: ObjectPath, attempt: Attempt, rank: int, world: int) -> None:
    """Delete ``rank``'s files of an attempt that cannot be committed; its decision stays. Each of ``world`` ranks
    deletes the files whose rank number equals its own modulo ``world``. Raises :class:`StorageError`.
    """
    folder = directory / attempt.name
    mine = [
        each
        for each in folder.store.walk(folder.key)
        if (owner := rank_of(_name(each))) is not None and owner % world == rank
    ]
    delete_objects(directory, mine)


def delete_objects(directory: ObjectPath, objects: Iterable[StoredObject]) -> None:
    """Delete objects of the store of ``directory``, 1,000 by a request. Raises :class:`StorageError`."""
    keys = iter([each.key for each in objects])
    for batch in _batches(keys):
        step()
        directory.store.delete(batch)


def _batches(keys: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(keys, _DELETED_AT_ONCE)):
        yield batch


def _name(entry: StoredObject) -> str:
    return entry.key.rpartition("/")[2]
