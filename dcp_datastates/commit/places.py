"""Where a save is committed: a directory, or a prefix in an object store. What the commit needs of either.

Only this module distinguishes the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from dcp_datastates.commit import publish
from dcp_datastates.commit.round import Document, Round
from dcp_datastates.commit.store_place import StorePlace
from dcp_datastates.storage import claims
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim, Neighbours
from dcp_datastates.storage.object_path import Location, ObjectPath

__all__ = ["Place", "place_of"]


class Place(Protocol):
    """A checkpoint's path. The rounds are of saves to it. All methods but the last three raise
    :class:`StorageError` if storage fails.
    """

    def check_overwrite(self, overwrite: bool) -> None:
        """Raise :class:`CheckpointExistsError` if a checkpoint is there and ``overwrite`` is False."""

    def claim(self, neighbours: Neighbours, overwrite: bool) -> Claim:
        """Coordinator: claim a new attempt. May raise as :meth:`check_overwrite` does."""

    def publish(self, round_: Round, document: Document, waiting: Callable[[], None]) -> None:
        """Coordinator: commit the round's attempt, with the bytes that ``document`` makes. Calls ``waiting`` now and
        then while it waits for another process.

        Raises :class:`CommitOutcomeUnknown`, or another :class:`DataStatesError`: then the attempt is not committed,
        and cannot be any more.
        """

    def settle(self, attempt: Attempt) -> bool | None:
        """Any rank that has voted: whether the attempt is committed. If not, it can no longer be. None if that can no
        longer be known.
        """

    def find_older(self, round_: Round) -> list[Attempt]:
        """The older attempts that this rank may remove if the round commits. Before it votes. Never raises."""

    def tidy_after_commit(
        self, round_: Round, superseded: Sequence[Attempt], rank: int, world: int
    ) -> None:
        """Remove ``rank``'s share of the attempts that :meth:`find_older` found. Never raises."""

    def tidy_after_failure(self, round_: Round, rank: int, world: int) -> None:
        """Remove ``rank``'s files of the round's own attempt. Never raises."""

    def warn_if_replaced(self) -> None:
        """Warn, once, if another process has replaced the checkpoint that this process last committed there. Never
        raises.
        """


def place_of(location: Location) -> Place:
    """The place at ``location``. Asks no storage."""
    return StorePlace(location) if isinstance(location, ObjectPath) else _Directory(location)


class _Directory:
    """A place in a file system, by :mod:`publish`."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory

    def check_overwrite(self, overwrite: bool) -> None:
        publish.check_overwrite(self._directory, overwrite)

    def claim(self, neighbours: Neighbours, overwrite: bool) -> Claim:
        return claims.claim(self._directory, neighbours)

    def publish(self, round_: Round, document: Document, waiting: Callable[[], None]) -> None:
        publish.publish(round_, document, waiting)

    def settle(self, attempt: Attempt) -> bool | None:
        return publish.settle(self._directory, attempt)

    def find_older(self, round_: Round) -> list[Attempt]:
        return publish.find_older(round_)

    def tidy_after_commit(
        self, round_: Round, superseded: Sequence[Attempt], rank: int, world: int
    ) -> None:
        publish.tidy_after_commit(round_, superseded, rank, world)

    def tidy_after_failure(self, round_: Round, rank: int, world: int) -> None:
        publish.tidy_after_failure(round_, rank, world)

    def warn_if_replaced(self) -> None:
        publish.warn_if_replaced(self._directory)
