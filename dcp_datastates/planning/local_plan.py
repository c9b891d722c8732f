"""One rank's local plan in columns: the contents of its ``WriteItem`` objects, in a few arrays.

An encoded plan has two parts. The head is usually the same on many ranks: names, paths, kinds, dtypes and global
shapes. The rest is the places of this rank's chunks. The coordinator decodes each distinct head once, and the plans
share it.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeAlias

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
from dcp_datastates.format.fields import carried
from dcp_datastates.format.layout import LayoutItem
from dcp_datastates.format.ragged import positions, starts_of, volumes
from dcp_datastates.planning.packing import pack, pack_ints, unpack, unpack_ints

__all__ = [
    "OBJECT",
    "SHARD",
    "TENSOR",
    "Head",
    "LocalPlan",
    "digest_of",
    "properties_key",
]

OBJECT, TENSOR, SHARD = 0, 1, 2
_KINDS = {WriteItemType.BYTE_IO: OBJECT, WriteItemType.TENSOR: TENSOR, WriteItemType.SHARD: SHARD}
_TYPES = {kind: type_ for type_, kind in _KINDS.items()}

_PROPERTIES: Final = carried(TensorProperties)

_PLAN = b"dslp\x01"
_HEAD = b"dslh\x02"
_BETWEEN, _WITHIN = "\0", "\x1f"  # separate names, and the steps of a name's path

Head: TypeAlias = tuple[Any, ...]
"""A decoded head: names, kinds, properties, table, ndims, shapes, mappings, as in :class:`LocalPlan`."""


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
        head, offsets, sizes = unpack(_PLAN, 3, data)
        known = heads.get(head) if heads else None  # type: ignore[call-overload]
        if known is None:
            try:
                known = _decode_head(head)
            except (TypeError, LookupError, AttributeError) as error:
                raise ValueError(
                    f"a pickle in a plan's bytes has something else in it: {error}"
                ) from error
            if heads is not None:
                heads[bytes(head)] = known
        names, kinds, properties, table, ndims, shapes, mappings = known
        plan = LocalPlan(
            names,
            kinds,
            properties,
            table,
            ndims,
            shapes,
            unpack_ints(offsets, len(shapes)),
            unpack_ints(sizes, len(shapes)),
            mappings,
        )
        plan.__dict__["digest"] = digest_of(data)
        return plan

    @functools.cached_property
    def digest(self) -> bytes:
        """The digest of the encoding, 16 bytes."""
        return digest_of(self._encoded)

    @functools.cached_property
    def _encoded(self) -> bytes:
        return pack(_PLAN, [_encode_head(self), pack_ints(self.offsets), pack_ints(self.sizes)])

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

    def layout_items(self, items: Ints, offsets: Ints, sizes: Ints) -> list[LayoutItem]:
        """What the layout needs of :meth:`parts`."""
        dtypes = [*(entry.dtype for entry in self.table), None]  # the last is an object's: -1
        ends = np.cumsum(self.ndims[items]).tolist()
        begins, extents = offsets.tolist(), sizes.tolist()
        return [
            LayoutItem(self.names[item], dtypes[properties], extents[at:end], begins[at:end])
            for item, properties, at, end in zip(
                items.tolist(), self.properties[items].tolist(), [0, *ends], ends, strict=False
            )
        ]


def digest_of(encoded: bytes) -> bytes:
    """The digest of a plan, from its encoded bytes."""
    return blake2b(encoded, digest_size=16).digest()


def properties_key(properties: TensorProperties) -> tuple[Any, ...]:
    """A hashable key, equal for equal properties (``TensorProperties`` are not hashable)."""
    return tuple([getattr(properties, name) for name in _PROPERTIES])


def _consistent(index: MetadataIndex, data: TensorWriteData) -> bool:
    """Whether the index names the chunk, and offsets and sizes have the tensor's number of dimensions."""
    chunk = data.chunk
    return index.offset == chunk.offsets and len(chunk.offsets) == len(data.size) == len(
        chunk.sizes
    )


