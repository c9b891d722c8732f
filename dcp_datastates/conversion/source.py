"""What is converted or compared: named tensors that are read piece by piece, and named objects.

A range of a tensor is given by its first and last element in row-major order. Such a range may begin and end anywhere,
so that a file can be written in pieces of equal size, whatever tensors are in it.
"""

from __future__ import annotations

import abc
import io
import math
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.errors import CheckpointCorruptError, DataStatesError, UnsafeObjectError
from dcp_datastates.format.key_paths import EMPTY, KeyPath, empties, with_types
from dcp_datastates.format.metadata import DCP_VERSION
from dcp_datastates.format.nesting import nested
from dcp_datastates.format.validate import check_covered
from dcp_datastates.storage.object_path import Location

__all__ = [
    "DCPSource",
    "Part",
    "Source",
    "TensorInfo",
    "Want",
    "boxes",
    "metadata_of_source",
    "parts",
    "shards",
    "unpickled",
    "unsafe",
    "value_of",
]

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a source."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The dense size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def whole(self) -> ChunkStorageMetadata:
        """All of it, as one chunk."""
        return ChunkStorageMetadata(torch.Size([0] * len(self.shape)), torch.Size(self.shape))


@dataclass(frozen=True)
class Want:
    """Elements ``[begin, end)`` of a tensor, and where to put them: a tensor of ``end - begin`` elements, (N,), on the
    host, contiguous, of the source's dtype.
    """

    name: str
    begin: int
    end: int
    into: torch.Tensor


class Source(abc.ABC):
    """A checkpoint of any format, whose names, shapes and dtypes are known. Any thread may call its methods."""

    path: Location
    format: str
    """The format, for people."""
    tensors: Mapping[str, TensorInfo]
    """The tensors by name, in the order of the source."""
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
        return [
            name
            for name in empties(self.paths)
            if name not in self.tensors and name not in self.objects
        ]

    def chunks(self, name: str) -> Sequence[ChunkStorageMetadata]:
        """The chunks in which a tensor is stored."""
        return [self.tensors[name].whole]

    def parts(self, want: Want) -> Iterator[Part]:
        """The parts of :meth:`chunks` that make up what is wanted: see :func:`parts`."""
        return parts(self.tensors[want.name].shape, self.chunks(want.name), want)

    @abc.abstractmethod
    def fill(self, wants: Sequence[Want]) -> None:
        """Read the elements. Raises :class:`CheckpointCorruptError`, :class:`StorageError` and others of this
        package.
        """

    def object_bytes(self, name: str) -> bytes:
        """An object, as ``torch.save`` has written it."""
        raise KeyError(name)

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The nested state of ``values``, by names: all tensors and objects."""
        return nested(values, self.paths)


class DCPSource(Source):
    """A checkpoint that DCP's metadata describe."""

    def _describe(self, metadata: Metadata) -> None:
        self._metadata = metadata
        entries = dict(metadata.state_dict_metadata)
        self.tensors = {
            name: TensorInfo(entry.properties.dtype, tuple(entry.size))
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = dict.fromkeys(name for name in entries if name not in self.tensors)
        known = with_types(metadata.planner_data)
        self.paths = {
            name: path
            for name, path in (known.items() if isinstance(known, dict) else ())
            if type(path) is tuple and path and (name in entries or path[-1] == EMPTY)
            if set(map(type, path)) <= {str, int, tuple}
        }

    def chunks(self, name: str) -> Sequence[ChunkStorageMetadata]:
        """See :class:`Source`."""
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.chunks


def shards(source: Source, limit: int) -> list[list[str]]:
    """The names of each file's tensors: as many as fit into ``limit`` bytes, in the order of the source."""
    found: list[list[str]] = [[]]
    size = 0
    for name, info in source.tensors.items():
        if size and size + info.nbytes > limit:
            found.append([])
            size = 0
        found[-1].append(name)
        size += info.nbytes
    return found


def value_of(source: Source, name: str, allow_objects: bool) -> Any:
    """The object ``name`` as a Python value.

    Raises :class:`UnsafeObjectError` for one that needs more than torch's safe types, unless ``allow_objects``.
    """
    return unpickled(source.object_bytes(name), f"{source.path}: object {name!r}", allow_objects)


def unpickled(data: bytes, what: str, allow_objects: bool) -> Any:
    """What ``torch.save`` has written; ``what`` is for people. Raises as :func:`value_of`."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_objects)
    except pickle.UnpicklingError as error:
        if allow_objects:
            raise CheckpointCorruptError(f"{what} cannot be unpickled: {error}") from error
        raise unsafe(what, error) from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{what} cannot be unpickled: {type(error).__name__}: {error}"
        ) from error


def unsafe(said: str, error: BaseException, way_out: str = "exclude it") -> UnsafeObjectError:
    """The error for a pickle that needs more than torch's safe types; ``error`` is torch's."""
    found = re.search(r"Unsupported \w+: (.*?)(?: was not| whose|$)", str(error), re.MULTILINE)
    why = f" ({found[1][:200]})" if found else ""
    return UnsafeObjectError(
        f"{said} is pickled Python that may run code{why}; {way_out}, or trust the checkpoint with "
        f"allow_objects=True (--allow-objects)"
    )


def metadata_of_source(
    source: Source,
    chunks: Mapping[str, list[ChunkStorageMetadata]],
    places: dict[MetadataIndex, _StorageInfo],
    save_id: str | None = None,
) -> Metadata:
    """DCP's metadata of a checkpoint with the values of ``source``, whose tensors have these ``chunks``."""
    entries: dict[str, STORAGE_TYPES] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=info.dtype), torch.Size(info.shape), chunks[name]
        )
        for name, info in source.tensors.items()
    }
    entries.update((name, BytesStorageMetadata()) for name in source.objects)
    names = [*entries, *source.empty_dicts()]
    paths = {name: source.paths.get(name, (name,)) for name in names}
    return Metadata(entries, paths, places, StorageMeta(save_id=save_id), DCP_VERSION)


