"""The attempts at a checkpoint's path, in a directory or an object store, and which of them is what the path holds.

The newest committed attempt is the checkpoint at a path. So an attempt that is committed late, after a newer one, is
never loaded, and a path needs no object that says which attempt counts.

A directory of checkpoints in an object store has an index of the attempts that were about to be committed there. An
entry is an empty object, ``<root>/.attempts/<inverted attempt>.<name of the checkpoint>``. Stores list keys in order,
and the inverted number sorts the newest attempt first: a new save learns from one LIST which number is greater than all
others, and ``latest`` where to look. An entry is written before its attempt is committed, so every committed attempt
has one; an attempt with an entry need not be committed. A file system needs no index: its directories are listed.

What asks storage raises :class:`StorageError`.
"""

from __future__ import annotations

import errno
import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import decisions, local_store
from dcp_datastates.storage.attempt import Attempt, is_far_ahead
from dcp_datastates.storage.decisions import DECISION_NAME, LONGEST_MARK, State
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.local import METADATA_NAME
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.object_store import ObjectMissingError, StoredObject

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DATA_FILE: Final = re.compile(r"r(\d{5,})-\d+\.safetensors")
"""``format/layout.py`` makes these names."""

_OURS: Final = b"DCPDST"
_END: Final = 24
"""Every ``.metadata`` of this package has this mark in so many of its last bytes (``format/metadata.py``)."""

DELETING: Final = "deleting"
"""An object in the attempt's folder while it is being deleted."""

_TRIES: Final = 20
"""How often a reader looks again because attempts come and go while it looks."""


@dataclass
class Contents:
    """The objects below one attempt's prefix."""

    data: list[StoredObject] = field(default_factory=list)
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


def present(directory: Location) -> list[Attempt]:
    """The attempts below ``directory``, oldest first: one LIST."""
    place = stored(directory)
    folders = place.store.list(place.key).folders
    for name in filter(is_far_ahead, folders):
        _say_ignored(str(place / name))
    return attempts_in(folders)


@functools.lru_cache(maxsize=1000)  # once for each
def _say_ignored(path: str) -> None:
    logger.warning(
        "%s is ignored: its name says a time that is 50 years ahead of this machine's clock. Remove it; if the clock "
        "is wrong, set it",
        path,
    )


def newest_committed(directory: Location) -> tuple[Attempt, bytes] | None:
    """The checkpoint at ``directory``: the newest attempt there that is committed, and its metadata. None if none is.

    One LIST and one GET in the usual case.
    """
    return _newest(directory, lambda attempt: decisions.committed_metadata(directory, attempt))


def committed_attempt(directory: Location) -> Attempt | None:
    """As :func:`newest_committed`, without the metadata, which may be large: reads some bytes of the decision."""
    found = _newest(
        directory, lambda attempt: decisions.state_of(directory, attempt) is State.COMMITTED or None
    )
    return None if found is None else found[0]


def _newest(directory: Location, look: Callable[[Attempt], T | None]) -> tuple[Attempt, T] | None:
    seen: list[Attempt] | None = None
    for _ in range(_TRIES):
        there = present(directory)
        for attempt in reversed(there):
            if (found := look(attempt)) is not None:
                return attempt, found
        # A save may have committed a newer attempt, and removed the older one, while this process looked.
        if not there or there == seen:
            return None
        seen = there
    raise StorageError(
        errno.EBUSY,
        "saves there replace one another faster than this process can read what is committed",
        str(directory),
    )


def is_taken(directory: Location) -> bool:
    """Whether a checkpoint is at ``directory``, of this package or, in a file system, another program's."""
    if committed_attempt(directory) is not None:
        return True
    return stored(directory).is_local and has_foreign_metadata(directory)


def has_foreign_metadata(directory: Location) -> bool:
    """Whether there are ``.metadata`` of another program, such as stock DCP. This package's copy says nothing."""
    path = stored(directory) / METADATA_NAME
    try:
        nbytes = path.store.size(path.key)
        return _OURS not in bytes(path.store.get_range(path.key, max(0, nbytes - _END), nbytes))
    except ObjectMissingError:
        return False


def rank_of(path: str) -> int | None:
    """The rank that writes the data file at this path, or with this name; None if it is no data file's."""
    match = _DATA_FILE.fullmatch(path.rpartition("/")[2])
    return int(match[1]) if match else None


def has_data(directory: Location, attempt: Attempt) -> bool:
    """Whether a rank's file of the attempt is there."""
    return any(each.data for each in survey(directory, [attempt]).values())


def survey(directory: Location, among: Iterable[Attempt] | None = None) -> dict[Attempt, Contents]:
    """The objects of the attempts ``among`` (None: of all that are) at ``directory``: one LIST for each of them."""
    found: dict[Attempt, Contents] = {}
    for attempt in present(directory) if among is None else among:
        folder, contents = stored(directory) / attempt.name, Contents()
        for each in folder.store.list(folder.key).objects:
            if each.name == DECISION_NAME:
                contents.decision = each
            elif rank_of(each.name) is not None:
                contents.data.append(each)
            else:
                contents.others.append(each)
        if folder.is_local or contents != Contents():  # a store has no folders
            found[attempt] = contents
    return found


