"""One rank's local plan in columns: the contents of its ``WriteItem`` objects, in a few arrays.

It has two parts. The head is usually the same on many ranks: names, paths, kinds, dtypes and global shapes. The rest is
the places of this rank's chunks. The coordinator decodes each distinct head once, and the plans share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_datastates.format.fields import carried
from dcp_datastates.format.layout import LayoutItem
from dcp_datastates.format.ragged import Ints, positions, starts_of, volumes
from dcp_datastates.planning.packing import Message, Named

OBJECT, TENSOR, SHARD = 0, 1, 2
_KINDS: Final = {
    WriteItemType.BYTE_IO: OBJECT,
    WriteItemType.TENSOR: TENSOR,
    WriteItemType.SHARD: SHARD,
}
_TYPES: Final = {kind: type_ for type_, kind in _KINDS.items()}

_PROPERTIES: Final = carried(TensorProperties)


@dataclass(frozen=True, eq=False)
class Head(Message):
    """What N items are, in the order of the stock plan. "Ragged" is defined in ``Catalog``."""

    names: tuple[str, ...]
    """One FQN per item; a name may occur more than once (a ``ShardedTensor`` with several local shards)."""
    kinds: Ints
    """(N,): OBJECT, TENSOR (a whole plain tensor) or SHARD (a chunk, equal on all ranks that hold it)."""
    properties: Ints
    """(N,): index into ``table``; -1 for an object."""
    table: tuple[TensorProperties, ...]
    ndims: Ints
    """(N,): dimensions; 0 for an object."""
    shapes: Ints
    """Ragged, N entries: the sizes of the global tensors, in elements."""
    mappings: Mapping[str, tuple[Any, ...]] | None
    """The stock plan's ``planner_data``: the path of each name in the state dict; None if not flattened."""

    def __post_init__(self) -> None:
        objects = self.kinds == OBJECT
        lengths = {len(each) for each in (self.names, self.kinds, self.properties, self.ndims)}
        if (
            len(lengths) > 1
            or not _within(self.kinds, 0, SHARD + 1)
            or not _within(self.properties, -1, len(self.table))
            or ((self.properties < 0) != objects).any()
            or not _within(self.ndims, 0, 1 << 16)
            or self.ndims[objects].any()
            or self.ndims.sum() != len(self.shapes)
        ):
            raise ValueError("the columns of a plan do not fit together")


