"""The items of a load plan, pickled as columns.

DCP sends every item between the ranks as an object of several objects. At 10,000 tensors, pickling takes 0.1 ms for
each, and half of it is the garbage collector, which looks at the whole process again and again. This list holds what
DCP expects of it, and a rank that receives one has a plain list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_datastates.process.garbage import collection_paused

__all__ = ["PackedReads"]

_NOTHING: Final = -1
"""The number of a size that is None."""

_KINDS: Final = {ReadItem, LoadItemType, MetadataIndex}


class PackedReads(list[ReadItem]):
    """The items of a load plan."""

    def __reduce__(self) -> tuple[Any, ...]:
        """In columns, or as the items are, if they are of other classes than DCP's own, or cannot be looked at. An
        error here would leave the other ranks in DCP's gather.
        """
        with collection_paused():
            try:
                columns = _packed(self)
            except Exception:
                columns = None
        return (list, (), None, iter(self)) if columns is None else (_unpacked, columns)


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


def _packed(items: Sequence[ReadItem]) -> tuple[Any, ...] | None:
    """The arguments of :func:`_unpacked`; None if these are not DCP's own items, as this package knows them."""
    sizes, names, stored = _Sizes(), [], []
    rows: list[int | None] = []
    for item in items:
        here, there = item.dest_index, item.storage_index
        if {type(item), type(item.type), type(here), type(there)} != _KINDS:
            return None
        names.append(here.fqn)
        stored.append(there.fqn)
        rows += (item.type.value, sizes.number(here.offset), here.index)
        boxes = item.dest_offsets, item.storage_offsets, item.lengths
        rows += (sizes.number(there.offset), there.index, *map(sizes.number, boxes))
    return names, None if stored == names else stored, rows, sizes.all()


@collection_paused()
def _unpacked(
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
