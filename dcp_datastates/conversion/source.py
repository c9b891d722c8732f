"""What is converted or compared: a flat state of tensors and objects, which are read when they are asked for.

A tensor is read by boxes, each of which is one run of its elements in row-major order. So memory does not depend on the
sizes of tensors.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.key_paths import EMPTY, KeyPath, empties, nested, with_types
from dcp_datastates.storage.object_path import Location


class Box(NamedTuple):
    """Elements of a tensor, adjacent in row-major order."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box, as DCP says it."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of the whole tensor."""
        ends = map(sum, zip(self.offsets, self.sizes, strict=True))
        return tensor[tuple(map(slice, self.offsets, ends))]


class Source(abc.ABC):
    """A checkpoint of any format. Any thread may call its methods."""

    path: Location
    format: str
    """The format, for people."""
    tensors: Mapping[str, torch.Tensor]
    """Tensors without data, on the device "meta", in the order of the source."""
    objects: Collection[str] = ()
    """The names of objects, in the order of the source."""
    refusals: Mapping[str, DataStatesError] = {}
    """For each of the tensors that cannot be read as it is stored, why."""
    paths: Mapping[str, KeyPath] = {}
    """Where values and empty dicts lie in the nested state, as far as the source knows. No other names."""

    def names(self) -> list[str]:
        """The names of all values."""
        return [*self.tensors, *self.objects]

    def empty_dicts(self) -> list[str]:
        """The names of empty dicts, which have no value."""
        values = {*self.tensors, *self.objects}
        return [name for name in empties(self.paths) if name not in values]

    def all_paths(self) -> dict[str, KeyPath]:
        """The path of each value and of each empty dict."""
        names = [*self.names(), *self.empty_dicts()]
        return {name: self.paths.get(name, (name,)) for name in names}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors.values())

    @abc.abstractmethod
    def read(self, wanted: Sequence[Box]) -> list[torch.Tensor]:
        """The boxes, on the host. They may lie in a mapped file: the caller changes nothing in them.

        Raises :class:`CheckpointCorruptError`, :class:`StorageError` and others of this package.
        """

    def whole(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The tensors of these names, in memory of their own or mapped."""
        shapes = [tuple(self.tensors[name].shape) for name in names]
        pairs = zip(names, shapes, strict=True)
        return self.read([Box(name, (0,) * len(shape), shape) for name, shape in pairs])

    @abc.abstractmethod
    def object_bytes(self, name: str) -> bytes:
        """An object, as ``torch.save`` has written it."""

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The nested state of ``values``, by names: all tensors and objects."""
        return nested(values, self.paths)


def known_paths(paths: Any, names: Container[str]) -> dict[str, KeyPath]:
    """Of the ``paths`` in metadata, those of values called ``names`` and of empty dicts, if they are well-formed."""
    found = with_types(paths)
    return {
        name: path
        for name, path in (found.items() if isinstance(found, dict) else ())
        if type(path) is tuple and path and (name in names or path[-1] == EMPTY)
        if set(map(type, path)) <= {str, int, tuple}
    }


def shape_of(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def boxes(name: str, shape: Sequence[int], most: int) -> Iterator[Box]:
    """A tensor, in order: as many rows at a time as have at most ``most`` elements, or one element."""
    cut, inner = (
        len(shape),
        1,
    )  # the first dimension of which a box has all, and the elements of a row
    while cut and inner * shape[cut - 1] <= most:
        cut -= 1
        inner *= shape[cut]
    if not cut:
        yield Box(name, (0,) * len(shape), tuple(shape))
        return
    *outer, length = shape[:cut]
    rows, rest = max(1, most // inner), tuple(shape[cut:])
    for place in itertools.product(*map(range, outer)):
        for first in range(0, length, rows):
            offsets = (*place, first, *[0] * len(rest))
            yield Box(name, offsets, (*[1] * len(outer), min(rows, length - first), *rest))


def batches(source: Source, names: Iterable[str], most: int) -> Iterator[list[Box]]:
    """The tensors of these names, in order: boxes that have at most ``most`` bytes together."""
    batch: list[Box] = []
    room = most
    for name in names:
        shaped = source.tensors[name]
        itemsize = shaped.dtype.itemsize
        for box in boxes(name, shaped.shape, max(1, most // itemsize)):
            nbytes = math.prod(box.sizes) * itemsize
            if batch and nbytes > room:
                yield batch
                batch, room = [], most
            batch.append(box)
            room -= nbytes
    if batch:
        yield batch


def shards(source: Source, limit: int) -> list[list[str]]:
    """The names of each file's tensors: as many as fit into ``limit`` bytes, in the order of the source."""
    found: list[list[str]] = [[]]
    size = 0
    for name, shaped in source.tensors.items():
        if size and size + shaped.nbytes > limit:
            found.append([])
            size = 0
        found[-1].append(name)
        size += shaped.nbytes
    return found


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor on the host, in row-major order: its own memory, if they lie so."""
    if not tensor.numel():
        return memoryview(b"")
    data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)
