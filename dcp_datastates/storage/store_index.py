"""The index of a directory of checkpoints in an object store: which attempts were about to be committed there.

An entry is an empty object, ``<root>/.attempts/<inverted attempt>.<name of the checkpoint>``. Stores list keys in
order, and the inverted number sorts the newest attempt first: a new save learns from one LIST which number is greater
than all others, and ``latest`` where to look. An entry is written before its attempt is committed, so every committed
attempt has one; an attempt with an entry need not be committed. A directory on a file system needs no index: it is
listed itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import ObjectPath

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
    """The entries of the checkpoints below ``root``, the newest first: one LIST for each 1,000. Raises
    :class:`StorageError`.
    """
    index = root / INDEX_NAME
    listed = index.store.list(index.key).objects
    found = (Entry.parse(each.name) for each in listed)
    return sorted(filter(None, found), key=lambda entry: entry.attempt, reverse=True)


def register(directory: ObjectPath, attempt: Attempt) -> None:
    """Make the entry of an attempt at ``directory`` that is about to be committed. Idempotent; raises
    :class:`StorageError`.
    """
    if directory.is_local:
        return
    path = directory.parent / INDEX_NAME / Entry(attempt, directory.name).key
    hit("publish.register.before")
    path.store.put(path.key, b"")
    hit("publish.register.after")


def forget(directory: ObjectPath, attempts: Iterable[Attempt]) -> None:
    """Remove the entries of ``attempts`` at ``directory``. Idempotent; raises :class:`StorageError`."""
    index = directory.parent / INDEX_NAME
    keys = [(index / Entry(attempt, directory.name).key).key for attempt in attempts]
    if keys and not directory.is_local:
        index.store.delete(keys)
