"""Claims an attempt in an object store, without writing there: its number is newer than every commit that its job could
have seen.

The number is this process's own, so no two processes claim the same. A claim by another process at the same time need
not see this one: each may commit, and the newer one is what the path holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_datastates.storage import store_attempts, store_index
from dcp_datastates.storage.attempt import Attempt, next_attempt
from dcp_datastates.storage.claims import Claim, Neighbours, check_sane, not_replaced
from dcp_datastates.storage.object_path import ObjectPath

__all__ = ["StoreClaim", "check_absent", "claim"]


@dataclass(frozen=True)
class StoreClaim(Claim):
    """A claimed attempt in an object store.

    Attributes:
        older: the attempts that were at the path at the claim, oldest first.
        alone: whether there was no sign of another save to the path: no entry of the index.
    """

    older: tuple[Attempt, ...]
    alone: bool


def claim(directory: ObjectPath, neighbours: Neighbours, overwrite: bool) -> StoreClaim:
    """Claim a new attempt at ``directory``: steps 1 and 2 of docs/commit.md for stores. One LIST if no save to the path
    is known, else two.

    Raises :class:`CheckpointExistsError` if a checkpoint is there and ``overwrite`` is False; :class:`StorageError`.
    """
    entries = store_index.entries(directory.parent)
    beside = neighbours.newest_of(directory.parent, (entry.attempt for entry in entries))
    alone = all(entry.name != directory.name for entry in entries)
    if not overwrite:
        check_absent(directory)
    there = [] if alone and overwrite else store_attempts.present(directory)
    after = max([*there, *([] if beside is None else [beside])], default=None)
    check_sane(directory, after)
    attempt = next_attempt(after)
    neighbours.note(attempt)
    return StoreClaim(attempt, after, tuple(there), alone)


def check_absent(directory: ObjectPath) -> None:
    """Raise :class:`CheckpointExistsError` if a checkpoint is committed at ``directory``."""
    if store_attempts.newest_committed(directory) is not None:
        raise not_replaced(directory)
