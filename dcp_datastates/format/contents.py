"""Damages, and the tensors that they concern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.format.ragged import Ints

_SHOWN: Final = 3


@dataclass(frozen=True)
class Damage:
    """One damaged place of a checkpoint."""

    file: str
    """Path of the file, relative to the checkpoint: a data file, or ``.metadata``."""
    offset: int | None
    """The start of the damage in the file, in bytes; None if it has no particular place."""
    nbytes: int | None
    """The length of the damage in bytes; None as for ``offset``, or if it is unknown."""
    problem: str
    tensors: tuple[str, ...]
    """Names (FQNs) of the tensors and objects that cannot be loaded, or not be trusted, because of the damage."""

    def __str__(self) -> str:
        """One line: the file, the place in it, the problem and the affected names."""
        where = self.file
        if self.offset is not None:
            where += f" at byte {self.offset}"
            if self.nbytes is not None:
                where += f" ({self.nbytes} bytes)"
        line = f"{where}: {self.problem}"
        return f"{line}; concerns {some_of(self.tensors)}" if self.tensors else line


class Contents:
    """An index from places in the data files to saved names. Rows are those of the placement."""

    def __init__(self, table: MetadataTable) -> None:
        self._names = [table.catalog.names[owner] for owner in table.catalog.owners().tolist()]
        places = table.placement
        self._number = {path: number for number, path in enumerate(places.paths)}
        self._offsets, self._lengths = places.begins, places.lengths
        self._order = np.argsort(places.files, kind="stable")
        self._ends = np.searchsorted(places.files[self._order], np.arange(len(places.paths) + 1))

    def rows(self, relative_path: str) -> Ints:
        """The rows with bytes in the file."""
        number = self._number.get(relative_path)
        if number is None:
            return self._order[:0]
        return self._order[self._ends[number] : self._ends[number + 1]]

    def begin(self, relative_path: str) -> int | None:
        """The offset of the file's first row; None if it has no rows."""
        return min(self._offsets[self.rows(relative_path)].tolist(), default=None)

    def all_names(self, relative_path: str) -> tuple[str, ...]:
        """The names of all tensors and objects in the file, also empty tensors."""
        return self._unique(self.rows(relative_path))

    def names(self, relative_path: str, start: int, end: int) -> tuple[str, ...]:
        """The names with bytes in ``[start, end)`` of the file, in the order of their bytes."""
        rows = self.rows(relative_path)
        begins, lengths = self._offsets[rows], self._lengths[rows]
        hit = rows[(lengths > 0) & (begins < end) & (begins + lengths > start)]
        return self._unique(hit[np.argsort(self._offsets[hit], kind="stable")])

    def _unique(self, rows: Ints) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._names[row] for row in rows.tolist()))


def some_of(names: Sequence[str]) -> str:
    """``'a', 'b', 'c' and 7 more``."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(map(repr, names[:_SHOWN]))}{more}"