@dataclass(frozen=True, eq=False)
class LocalPlan(Named):
    """N items, and where their chunks are. Plans share the arrays: do not change them."""

    head: Head
    offsets: Ints
    """Ragged, N entries: the offsets of each chunk in its tensor."""
    sizes: Ints
    """Ragged: the sizes of each chunk."""

    def __post_init__(self) -> None:
        if not len(self.offsets) == len(self.sizes) == len(self.head.shapes):
            raise ValueError("the chunks of a plan have other dimensions than its tensors")

    @staticmethod
    def of(items: Sequence[WriteItem], mappings: Mapping[str, tuple[Any, ...]] | None) -> LocalPlan:
        """The plan in columns. ValueError: an item differs from those that DCP's planners make."""
        table: dict[tuple[Any, ...], int] = {}
        distinct: list[TensorProperties] = []
        seen: dict[int, int] = {}  # by id: items of tensors that look alike have the same object
        properties, ndims = [-1] * len(items), [0] * len(items)
        shapes: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        for at, item in enumerate(items):
            data = item.tensor_data
            if item.type is WriteItemType.BYTE_IO:
                continue
            if data is None or not _consistent(item.index, data):
                raise ValueError(f"{item.index.fqn!r}: not an item of a default planner: {item}")
            found = seen.get(id(data.properties))
            if found is None:
                found = table.setdefault(properties_key(data.properties), len(table))
                seen[id(data.properties)] = found
                if found == len(distinct):
                    distinct.append(data.properties)
            properties[at] = found
            ndims[at] = len(data.size)
            shapes += data.size
            offsets += data.chunk.offsets
            sizes += data.chunk.sizes
        head = Head(
            names=tuple([item.index.fqn for item in items]),
            kinds=np.array([_KINDS[item.type] for item in items], dtype=np.int64),
            properties=np.array(properties, dtype=np.int64),
            table=tuple(distinct),
            ndims=np.array(ndims, dtype=np.int64),
            shapes=np.array(shapes, dtype=np.int64),
            mappings=mappings,
        )
        return LocalPlan(head, np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64))

    def nbytes(self, items: Ints) -> Ints:
        """The sizes of these items' chunks, in bytes; all items must be tensors."""
        itemsizes = np.array([entry.dtype.itemsize for entry in self.head.table], np.int64)
        ndims = self.head.ndims[items]
        sizes = self.sizes[positions(starts_of(self.head.ndims)[items], ndims)]
        return volumes(ndims, sizes) * itemsizes[self.head.properties[items]]

    def whole_items(self, items: Ints) -> list[WriteItem]:
        """The stock plan's items with these indices."""
        where = positions(starts_of(self.head.ndims)[items], self.head.ndims[items])
        hints = [None] * len(items)
        return self.parts(
            items, self.head.kinds[items], self.offsets[where], self.sizes[where], hints
        )

    def write_items(self) -> list[WriteItem]:
        """All of the stock plan's items."""
        return self.whole_items(np.arange(len(self.head.names)))

    def parts(
        self,
        items: Ints,
        kinds: Ints,
        offsets: Ints,
        sizes: Ints,
        hints: Sequence[int | None],
    ) -> list[WriteItem]:
        """For each of the ``items``, an item for the slice at these (ragged) places of its tensor, with its
        index hint.
        """
        shape_at = starts_of(self.head.ndims)[items].tolist()
        shapes, begins, extents = self.head.shapes.tolist(), offsets.tolist(), sizes.tolist()
        parts = []
        at = 0
        for item, kind, properties, ndim, first, hint in zip(
            items.tolist(),
            kinds.tolist(),
            self.head.properties[items].tolist(),
            self.head.ndims[items].tolist(),
            shape_at,
            hints,
            strict=True,
        ):
            name = self.head.names[item]
            if kind == OBJECT:
                parts.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            offset = torch.Size(begins[at : at + ndim])
            chunk = ChunkStorageMetadata(offset, torch.Size(extents[at : at + ndim]))
            shape = torch.Size(shapes[first : first + ndim])
            data = TensorWriteData(chunk, self.head.table[properties], shape)
            parts.append(
                WriteItem(MetadataIndex(name, offset, hint), _TYPES[kind], tensor_data=data)
            )
            at += ndim
        return parts

    def layout_items(self, items: Ints, offsets: Ints, sizes: Ints) -> list[LayoutItem]:
        """What the layout needs of :meth:`parts`."""
        dtypes = [*(entry.dtype for entry in self.head.table), None]  # the last is an object's: -1
        ends = np.cumsum(self.head.ndims[items]).tolist()
        begins, extents = offsets.tolist(), sizes.tolist()
        return [
            LayoutItem(self.head.names[item], dtypes[properties], extents[at:end], begins[at:end])
            for item, properties, at, end in zip(
                items.tolist(), self.head.properties[items].tolist(), [0, *ends], ends, strict=False
            )
        ]


def properties_key(properties: TensorProperties) -> tuple[Any, ...]:
    """A hashable key, equal for equal properties (``TensorProperties`` are not hashable)."""
    return tuple([getattr(properties, name) for name in _PROPERTIES])


def _consistent(index: MetadataIndex, data: TensorWriteData) -> bool:
    """Whether the index names the chunk, and offsets and sizes have the tensor's number of dimensions."""
    chunk = data.chunk
    return index.offset == chunk.offsets and len(chunk.offsets) == len(data.size) == len(
        chunk.sizes
    )


def _within(values: npt.NDArray[Any], begin: int, end: int) -> bool:
    return len(values) == 0 or bool(begin <= values.min() and values.max() < end)


def extents_of(ndims: Ints, sizes: Ints) -> Ints:
    """(N,): of boxes with these (ragged) sizes, the rows of dimension 0; 1 if it has no dimensions, or is an object."""
    result = np.ones(len(ndims), dtype=np.int64)
    rows = ndims > 0
    result[rows] = sizes[starts_of(ndims)[rows]]
    return result


def sliced(
    ndims: Ints, offsets: Ints, sizes: Ints, which: Ints, begins: Ints, ends: Ints
) -> tuple[Ints, Ints]:
    """The offsets and sizes (ragged) of slices of boxes: of ``which``, from the row ``begins`` of dimension 0 on, up to
    the row ``ends``.
    """
    lengths = ndims[which]
    where = positions(starts_of(ndims)[which], lengths)
    offsets, sizes = offsets[where], sizes[where]
    cuttable = lengths > 0
    first = starts_of(lengths)[cuttable]
    offsets[first] += begins[cuttable]
    sizes[first] = (ends - begins)[cuttable]
    return offsets, sizes
