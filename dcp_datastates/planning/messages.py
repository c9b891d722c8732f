"""What the ranks send each other to plan a save, in columns. What the other side has is named by its digest.

A rank offers its *local plan*: the contents of its ``WriteItem`` objects, in a few arrays. The coordinator answers with
the rank's *share*: the items that it writes, and their rows. With its vote, the rank reports where these items are. A
report leaves out the attempt's directory, so it is the same from save to save. So a save whose structure is unchanged
sends a few bytes each way. In each message, what is empty is not sent in full.

A local plan has two parts. The head is usually the same on many ranks: names, paths, kinds, dtypes and global shapes.
The rest is the places of this rank's chunks. The coordinator decodes each distinct head once, and the plans share it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
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

from dcp_datastates.format.layout import LayoutItem
from dcp_datastates.format.ragged import Ints, positions, starts_of, volumes
from dcp_datastates.format.values import PROPERTIES
from dcp_datastates.planning.packing import Message, Named

OBJECT, TENSOR, SHARD = 0, 1, 2


class Why(IntEnum):
    """Why ranks compare what several of them hold: a set's number modulo the number of these."""

    CUT = 0
    """Each writes a part."""
    UNDECLARED = 1
    """One writes it, and nothing declares the others' equal."""
    WHOLE = 2
    """One writes it, and all declare it equal."""


_KINDS: Final = {
    WriteItemType.BYTE_IO: OBJECT,
    WriteItemType.TENSOR: TENSOR,
    WriteItemType.SHARD: SHARD,
}
_TYPES: Final = {kind: type_ for type_, kind in _KINDS.items()}


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


@dataclass(frozen=True, eq=False)
class RankPlan(Named):
    """A rank's share: M items, in the order of its :class:`LocalPlan`, without repetition."""

    items: Ints
    """(M,): index into the local plan's items."""
    begins: Ints
    """(M,): the first row of dimension 0 within the chunk; 0 if it has no dimensions, or is an object."""
    ends: Ints
    """(M,): the row after the last; 1 if it has no dimensions, or is an object."""
    hints: Ints
    """(M,): position in its tensor's chunk list in the metadata (``MetadataIndex.index``); -1 for an object."""
    shared: Ints
    """(K,): the items that other ranks hold, too. Sorted by the set of ranks that hold them, in the same order on all
    of these ranks.
    """
    sets: Ints
    """(K,): the number of each item's set of ranks, the same on all ranks; ascending. See :class:`Why`."""

    def __post_init__(self) -> None:
        counts = [len(each) for each in (self.items, self.begins, self.ends, self.hints)]
        if len(set(counts)) > 1 or len(self.shared) != len(self.sets):
            raise ValueError("the columns of a share have different lengths")

    @functools.cached_property
    def sampled(self) -> tuple[Ints, Ints]:
        """Of ``shared`` and ``sets``, what ranks compare at each save, by samples: parts that ranks write of replicas
        must be of equal ones; and of what nothing declares equal, the others' would be lost.
        """
        which = self.sets % len(Why) != Why.WHOLE
        return self.shared[which], self.sets[which]

    def write_items(self, local: LocalPlan) -> list[WriteItem]:
        """The share as ``WriteItem`` objects.

        A whole item is as in the stock plan, with its hint. A slice is an item of type SHARD: a separate chunk.
        ValueError: this is not a share of that plan.
        """
        offsets, sizes = self._boxes(local)
        kinds = local.head.kinds[self.items]
        extents = extents_of(local.head.ndims, local.sizes)[self.items]
        kinds[(self.begins != 0) | (self.ends != extents)] = SHARD
        return local.parts(self.items, kinds, offsets, sizes, self.hints.tolist())

    def layout_items(self, local: LocalPlan) -> list[LayoutItem]:
        """What the layout needs of :meth:`write_items`."""
        return local.layout_items(self.items, *self._boxes(local))

    def _boxes(self, local: LocalPlan) -> tuple[Ints, Ints]:
        """Each item's offsets and sizes (ragged)."""
        names = local.head.names
        if len(self.items) and not 0 <= self.items.min() <= self.items.max() < len(names):
            raise ValueError(f"the final plan is of other items than the {len(names)} given")
        boxes = (local.head.ndims, local.offsets, local.sizes)
        return sliced(*boxes, self.items, self.begins, self.ends)


@dataclass(frozen=True)
class Offer(Message):
    """A rank's message: its local plan."""

    digest: bytes
    share: bytes
    """Digest of the share that this rank last received for the plan; empty if none."""
    data: bytes = b""
    """The encoded plan."""


@dataclass(frozen=True)
class Answer(Message):
    """The coordinator's message: the rank's share of the global plan."""

    digest: bytes
    report: bytes
    """Digest of the rank's report that the coordinator has; empty if none."""
    turn: tuple[int, int] | None = None
    """Which part of the replicas all ranks compare, of how many (``comparison.py``); None: no part."""
    data: bytes = b""
    """The encoded share."""


@dataclass(frozen=True, eq=False)
class Report(Named):
    """The places of a share's items, in their order: file, offset and length (bytes).

    ``files``: name (below the attempt's directory), size in bytes, and offset of the checksum table.
    """

    files: tuple[tuple[str, int, int], ...]
    numbers: Ints
    offsets: Ints
    lengths: Ints

    def __post_init__(self) -> None:
        if not len(self.numbers) == len(self.offsets) == len(self.lengths):
            raise ValueError("the columns of a report have different lengths")


@dataclass(frozen=True)
class RankReport(Message):
    """What a rank tells of its share that is written."""

    digest: bytes
    samples: bytes = b""
    """Samples of the replicas that this rank shares with others; see ``samples.py``."""
    data: bytes = b""
    """The encoded report."""
    sums: bytes = b""
    """What the rank tells of the replicas in this save's turn; see ``comparison.py``."""


def properties_key(properties: TensorProperties) -> tuple[Any, ...]:
    """A hashable key, equal for equal properties (``TensorProperties`` are not hashable)."""
    return tuple([getattr(properties, name) for name in PROPERTIES])


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
