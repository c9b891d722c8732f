"""The items of a load plan, pickled as plain tuples.

DCP sends every item between the ranks as an object of several objects. At 10,000 tensors, pickling takes 0.1 ms for
each, and half of it is the garbage collector, which looks at the whole process again and again. This list holds what
DCP expects of it, and a rank that receives one has a plain list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_datastates.process.garbage import collection_paused

__all__ = ["PackedReads"]

_KINDS: Final = {ReadItem, LoadItemType, MetadataIndex}


class PackedReads(list[ReadItem]):
    """The items of a load plan."""

    def __reduce__(self) -> tuple[Any, ...]:
        """As tuples, or as the items are, if they are of other classes than DCP's own, or cannot be looked at. An
        error here would leave the other ranks in DCP's gather.
        """
        with collection_paused():
            try:
                return _unpacked, (_packed(self),)
            except Exception:
                return list, (), None, iter(self)


def _packed(items: Iterable[ReadItem]) -> list[tuple[Any, ...]]:
    """A tuple for each item. Equal sizes are one object, which a pickle has once. TypeError: not DCP's own items."""
    alike: dict[Any, Any] = {}

    def size(given: torch.Size | None) -> tuple[int, ...] | None:
        if given is not None and type(given) is not torch.Size:
            raise TypeError("another planner's")
        found = None if given is None else tuple(given)
        return alike.setdefault(found, found)

    rows = []
    for item in items:
        here, there = item.dest_index, item.storage_index
        kinds = {type(item), type(item.type), type(here), type(there)}
        spans = (item.dest_offsets, item.storage_offsets, item.lengths)
        if kinds != _KINDS or set(map(type, spans)) != {torch.Size}:
            raise TypeError("another planner's")
        stored = None if there.fqn == here.fqn else there.fqn
        sizes = map(size, (here.offset, there.offset, *spans))
        rows.append((item.type.value, here.fqn, stored, here.index, there.index, *sizes))
    return rows


@collection_paused()
def _unpacked(rows: Sequence[tuple[Any, ...]]) -> list[ReadItem]:
    types = {each.value: each for each in LoadItemType}
    return [
        ReadItem(
            types[kind],
            MetadataIndex(name, offset, hint),
            torch.Size(begin),
            MetadataIndex(name if stored is None else stored, place, other),
            torch.Size(start),
            torch.Size(lengths),
        )
        for kind, name, stored, hint, other, offset, place, begin, start, lengths in rows
    ]
