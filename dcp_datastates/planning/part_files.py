"""The files of one rank's part of a checkpoint, laid out.

If a part is written again and again, its layout is kept (:class:`KnownFiles`), with each tensor's position in the
state: then a save only looks up the tensors' present addresses, in a few operations on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates._native import Transfer
from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.format.layout import FileLayout, LayoutItem, SealedFile, lay_out
from dcp_datastates.planning.exchange import Report
from dcp_datastates.planning.recent import Recent

__all__ = ["KnownFiles", "PartFiles", "report_of"]

Sealed = tuple[list[SealedFile], Report]
"""The files with all sizes known, and the places of all items in them."""


class PartFiles:
    """The files of the ``items`` that ``rank`` writes. Any thread may use it."""

    def __init__(self, items: Sequence[LayoutItem], rank: int) -> None:
        self.layouts: Final = lay_out(items, rank)
        self._count = len(items)
        self._sealed: Recent[tuple[tuple[int, ...], ...], Sealed] = Recent()

    def seal(self, object_sizes: tuple[tuple[int, ...], ...]) -> Sealed:
        """The files whose objects have these sizes in bytes: by file, in the order of the layout."""
        sealed = self._sealed.get(object_sizes)
        if sealed is None:
            pairs = zip(self.layouts, object_sizes, strict=True)
            files = [layout.seal(sizes) for layout, sizes in pairs]
            sealed = files, report_of(self.layouts, files, self._count)
            self._sealed.put(object_sizes, sealed)
        return sealed


@dataclass(frozen=True, eq=False)
class _Columns:
    """The tensors of one file, without empty ones."""

    positions: Ints
    """In the state."""
    within: Ints
    """The chunk's offset in its tensor's memory, in bytes."""
    offsets: list[int]
    sizes: list[int]


class KnownFiles(PartFiles):
    """The files of a part whose tensors are known by their positions in the state.

    Args:
        items: the part's.
        rank: the rank that writes them.
        positions: position in the state of each item's tensor; -1 for an object.
        begins: the first row of each item within its tensor.
    """

    def __init__(
        self, items: Sequence[LayoutItem], rank: int, positions: Ints, begins: Sequence[int]
    ) -> None:
        super().__init__(items, rank)
        self._names = [item.fqn for item in items]
        self._columns = [_columns(layout, positions, begins) for layout in self.layouts]

    def object_item(self, number: int) -> WriteItem:
        """The item with this number, which is an object."""
        return WriteItem(MetadataIndex(self._names[number]), WriteItemType.BYTE_IO)

    def add_tensors(
        self, addresses: Ints, groups: Ints, devices: Ints | None, content: Transfer, file: int
    ) -> None:
        """Add to ``content`` the tensors of a file, of a state whose tensors are there: as of ``StagedState.bases``."""
        columns = self._columns[file]
        content.add_many(
            columns.offsets,
            columns.sizes,
            (addresses[columns.positions] + columns.within).tolist(),
            groups[columns.positions].tolist(),
            None if devices is None else devices[columns.positions].tolist(),
        )


def _columns(layout: FileLayout, positions: Ints, begins: Sequence[int]) -> _Columns:
    entries = [entry for entry in layout.tensors if entry.nbytes]
    row_bytes = [entry.nbytes // entry.sizes[0] if entry.sizes else 0 for entry in entries]
    within = [begins[entry.item] * row for entry, row in zip(entries, row_bytes, strict=True)]
    return _Columns(
        positions[np.array([entry.item for entry in entries], np.int64)],
        np.array(within, np.int64),
        [entry.offset for entry in entries],
        [entry.nbytes for entry in entries],
    )


def report_of(layouts: Sequence[FileLayout], sealed: Sequence[SealedFile], count: int) -> Report:
    """The report of the places of ``count`` items."""
    places = np.zeros((3, count), np.int64)
    for number, (layout, file) in enumerate(zip(layouts, sealed, strict=True)):
        tensors = [entry.item for entry in layout.tensors]
        objects = [entry.item for entry in layout.objects]
        places[0, tensors + objects] = number
        places[1, tensors] = [entry.offset for entry in layout.tensors]
        places[2, tensors] = [entry.nbytes for entry in layout.tensors]
        places[1, objects], places[2, objects] = file.object_offsets, file.object_sizes
    pairs = zip(layouts, sealed, strict=True)
    files = tuple([(layout.name, file.nbytes, file.table_offset) for layout, file in pairs])
    return Report(files, *places)
