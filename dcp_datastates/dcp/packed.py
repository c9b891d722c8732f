"""DCP's items and results, pickled as columns.

DCP sends every item and result between the ranks as an object of five objects. At 10,000 tensors, that is most of what
a save costs that a stock planner plans: pickling takes 0.1 ms for each tensor, and half of it is the garbage collector,
which looks at the whole process again and again. These lists hold what DCP expects of them, and a rank that receives
one has a plain list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates.format.fields import (
    packed_unknown_values,
    plans_in_objects,
    unknown_fields,
)
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS
from dcp_datastates.planning.local_plan import properties_key
from dcp_datastates.process.garbage import collection_paused

__all__ = ["PackedItems", "PackedReads", "PackedResults"]

_NOTHING: Final = -1
"""The number of a size that is None, and of the properties of an object."""

_OF_READ: Final = {
    *("type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths")
}
_KINDS_OF_READ: Final = {ReadItem, LoadItemType, MetadataIndex}
_KINDS: Final = {MetadataIndex, WriteItemType}
_OF_RESULT: Final = {"index", "size_in_bytes", "storage_data"}


class PackedItems(list[WriteItem]):
    """A plan's items."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self, _packed_items, _unpacked_items)


class PackedReads(list[ReadItem]):
    """The items of a load plan."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self, _packed_reads, _unpacked_reads)


class PackedResults(list[WriteResult]):
    """What ``write_data`` returns."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self, _packed_results, _unpacked_results)


def _reduced(
    values: list[Any],
    pack: Callable[[list[Any]], tuple[Any, ...] | None],
    unpack: Callable[..., list[Any]],
) -> tuple[Any, ...]:
    """How to pickle ``values``: in columns, or as they are, if they are of other classes than DCP's own, have fields
    that this package does not know, or cannot be looked at. An error here would leave the other ranks in DCP's gather.
    """
    with collection_paused():
        try:
            columns = pack(values)
        except Exception:
            columns = None
    return (list, (), None, iter(values)) if columns is None else (unpack, columns)


class _Sizes:
    """Numbers for the distinct ones among sizes: there are few."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}

    def number(self, size: torch.Size | None) -> int:
        if size is None:
            return _NOTHING
        if type(size) is not torch.Size:
            raise TypeError("another planner's")
        return self._numbers.setdefault(tuple(size), len(self._numbers))

    def all(self) -> list[tuple[int, ...]]:
        return list(self._numbers)


def _packed_items(items: Sequence[WriteItem]) -> tuple[Any, ...] | None:
    """The arguments of :func:`_unpacked_items`; None if these are not DCP's own items, as this package knows them."""
    if plans_in_objects() or not set(map(type, items)) <= {WriteItem}:
        return None
    sizes, names = _Sizes(), []
    rows: list[int | None] = []
    table: dict[Any, tuple[int, TensorProperties]] = {}
    numbers: dict[int, int] = {}  # by id, of the properties: many items have the same object
    for item in items:
        index, data = item.index, item.tensor_data
        if {type(index), type(item.type)} != _KINDS or item.bytes_io_data is not None:
            return None
        names.append(index.fqn)
        rows += (item.type.value, sizes.number(index.offset), index.index)
        if data is None:
            rows += (_NOTHING, _NOTHING, _NOTHING, _NOTHING)
            continue
        if type(data) is not TensorWriteData or type(data.chunk) is not ChunkStorageMetadata:
            return None
        number = numbers.get(id(data.properties))
        if number is None:
            if not _are_known(data.properties):
                return None
            known = table.setdefault(properties_key(data.properties), (len(table), data.properties))
            number = numbers[id(data.properties)] = known[0]
        rows += (
            number,
            sizes.number(data.chunk.offsets),
            sizes.number(data.chunk.sizes),
            sizes.number(data.size),
        )
    return names, rows, sizes.all(), [properties for _, properties in table.values()]


def _are_known(properties: object) -> bool:
    """Whether :func:`properties_key` has all that is in the properties."""
    return type(properties) is TensorProperties and len(packed_unknown_values(properties)) == len(
        unknown_fields(TensorProperties)
    )


