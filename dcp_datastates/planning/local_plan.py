"""One rank's local plan in columns: the contents of its ``WriteItem`` objects, in a few arrays.

An encoded plan has two parts. The head, compressed, is usually the same on many ranks: names, paths, kinds, dtypes and
global shapes. The rest is the places of this rank's chunks. The coordinator decodes each distinct head once, and the
plans share it.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.format.fields import packed_unknown_values, set_unknown_values
from dcp_datastates.format.ragged import positions, starts_of, volumes
from dcp_datastates.planning.packing import digest_of, pack, unpack
from dcp_datastates.process.lazily import lazily

__all__ = ["OBJECT", "SHARD", "TENSOR", "Head", "LocalPlan", "properties_key"]

OBJECT, TENSOR, SHARD = 0, 1, 2
_KINDS = {WriteItemType.BYTE_IO: OBJECT, WriteItemType.TENSOR: TENSOR, WriteItemType.SHARD: SHARD}
_TYPES = {kind: type_ for type_, kind in _KINDS.items()}

Head: TypeAlias = tuple[Any, ...]
"""A decoded head: names, kinds, properties, ndims, shapes, table, mappings, as in :class:`LocalPlan`."""


@dataclass(frozen=True, eq=False)
class LocalPlan:
    """N items in the order of the stock plan. "Ragged" is defined in ``Catalog``.

    Plans share the arrays: do not change them.
    """

    names: tuple[str, ...]
    """One FQN per item; a name may occur more than once (a ``ShardedTensor`` with several local shards)."""
    kinds: npt.NDArray[np.uint8]
    """(N,): OBJECT, TENSOR (a whole plain tensor) or SHARD (a chunk, equal on all ranks that hold it)."""
    properties: Ints
    """(N,): index into ``table``; -1 for an object."""
    table: tuple[TensorProperties, ...]
    ndims: Ints
    """(N,): dimensions; 0 for an object."""
    shapes: Ints
    """Ragged, N entries: the sizes of the global tensors, in elements."""
    offsets: Ints
    """Ragged: the offsets of each chunk in its tensor."""
    sizes: Ints
    """Ragged: the sizes of each chunk."""
    mappings: Mapping[str, tuple[Any, ...]] | None
    """The stock plan's ``planner_data``: the path of each name in the state dict; None if not flattened."""

    @staticmethod
    def of(items: Sequence[WriteItem], mappings: Mapping[str, tuple[Any, ...]] | None) -> LocalPlan:
        """The plan in columns. ValueError: an item differs from those that DCP's planners make."""
        table: dict[tuple[Any, ...], int] = {}
        distinct: list[TensorProperties] = []
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
            key = properties_key(data.properties)
            found = table.setdefault(key, len(table))
            if found == len(distinct):
                distinct.append(data.properties)
            properties[at] = found
            ndims[at] = len(data.size)
            shapes += data.size
            offsets += data.chunk.offsets
            sizes += data.chunk.sizes
        return LocalPlan(
            names=tuple([item.index.fqn for item in items]),
            kinds=np.array([_KINDS[item.type] for item in items], dtype=np.uint8),
            properties=np.array(properties, dtype=np.int64),
            table=tuple(distinct),
            ndims=np.array(ndims, dtype=np.int64),
            shapes=np.array(shapes, dtype=np.int64),
            offsets=np.array(offsets, dtype=np.int64),
            sizes=np.array(sizes, dtype=np.int64),
            mappings=mappings,
        )

    def encode(self) -> bytes:
        """Encode the plan: equal plans give equal bytes. Encodes only once."""
        return self._encoded

    @staticmethod
    def decode(data: bytes, heads: dict[bytes, Head] | None = None) -> LocalPlan:
        """The plan that :meth:`encode` encoded. ValueError: the bytes are damaged.

        Plans decoded with the same ``heads`` share equal heads. The bytes contain pickles, like everything that DCP
        gathers from the ranks: decode only this job's.
        """
        head, offsets, sizes = unpack(data, 3)
        heads = {} if heads is None else heads
        if head not in heads:
            *columns, table, mappings = unpack(zlib.decompress(head), 7)
            heads[head] = (*columns, _decoded(table), mappings)
        names, kinds, properties, ndims, shapes, table, mappings = heads[head]
        plan = LocalPlan(names, kinds, properties, table, ndims, shapes, offsets, sizes, mappings)
        plan.__dict__["digest"] = digest_of(data)
        return plan

    @lazily
    def digest(self) -> bytes:
        """The digest of the encoding, 16 bytes."""
        return digest_of(self._encoded)

    @lazily
    def _encoded(self) -> bytes:
        columns = (self.names, self.kinds, self.properties, self.ndims, self.shapes)
        table = [(each, packed_unknown_values(each)) for each in self.table]
        mappings = None if self.mappings is None else dict(self.mappings)
        head = pack(*columns, table, mappings)
        return pack(zlib.compress(head, 1), self.offsets, self.sizes)

    def nbytes(self, items: Ints) -> Ints:
        """The sizes of these items' chunks, in bytes; all items must be tensors."""
        itemsizes = np.array([entry.dtype.itemsize for entry in self.table], np.int64)
        ndims = self.ndims[items]
        sizes = self.sizes[positions(starts_of(self.ndims)[items], ndims)]
        return volumes(ndims, sizes) * itemsizes[self.properties[items]]

    def whole_items(self, items: Ints) -> list[WriteItem]:
        """The stock plan's items with these indices."""
        where = positions(starts_of(self.ndims)[items], self.ndims[items])
        hints = [None] * len(items)
        return self.parts(items, self.kinds[items], self.offsets[where], self.sizes[where], hints)

    def write_items(self) -> list[WriteItem]:
        """All of the stock plan's items."""
        return self.whole_items(np.arange(len(self.names)))

    def parts(
        self,
        items: Ints,
        kinds: npt.NDArray[np.uint8],
        offsets: Ints,
        sizes: Ints,
        hints: Sequence[int | None],
    ) -> list[WriteItem]:
        """For each of the ``items``, an item for the slice at these (ragged) places of its tensor, with its
        index hint.
        """
        shape_at = starts_of(self.ndims)[items].tolist()
        shapes, begins, extents = self.shapes.tolist(), offsets.tolist(), sizes.tolist()
        parts = []
        at = 0
        for item, kind, properties, ndim, first, hint in zip(
            items.tolist(),
            kinds.tolist(),
            self.properties[items].tolist(),
            self.ndims[items].tolist(),
            shape_at,
            hints,
            strict=True,
        ):
            name = self.names[item]
            if kind == OBJECT:
                parts.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            offset = torch.Size(begins[at : at + ndim])
            chunk = ChunkStorageMetadata(offset, torch.Size(extents[at : at + ndim]))
            shape = torch.Size(shapes[first : first + ndim])
            data = TensorWriteData(chunk, self.table[properties], shape)
            parts.append(
                WriteItem(MetadataIndex(name, offset, hint), _TYPES[kind], tensor_data=data)
            )
            at += ndim
        return parts


def properties_key(properties: TensorProperties) -> tuple[Any, ...]:
    """A hashable key, equal for equal properties (``TensorProperties`` are not hashable)."""
    return (
        *packed_unknown_values(properties).items(),
        properties.dtype,
        properties.layout,
        properties.requires_grad,
        properties.memory_format,
        properties.pin_memory,
    )


def _consistent(index: MetadataIndex, data: TensorWriteData) -> bool:
    """Whether the index names the chunk, and offsets and sizes have the tensor's number of dimensions."""
    chunk = data.chunk
    return index.offset == chunk.offsets and len(chunk.offsets) == len(data.size) == len(
        chunk.sizes
    )


def _decoded(
    table: Sequence[tuple[TensorProperties, Mapping[str, bytes]]],
) -> tuple[TensorProperties, ...]:
    for properties, further in table:
        set_unknown_values(properties, {name: pickle.loads(each) for name, each in further.items()})
    return tuple([properties for properties, _ in table])
