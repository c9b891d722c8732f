"""Which copy of each data file a load reads, if the checkpoint lies in several places."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from dcp_datastates.errors import DataStatesError
from dcp_datastates.storage.object_path import Location

__all__ = ["NearestCopies"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NearestCopies:
    """For each data file, the nearest place whose copy has not failed so far. One thread uses it.

    Args:
        places: of the checkpoint, the nearest first. All have the same attempt, or lack its files.
    """

    def __init__(self, places: Sequence[Location]) -> None:
        self._places: Final = tuple(places)
        self._used: dict[str, int] = {}  # the index of the place, if it is not the first
        self._first_errors: dict[str, DataStatesError] = {}

    def by_place(
        self, items: Iterable[T], file_of: Callable[[T], str]
    ) -> list[tuple[Location, list[T]]]:
        """``items`` by the place that their files are read from; ``file_of`` gives the file's relative path."""
        found: dict[int, list[T]] = {}
        for item in items:
            found.setdefault(self._used.get(file_of(item), 0), []).append(item)
        return [(self._places[index], group) for index, group in sorted(found.items())]

    def leave(self, files: Iterable[str], error: DataStatesError) -> None:
        """Read ``files`` from their next places from now on, because of ``error``. If a file has no other, raises the
        error of its nearest copy.
        """
        for file in files:
            following = self._used.get(file, 0) + 1
            first = self._first_errors.setdefault(file, error)
            if following == len(self._places):
                raise first
            self._used[file] = following
            logger.warning("%s; reading the copy in %s", error, self._places[following])