def _encode_head(plan: LocalPlan) -> bytes:
    """Encode each distinct name once: first the names in the mappings, in their order, then the items' other names.

    Equal plans must give equal bytes, so that digests are the same from save to save.
    """
    paths = plan.mappings or {}
    distinct = dict.fromkeys((*paths, *plan.names))
    numbers = dict(zip(distinct, range(len(distinct)), strict=True))
    names = np.fromiter(map(numbers.__getitem__, plan.names), np.int64, len(plan.names))
    text, odd = _encode_paths(tuple(distinct), paths)
    return pack(
        _HEAD,
        [
            pack_ints(np.array([len(distinct), -1 if plan.mappings is None else len(paths)])),
            text,
            pack_value(odd),
            pack_ints(names),
            plan.kinds.tobytes(),
            pack_ints(plan.properties),
            pack_value(plan.table),
            pack_ints(plan.ndims),
            pack_ints(plan.shapes),
        ],
    )


def _encode_paths(
    names: tuple[str, ...], paths: Mapping[str, tuple[Any, ...]]
) -> tuple[bytes, dict[int, tuple[str, Any]]]:
    """Encode names and paths: if a name is its path joined by dots, its dots are replaced by another separator.

    Second result: by position, the other names and their paths (mainly paths with integer steps).
    """
    texts = list(names)
    odd: dict[int, tuple[str, Any]] = {}
    for at, (name, path) in enumerate(paths.items()):
        try:
            texts[at] = _WITHIN.join(path)
        except TypeError:
            odd[at] = ("", path)
        else:
            steps = texts[at].count(_WITHIN) + 1
            if steps != len(path) or texts[at].replace(_WITHIN, ".") != name:
                texts[at] = name
                odd[at] = ("", path)
    for at, name in enumerate(names):
        if _BETWEEN in name or _WITHIN in name:
            odd[at] = (name, paths.get(name))
            texts[at] = ""
    return _BETWEEN.join(texts).encode("utf-8", "surrogatepass"), odd


def _decode_paths(
    text: str, odd: Mapping[int, tuple[str, Any]], count: int, mapped: int
) -> tuple[list[str], Mapping[str, tuple[Any, ...]] | None]:
    texts = text.split(_BETWEEN) if count else []
    if len(texts) != count or mapped > count:
        raise ValueError(f"there are {len(texts)} names where {count} belong")
    names = text.replace(_WITHIN, ".").split(_BETWEEN) if count else []
    paths = [tuple(text.split(_WITHIN)) for text in texts[: max(mapped, 0)]]
    for at, (name, path) in odd.items():
        names[at] = name or names[at]
        if at < mapped:
            paths[at] = path
    return names, dict(zip(names, paths, strict=False)) if mapped >= 0 else None


def _decode_head(data: memoryview) -> Head:
    counts, text, odd, positions, kinds, properties, table, ndims, shapes = unpack(_HEAD, 9, data)
    count, mapped = unpack_ints(counts, 2).tolist()
    distinct, mappings = _decode_paths(
        bytes(text).decode("utf-8", "surrogatepass"), unpack_objects(odd), count, mapped
    )
    items = len(kinds)
    numbers = unpack_ints(positions, items)
    head = (
        tuple(map(distinct.__getitem__, numbers.tolist()))
        if _within(numbers, 0, count)
        else _refuse("names"),
        np.frombuffer(kinds, np.uint8).copy(),
        unpack_ints(properties, items),
        unpack_objects(table),
        unpack_ints(ndims, items),
        unpack_ints(shapes, -1),
        mappings,
    )
    _check_head(head)
    return head


def _check_head(head: Head) -> None:
    _, kinds, properties, table, ndims, shapes, _ = head
    objects = kinds == OBJECT
    if type(table) is not tuple or not set(map(type, table)) <= {TensorProperties}:
        _refuse("table")
    if not _within(kinds, 0, SHARD + 1):
        _refuse("kinds")
    if not _within(properties, -1, len(table)) or ((properties < 0) != objects).any():
        _refuse("properties")
    if not _within(ndims, 0, 1 << 16) or ndims[objects].any() or ndims.sum() != len(shapes):
        _refuse("dimensions")


def _within(values: npt.NDArray[Any], begin: int, end: int) -> bool:
    return len(values) == 0 or bool(begin <= values.min() and values.max() < end)


def _refuse(what: str) -> Any:
    raise ValueError(f"a plan's {what} are damaged: they do not go with the rest of it")


def pack_value(value: Any) -> bytes:
    """A pickle without a memo, so that equal values give equal bytes, whether or not they are the same objects."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()


def unpack_objects(data: bytes | memoryview) -> Any:
    """The value that ``pack_value`` packed. ValueError: it cannot be unpickled. Only as safe as the sender of the
    bytes.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ValueError(f"a pickle in these bytes is damaged: {error}") from error
