"""Boxes of tensors: what a rank holds of one, and what it needs of the stored chunks."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.metadata_table import Catalog
from dcp_datastates.format.ragged import Ints, distinct, positions, starts_of
from dcp_datastates.format.stored_names import Box
from dcp_datastates.io.flattening import shards_as_dcp_sees_them
from dcp_datastates.io.tensor_memory import PLAIN_TYPES, any_hold_shards, box, holds_shards

_MOST_PAIRS: Final = 1 << 18
"""How many shards are compared with a chunk each in one pass, which bounds its memory: 100 bytes for each dimension."""

_SHAPE: Final = operator.attrgetter("shape")

Sizes = tuple[int, ...]


@dataclass
class Shards:
    """What this rank holds of tensors, in columns."""

    of: list[int] = field(default_factory=list)
    """The tensor, by its place among all."""
    begins: list[Sizes] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    memories: list[torch.Tensor] = field(default_factory=list)

    def add(self, of: int, begin: Sizes, size: Sizes, memory: torch.Tensor) -> None:
        self.of.append(of)
        self.begins.append(begin)
        self.sizes.append(size)
        self.memories.append(memory)

    def places(self, chosen: Ints, ndim: int) -> tuple[Ints, Ints]:
        """(chosen, dimensions): the begins and the sizes of those, which have ``ndim`` dimensions."""
        at, shape = chosen.tolist(), (len(chosen), ndim)
        begins, sizes = [self.begins[each] for each in at], [self.sizes[each] for each in at]
        return np.array(begins, np.int64).reshape(shape), np.array(sizes, np.int64).reshape(shape)


def shards_of(names: Iterable[str], values: Iterable[Any]) -> Shards:
    """What this rank holds of tensors of the state, which are called ``names``. Nothing outside a mesh."""
    values = list(values)
    if set(map(type, values)) <= PLAIN_TYPES and not any_hold_shards(values):
        begins: list[Sizes] = [(0,) * value.ndim for value in values]
        return Shards(list(range(len(values))), begins, list(map(_SHAPE, values)), values)
    found = Shards()
    places: dict[Any, tuple[Sizes, Sizes] | None] = {}
    """Of DTensors that are placed alike: torch reckons it in 20 us. None outside a mesh."""
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        kind = type(value)
        if kind in PLAIN_TYPES and not holds_shards(value):
            found.add(number, (0,) * value.dim(), value.shape, value)
        elif kind is DTensor and type(value._local_tensor) in PLAIN_TYPES:
            spec, local = value._spec, value._local_tensor
            if spec not in places:
                places[spec] = _place(name, value)
            if (place := places[spec]) is None:
                continue
            if local.shape != place[1] and 0 not in place[1]:  # an empty shard may have any shape
                raise IncompatibleStateError(
                    f"{name!r} cannot be loaded: its local tensor has the shape {tuple(local.shape)}, and the shard "
                    f"that it stands for {place[1]}"
                )
            found.add(number, *place, local)
        else:
            for begin, size, memory in shards_as_dcp_sees_them(name, value):
                found.add(number, begin, size, memory)
    return found


def _place(name: str, value: DTensor) -> tuple[Sizes, Sizes] | None:
    """Where this rank's part of a DTensor begins, and its sizes, in elements; None outside its mesh."""
    if is_elsewhere(value):
        return None
    if any(placement.is_partial() for placement in value.placements):
        raise IncompatibleStateError(
            f"{name!r} cannot be loaded: the state has partial sums of it ({value.placements}); redistribute() it"
        )
    place = box(value)
    return tuple(begin for begin, _ in place), tuple(end - begin for begin, end in place)


class Overlaps(NamedTuple):
    """What shards have in common with stored chunks, in columns, all of one number of dimensions."""

    shard: Ints
    """Its place among all shards."""
    chunk: Ints
    """Its row in the checkpoint's columns."""
    chunk_sizes: Ints
    """(overlaps, dimensions), as are the others."""
    in_chunk: Ints
    """Where the overlap begins in the chunk, in elements."""
    in_shard: Ints
    lengths: Ints


def overlaps(catalog: Catalog, numbers: Ints, shards: Shards) -> Iterator[Overlaps]:
    """What ``shards`` have in common with the stored chunks of their tensors, which have these ``numbers``."""
    firsts = starts_of(catalog.counts)
    values = starts_of(catalog.ndims * catalog.counts)
    ndims = catalog.ndims[numbers]
    for ndim in distinct(ndims):
        alike = np.flatnonzero(ndims == ndim)
        for chosen in _bounded(alike, catalog.counts[numbers[alike]]):
            tensors = numbers[chosen]
            counts = catalog.counts[tensors]
            pair = np.repeat(np.arange(len(chosen)), counts)
            place = positions(np.zeros(len(chosen), np.int64), counts)
            at = (values[tensors][pair] + place * ndim)[:, None] + np.arange(ndim)
            offsets, sizes = catalog.offsets[at], catalog.sizes[at]
            begins, lengths = shards.places(chosen, ndim)
            low = np.maximum(offsets, begins[pair])
            high = np.minimum(offsets + sizes, (begins + lengths)[pair])
            hit = np.flatnonzero((low < high).all(axis=1))
            pair, low, high = pair[hit], low[hit], high[hit]
            yield Overlaps(
                chosen[pair],
                firsts[tensors][pair] + place[hit],
                sizes[hit],
                low - offsets[hit],
                low - begins[pair],
                high - low,
            )


def rows_of(column: Ints) -> list[Sizes]:
    """(N, dimensions): the rows as tuples."""
    return list(zip(*column.T.tolist(), strict=True)) if column.shape[1] else [()] * len(column)


def _bounded(rows: Ints, counts: Ints) -> Iterator[Ints]:
    """``rows`` in parts of about :data:`_MOST_PAIRS` by their ``counts``."""
    part = starts_of(counts) // _MOST_PAIRS
    for each in distinct(part):
        yield rows[part == each]


def is_elsewhere(value: Any) -> bool:
    """Whether it is a DTensor of whose mesh this rank is no part: it holds nothing of it."""
    return isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None


def overlap(one: Box, other: Box) -> Box:
    """What two boxes have in common; dimensions may end before they begin."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def volume(place: Box) -> int:
    """The number of elements."""
    return math.prod(end - begin for begin, end in place)


def cut(tensor: torch.Tensor, begins: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that begins there, in elements, and has these ``lengths``."""
    for dimension, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        if length != tensor.size(dimension):
            tensor = tensor.narrow(dimension, begin, length)
    return tensor