def remove_data(directory: ObjectPath, attempt: Attempt, rank: int, world: int) -> None:
    """Delete ``rank``'s files of an attempt that cannot be committed; its decision stays. Each of ``world`` ranks
    deletes the files whose rank number equals its own modulo ``world``.
    """
    data = (each for found in survey(directory, [attempt]).values() for each in found.data)
    mine = [each.key for each in data if (rank_of(each.name) or 0) % world == rank]
    directory.store.delete(mine)
    remove_folder(directory, attempt, decided=False)


def remove(
    directory: ObjectPath,
    there: Mapping[Attempt, Contents],
    states: Mapping[Attempt, State | None],
    beside: Sequence[str] = (),
) -> bool:
    """Remove attempts, by what is decided about them, then the keys ``beside``, but nothing of other programs. After
    each step, an attempt is committed and whole, or deleted. Returns whether nothing of them stays.

    In a store, withdrawals stay for good: they keep their attempts from being committed by a process that wakes late.
    """
    store = directory.store
    for attempt in sorted(there):  # the newest last: until then, no older one takes its place
        if states[attempt] is State.COMMITTED:
            decisions.mark_deleted(directory, attempt)
    store.delete([*beside, *(each.key for found in there.values() for each in found.data)])
    forget(directory, there)
    decided = [each for each in there if states[each] in (State.COMMITTED, State.DELETED)]
    rest = [each for contents in there.values() for each in contents.others]
    keys = [each.key for each in rest if each.name == DELETING]
    if not directory.is_local:  # there, a decision goes with its folder
        keys += [decisions.decision_path(directory, attempt).key for attempt in decided]
    store.delete(keys)
    for attempt in there:
        remove_folder(directory, attempt, attempt in decided)
    return len(decided) == len(there)


def remove_folder(directory: ObjectPath, attempt: Attempt, decided: bool) -> None:
    """Remove the folder of an attempt that cannot be committed, and has no data left: a store has none. Where a folder
    cannot go in one step with the decision in it, it goes in two if that is ``decided``, and stays if not.
    """
    if not directory.is_local:
        return
    folder = directory / attempt.name
    names = folder.store.list(folder.key).names
    # In one step: no process may decide anew between the decision's removal and the folder's.
    if names == [DECISION_NAME] and not local_store.discard_folder(folder.key):
        if decided:
            folder.store.delete([(folder / DECISION_NAME).key])
            local_store.remove_folder(folder.key)
    elif not names:
        local_store.remove_folder(folder.key)


# ---- the index of a directory of checkpoints in an object store -----------------------------------

INDEX_NAME: Final = ".attempts"

_LARGEST: Final = (1 << 64) - 1

_ENTRY: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.(.*)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One attempt at one of the checkpoints below a root."""

    attempt: Attempt
    name: str
    """Of the checkpoint: the last part of its path."""

    @property
    def key(self) -> str:
        """The name of the object, below the index."""
        incarnation = _LARGEST - self.attempt.incarnation
        return f"{incarnation:016x}-{_LARGEST - self.attempt.sequence:016x}.{self.name}"

    @staticmethod
    def parse(key: str) -> Entry | None:
        """The entry with this name below the index; None if it is none."""
        match = _ENTRY.fullmatch(key)
        if match is None:
            return None
        numbers = (_LARGEST - int(match[1], 16), _LARGEST - int(match[2], 16))
        attempt = Attempt.parse(Attempt(*numbers).name)  # None for one that is far ahead
        return None if attempt is None else Entry(attempt, match[3])


def entries(root: ObjectPath) -> list[Entry]:
    """The entries of the checkpoints below ``root``, the newest first: one LIST for each 1,000."""
    index = root / INDEX_NAME
    listed = index.store.list(index.key).objects
    found = (Entry.parse(each.name) for each in listed)
    return sorted(filter(None, found), key=lambda entry: entry.attempt, reverse=True)


def register(directory: ObjectPath, attempt: Attempt) -> None:
    """Make the entry of an attempt at ``directory`` that is about to be committed. Idempotent."""
    if directory.is_local:
        return
    path = directory.parent / INDEX_NAME / Entry(attempt, directory.name).key
    hit("publish.register.before")
    path.store.put(path.key, b"")
    hit("publish.register.after")


def forget(directory: ObjectPath, there: Iterable[Attempt]) -> None:
    """Remove the entries of the attempts ``there`` at ``directory``. Idempotent."""
    index = directory.parent / INDEX_NAME
    keys = [(index / Entry(attempt, directory.name).key).key for attempt in there]
    if keys and not directory.is_local:
        index.store.delete(keys)
