"""A rank's share, prepared to be written again: the files are laid out, and each tensor's position in the state is
known.

Each save then only looks up the tensors' present addresses, in a few operations on arrays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dcp_datastates._native import SaveFile, Transfer
from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.format.layout import FileLayout, LayoutItem, SealedFile, lay_out_items
from dcp_datastates.planning.exchange import Report
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.storage.object_path import Location

__all__ = ["Prepared", "finish_file", "report_of"]

_KEPT_SEALS: Final = 4

_Sealed = tuple[list[SealedFile], Report]


@dataclass(frozen=True, eq=False)
class _Columns:
    """The tensors of one file, without empty ones."""

    leaves: Ints
    """Positions in the state."""
    within: Ints
    """The chunk's offset in its tensor's memory, in bytes."""
    offsets: list[int]
    sizes: list[int]


class Prepared:
    """The prepared files of one share. Any thread may use it.

    Args:
        items: the share's.
        rank: the rank that writes them.
        leaves: position in the state of each item's tensor; -1 for an object.
        begins: the first row of each item within its tensor.
    """

    def __init__(
        self, items: Sequence[LayoutItem], rank: int, leaves: Ints, begins: Sequence[int]
    ) -> None:
        self.layouts: Final = lay_out_items(items, rank)
        self._objects = [
            [items[entry.item].fqn for entry in layout.objects] for layout in self.layouts
        ]
        self._columns = [_columns(layout, leaves, begins) for layout in self.layouts]
        self._count = len(items)
        self._lock = threading.RLock()  # guards _sealed
        self._sealed: OrderedDict[tuple[tuple[int, ...], ...], _Sealed] = OrderedDict()

    def files(
        self,
        paths: Sequence[Location],
        addresses: Ints,
        groups: Ints,
        devices: Ints | None,
        resolve: Callable[[str], memoryview],
        keep: list[Any],
    ) -> tuple[list[SaveFile], list[SealedFile], Report]:
        """The files to write, and their report, for a state whose tensors are at these ``addresses``.

        ``devices`` as in ``StagedState.bases``. ``resolve`` serializes the object of a name. What must stay alive is
        added to ``keep``, except the tensors.
        """
        objects = [list(map(resolve, names)) for names in self._objects]
        sealed, report = self._seal(tuple(tuple(map(len, each)) for each in objects))
        files = []
        for path, file, columns, data in zip(paths, sealed, self._columns, objects, strict=True):
            content = Transfer()
            content.add_buffer(0, file.header, STABLE)
            sources = addresses[columns.leaves] + columns.within
            content.add_many(
                columns.offsets,
                columns.sizes,
                sources.tolist(),
                groups[columns.leaves].tolist(),
                None if devices is None else devices[columns.leaves].tolist(),
            )
            files.append(finish_file(path, file, content, data, keep))
        return files, sealed, report

    def _seal(self, sizes: tuple[tuple[int, ...], ...]) -> _Sealed:
        with self._lock:
            sealed = self._sealed.get(sizes)
        if sealed is None:
            files = [layout.seal(each) for layout, each in zip(self.layouts, sizes, strict=True)]
            sealed = (files, report_of(self.layouts, files, self._count))
            with self._lock:
                self._sealed[sizes] = sealed
                while len(self._sealed) > _KEPT_SEALS:
                    self._sealed.popitem(last=False)
        return sealed


def finish_file(
    path: Location,
    sealed: SealedFile,
    content: Transfer,
    objects: Sequence[memoryview],
    keep: list[Any],
) -> SaveFile:
    """The file at ``path``: the header and the tensors are in ``content``, the ``objects`` follow them.

    What must stay alive goes to ``keep``, but for the tensors.
    """
    for offset, data in zip(sealed.object_offsets, objects, strict=True):
        if len(data):
            content.add_buffer(offset, data, STABLE)
    keep.append((sealed.header, objects))
    return SaveFile(str(path), sealed.table_offset, content)


def _columns(layout: FileLayout, leaves: Ints, begins: Sequence[int]) -> _Columns:
    entries = [entry for entry in layout.tensors if entry.nbytes]
    rows = [entry.nbytes // entry.sizes[0] if entry.sizes else 0 for entry in entries]
    return _Columns(
        leaves[np.array([entry.item for entry in entries], np.int64)],
        np.array(
            [begins[entry.item] * row for entry, row in zip(entries, rows, strict=True)], np.int64
        ),
        [entry.offset for entry in entries],
        [entry.nbytes for entry in entries],
    )


def report_of(
    layouts: Sequence[FileLayout],
    sealed: Sequence[SealedFile],
    count: int,
) -> Report:
    """The report of the places of ``count`` items, once all sizes are known."""
    numbers, offsets, lengths = (np.zeros(count, np.int64) for _ in range(3))
    files = []
    for number, (layout, file) in enumerate(zip(layouts, sealed, strict=True)):
        files.append((layout.name, file.nbytes, file.table_offset))
        for entry in layout.tensors:
            numbers[entry.item], offsets[entry.item] = number, entry.offset
            lengths[entry.item] = entry.nbytes
        for element, offset, size in zip(
            layout.objects, file.object_offsets, file.object_sizes, strict=True
        ):
            numbers[element.item], offsets[element.item], lengths[element.item] = (
                number,
                offset,
                size,
            )
    return Report(tuple(files), numbers, offsets, lengths)