@collection_paused()
def _unpacked_items(
    names: Sequence[str],
    rows: Sequence[Any],
    sizes: Sequence[tuple[int, ...]],
    table: Sequence[TensorProperties],
) -> list[WriteItem]:
    made = [*map(torch.Size, sizes), None]  # the last is that of _NOTHING
    types = {each.value: each for each in WriteItemType}
    items = []
    for name, kind, offset, hint, number, begin, extent, size in zip(
        names, *[iter(rows)] * 7, strict=True
    ):
        data = None
        if number != _NOTHING:
            # Each has its own: planners change them.
            properties = TensorProperties.__new__(TensorProperties)
            vars(properties).update(vars(table[number]))
            chunk = ChunkStorageMetadata(made[begin], made[extent])
            data = TensorWriteData(chunk, properties, made[size])
        index = MetadataIndex(name, made[offset], hint)
        items.append(WriteItem(index, types[kind], tensor_data=data))
    return items


def _packed_reads(items: Sequence[ReadItem]) -> tuple[Any, ...] | None:
    """The arguments of :func:`_unpacked_reads`; None as in :func:`_packed_items`."""
    if plans_in_objects() or vars(ReadItem)["__dataclass_fields__"].keys() != _OF_READ:
        return None
    sizes, names, stored = _Sizes(), [], []
    rows: list[int | None] = []
    for item in items:
        here, there = item.dest_index, item.storage_index
        if {type(item), type(item.type), type(here), type(there)} != _KINDS_OF_READ:
            return None
        names.append(here.fqn)
        stored.append(there.fqn)
        rows += (item.type.value, sizes.number(here.offset), here.index)
        boxes = item.dest_offsets, item.storage_offsets, item.lengths
        rows += (sizes.number(there.offset), there.index, *map(sizes.number, boxes))
    return names, None if stored == names else stored, rows, sizes.all()


@collection_paused()
def _unpacked_reads(
    names: Sequence[str],
    stored: Sequence[str] | None,
    rows: Sequence[Any],
    sizes: Sequence[tuple[int, ...]],
) -> list[ReadItem]:
    made = [*map(torch.Size, sizes), None]
    types = {each.value: each for each in LoadItemType}
    items = []
    for name, old, kind, here, hint, there, other, begin, start, lengths in zip(
        names, stored or names, *[iter(rows)] * 8, strict=True
    ):
        items.append(
            ReadItem(
                types[kind],
                MetadataIndex(name, made[here], hint),
                made[begin],
                MetadataIndex(old, made[there], other),
                made[start],
                made[lengths],
            )
        )
    return items


def _packed_results(results: Sequence[WriteResult]) -> tuple[Any, ...] | None:
    """The arguments of :func:`_unpacked_results`; None as in :func:`_packed_items`."""
    if plans_in_objects() or vars(WriteResult)["__dataclass_fields__"].keys() != _OF_RESULT:
        return None
    sizes, names = _Sizes(), []
    rows: list[int | None] = []
    paths: dict[str, int] = {}
    further: dict[int, Any] = {}
    for at, result in enumerate(results):
        index, info = result.index, result.storage_data
        if type(index) is not MetadataIndex:
            return None
        names.append(index.fqn)
        rows += (sizes.number(index.offset), index.index, result.size_in_bytes)
        if type(info) is _StorageInfo and info.transform_descriptors is TRANSFORM_DESCRIPTORS:
            path = paths.setdefault(info.relative_path, len(paths))
            rows += (path, info.offset, info.length)
        else:
            further[at] = info  # a file's record
            rows += (_NOTHING, 0, 0)
    return names, rows, sizes.all(), list(paths), further


@collection_paused()
def _unpacked_results(
    names: Sequence[str],
    rows: Sequence[Any],
    sizes: Sequence[tuple[int, ...]],
    paths: Sequence[str],
    further: dict[int, Any],
) -> list[WriteResult]:
    made = [*map(torch.Size, sizes), None]
    results = []
    columns = zip(names, *[iter(rows)] * 6, strict=True)
    for at, (name, offset, hint, nbytes, path, begin, length) in enumerate(columns):
        info = (
            further[at]
            if path == _NOTHING
            else _StorageInfo(paths[path], begin, length, TRANSFORM_DESCRIPTORS)
        )
        results.append(WriteResult(MetadataIndex(name, made[offset], hint), nbytes, info))
    return results
