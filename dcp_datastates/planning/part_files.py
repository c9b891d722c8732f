"""The files of one rank's part of a checkpoint, laid out.

If a part is written again and again, its layout is kept (:class:`KnownFiles`), with each tensor's position in the
state: then a save only looks up the tensors' present addresses, in a few operations on arrays. Of plans and files,
those that were used last are kept (:class:`Recent`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates._native import Transfer
from dcp_datastates.format.layout import FileLayout, LayoutItem, SealedFile, lay_out
from dcp_datastates.format.ragged import Ints
from dcp_datastates.planning.messages import Report

KEPT: Final = 8
"""How many values are kept: a job may save several state dicts in turn, each with plans of its own."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """The :data:`KEPT` values that were used last, by key. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[_Key, _Value] = {}  # the latest used at the end

    def get(self, key: _Key) -> _Value | None:
        """The value of ``key``, which counts as used."""
        with self._lock:
            value = self._values.get(key)
            # Most often it is the latest already: then the key, which may be large, is not hashed again.
            if value is not None and value is not next(reversed(self._values.values())):
                self._values[key] = self._values.pop(key)
            return value

    def put(self, key: _Key, value: _Value) -> None:
        """Keep ``value``, in place of the one with this key or of the one that was used the longest ago."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > KEPT:
                del self._values[next(iter(self._values))]


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