# --- ranges and boxes ---------------------------------------------------------------------------


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Elements ``[begin, end)`` of a tensor, as boxes in order: offsets and sizes, each contiguous in row-major order.

    There are at most two boxes for each dimension.
    """
    if begin < end and not shape:
        yield (), ()
        return
    while begin < end:
        dimension, inner = len(shape) - 1, 1  # inner: the elements of a row of the box
        while dimension and not begin % (row := inner * shape[dimension]) and row <= end - begin:
            dimension, inner = dimension - 1, row
        offsets = tuple(map(int, np.unravel_index(begin, shape)))
        rows = min((end - begin) // inner, shape[dimension] - offsets[dimension])
        yield offsets, (*[1] * dimension, rows, *shape[dimension + 1 :])
        begin += rows * inner


@dataclass(frozen=True)
class Part:
    """What a range has in common with one stored chunk."""

    chunk: int
    """The number of the chunk."""
    offsets: Offsets
    """Where the part begins in the chunk."""
    sizes: Offsets
    into: torch.Tensor
    """The part's place in the destination, of shape ``sizes``; it may be strided."""


def parts(
    shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata], want: Want
) -> Iterator[Part]:
    """The parts of ``chunks`` that make up the range. In a chunk, each part is contiguous.

    Raises :class:`IncompatibleStateError` unless the chunks cover the tensor.
    """
    way_out = f"leave it out with exclude={want.name!r}"
    check_covered(want.name, shape, (chunk.sizes for chunk in chunks), way_out)
    done = 0
    for offsets, sizes in boxes(shape, want.begin, want.end):
        count = math.prod(sizes)
        view = want.into[done : done + count].view(sizes)
        done += count
        for number, chunk in enumerate(chunks):
            lows = tuple(map(max, offsets, chunk.offsets))
            highs = tuple(
                min(a + m, b + n)
                for a, m, b, n in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            )
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            into = view
            for dimension, (low, high, start) in enumerate(zip(lows, highs, offsets, strict=True)):
                into = into.narrow(dimension, low - start, high - low)
            yield Part(
                number,
                tuple(low - start for low, start in zip(lows, chunk.offsets, strict=True)),
                tuple(into.shape),
                into,
            )
