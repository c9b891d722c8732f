"""Whether a Metadata object is what DCP's readers take it for: types, ranges, and places within files.

An allow-listed pickle can still give an object attributes of any type and any number. What
:mod:`dcp_datastates.restore` and DCP's load planners rely on is checked here once, so that nothing
after it meets a surprise. A checkpoint has millions of chunks, so whatever is done per chunk is done by
``map`` over columns of attributes, at the speed of C.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from operator import add, attrgetter, gt
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.dcp.fields import complete, is_field_name, known_fields

from .chunk_table import Catalog
from .ragged import volumes

__all__ = ["MAX_BYTES", "MetadataError", "check", "check_columns", "described"]

MAX_BYTES: Final = (1 << 63) - 1
"""What a file offset can be (``off_t``), and what torch takes as a size."""

_NoneType: Final = type(None)
_OPTIONAL: Final[Mapping[type, frozenset[str]]] = {
    MetadataIndex: frozenset({"offset", "index"}),
    _StorageInfo: frozenset({"transform_descriptors"}),
    StorageMeta: known_fields(StorageMeta),
}
"""Fields that a file may leave to the class's default."""

_MAX_SPARSITY: Final = 1 << 16
"""How many times the data files' bytes a tensor may be: a rank that saves alone stores its shard only."""

_SPARE_LIST_ITEMS: Final = 1 << 24
"""Items of lists that ``planner_data`` may name no value for, in all: 128 MiB, which a planner that keeps
other tuples there does not reach."""


class MetadataError(ValueError):
    """The metadata are malformed; the message says where."""


def described(value: object) -> str:
    """``value`` for a message, whatever a file made of it: short, and without walking through it."""
    if value is None or isinstance(value, (bool, int, str)):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}…"
    return f"a {type(value).__name__}"


def check(metadata: Metadata, limits: Mapping[str, int]) -> None:
    """Raise :class:`MetadataError` unless all that DCP defines in ``metadata`` is well-formed.

    ``limits`` are the data files by their relative paths, with the number of bytes (header and all) that
    tensors and objects may lie in. Linear in the size of the metadata.
    """
    if "state_dict_metadata" not in vars(metadata):
        raise MetadataError("there is no state_dict_metadata")
    complete(Metadata, [metadata])
    entries = metadata.state_dict_metadata
    if type(entries) is not dict:
        raise MetadataError(f"state_dict_metadata is {described(entries)}, not a dict")
    if not set(map(type, entries)) <= {str}:
        raise MetadataError("a name in state_dict_metadata is no string")
    checked: set[int] = set()  # entries share their properties in stock metadata
    stored, largest, name = 0, 0, ""
    for fqn, entry in entries.items():
        if type(entry) is TensorStorageMetadata:
            try:
                in_chunks, dense = _check_tensor(entry, checked)
            except MetadataError as error:
                raise MetadataError(f"{described(fqn)}: {error}") from None
            stored += in_chunks
            if dense > largest:
                largest, name = dense, fqn
        elif type(entry) is BytesStorageMetadata:
            _check_attributes("an object", [entry], BytesStorageMetadata)
        else:
            raise MetadataError(
                f"{described(fqn)} is {described(entry)}, neither tensor nor object"
            )
    if type(metadata.version) not in (str, _NoneType):
        raise MetadataError(f"version is {described(metadata.version)}")
    if metadata.storage_meta is not None:
        if type(metadata.storage_meta) is not StorageMeta:
            raise MetadataError(f"storage_meta is {described(metadata.storage_meta)}")
        _check_attributes("storage_meta", [metadata.storage_meta], StorageMeta)
    _check_storage_data(metadata.storage_data)
    _check_places(metadata.storage_data, limits)
    _check_extent(_Extent(stored, largest, name), limits)
    _check_paths(metadata.planner_data, entries)


def check_columns(catalog: Catalog, limits: Mapping[str, int]) -> None:
    """Raise :class:`MetadataError` if :func:`check` would, of metadata made from these columns, for what they say.

    What a planner makes sure of, that chunks lie within their tensors, is not asked again. Linear in the size of
    the catalog the first time; then a sum over the files.
    """
    extent = _extents.get(catalog)
    if extent is None:
        extent = _extents[catalog] = _extent(catalog)
    _check_extent(extent, limits)


class _Extent(NamedTuple):
    """How large the tensors are said to be, in bytes."""

    stored: int
    """All chunks."""
    largest: int
    """The largest tensor, whole."""
    name: str


_extents: weakref.WeakKeyDictionary[Catalog, _Extent] = weakref.WeakKeyDictionary()
"""Of catalogs that were found to be sound."""


def _extent(catalog: Catalog) -> _Extent:
    for properties in catalog.table:
        _check_properties(properties)
    if catalog.mappings is not None:
        _check_paths(catalog.mappings, catalog.names)
    itemsizes = np.array([*(each.dtype.itemsize for each in catalog.table), 0], np.int64)
    itemsize = itemsizes[catalog.properties]
    sizes = iter(catalog.shapes.tolist())
    largest, largest_name = 0, ""
    for name, ndim, nbytes in zip(
        catalog.names, catalog.ndims.tolist(), itemsize.tolist(), strict=True
    ):
        try:
            dense = _dense(list(islice(sizes, ndim)), nbytes)
        except MetadataError as error:
            raise MetadataError(f"{described(name)}: {error}") from None
        if dense > largest:
            largest, largest_name = dense, name
    of_chunk = np.repeat(np.arange(len(catalog.names)), catalog.counts)
    in_chunks = volumes(catalog.ndims[of_chunk], catalog.sizes) * itemsize[of_chunk]
    return _Extent(sum(in_chunks.tolist()), largest, largest_name)


def _dense(size: Sequence[int], itemsize: int) -> int:
    """Bytes of a whole tensor."""
    nbytes = math.prod(size) * itemsize
    if nbytes > MAX_BYTES:
        raise MetadataError(f"{described(str(list(size)))} is larger than any tensor")
    return nbytes


def _check_extent(extent: _Extent, limits: Mapping[str, int]) -> None:
    """DCP's planners make tensors of the sizes that the metadata give."""
    there = sum(limits.values())
    if extent.stored > there or extent.largest > _MAX_SPARSITY * there:
        raise MetadataError(
            f"tensors are said to be larger than the {there} bytes of the data files: {described(extent.name)} has "
            f"{extent.largest}"
        )


def _check_attributes(what: str, objects: Collection[object], kind: type) -> None:
    """Fields that this release does not know may come from another torch: they are kept, and nothing relies on them."""
    known = known_fields(kind)
    required = known - _OPTIONAL.get(kind, frozenset())
    for names in set(map(tuple, map(vars, objects))):
        if not required <= set(names):
            raise MetadataError(f"{what} has not all the attributes that DCP gives it")
        for name in set(names) - known:
            if not is_field_name(kind, name):
                raise MetadataError(f"{what} has an attribute {described(name)}, no field of DCP's")
    complete(kind, objects)


def _check_types(what: str, values: Iterable[object], *allowed: type) -> None:
    for kind in set(map(type, values)):
        if kind not in allowed:
            raise MetadataError(f"{what} is a {kind.__name__}")


def _check_sizes(what: str, values: Collection[int]) -> None:
    _check_types(what, values, int)
    if values and (min(values) < 0 or max(values) > MAX_BYTES):
        raise MetadataError(f"{what} is negative or beyond what any file can hold")


def _check_tensor(entry: TensorStorageMetadata, checked: set[int]) -> tuple[int, int]:
    """The bytes of all its chunks, and of the tensor."""
    _check_attributes("a tensor", [entry], TensorStorageMetadata)
    properties = entry.properties
    if id(properties) not in checked:
        _check_properties(properties)
        checked.add(id(properties))
    size = entry.size
    _check_types("its size", [size], torch.Size)
    _check_sizes("its size", size)
    itemsize = properties.dtype.itemsize
    dense = _dense(size, itemsize)
    chunks = entry.chunks
    _check_types("its list of chunks", [chunks], list)
    _check_types("a chunk", chunks, ChunkStorageMetadata)
    _check_attributes("a chunk", chunks, ChunkStorageMetadata)
    offsets = list(map(attrgetter("offsets"), chunks))
    sizes = list(map(attrgetter("sizes"), chunks))
    _check_types("the offset of a chunk", offsets, torch.Size)
    _check_types("the size of a chunk", sizes, torch.Size)
    if not set(map(len, offsets)) | set(map(len, sizes)) <= {len(size)}:
        raise MetadataError("a chunk has another number of dimensions than its tensor")
    for total, starts, lengths in zip(
        size, zip(*offsets, strict=True), zip(*sizes, strict=True), strict=False
    ):
        if min(starts) < 0 or min(lengths) < 0 or max(map(add, starts, lengths)) > total:
            raise MetadataError("a chunk lies outside of its tensor")
    return sum(map(math.prod, sizes)) * itemsize, dense


def _check_properties(properties: TensorProperties) -> None:
    _check_types("its properties", [properties], TensorProperties)
    _check_attributes("its properties", [properties], TensorProperties)
    _check_types("its dtype", [properties.dtype], torch.dtype)
    _check_types("its layout", [properties.layout], torch.layout)
    _check_types("its memory format", [properties.memory_format], torch.memory_format)
    _check_types("its properties", [properties.requires_grad, properties.pin_memory], bool)


def _check_storage_data(storage_data: Any) -> None:
    if type(storage_data) is not dict:
        raise MetadataError(f"storage_data is {described(storage_data)}, not a dict")
    _check_types("a key of storage_data", storage_data, MetadataIndex)
    _check_attributes("a key of storage_data", storage_data, MetadataIndex)
    _check_types("a name in storage_data", map(attrgetter("fqn"), storage_data), str)
    _check_types(
        "an offset in storage_data", map(attrgetter("offset"), storage_data), torch.Size, _NoneType
    )
    _check_types("an index in storage_data", map(attrgetter("index"), storage_data), int, _NoneType)
    places = storage_data.values()
    _check_types("a place in storage_data", places, _StorageInfo)
    _check_attributes("a place in storage_data", places, _StorageInfo)
    _check_types("the file of a place", map(attrgetter("relative_path"), places), str)
    _check_sizes("the offset of a place", list(map(attrgetter("offset"), places)))
    _check_sizes("the length of a place", list(map(attrgetter("length"), places)))
    # They say nothing to this package (see refusal.py), and one tuple is shared by all places.
    descriptors = {id(each): each for each in map(attrgetter("transform_descriptors"), places)}
    _check_types("a transformation", descriptors.values(), tuple, _NoneType)
    for each in descriptors.values():
        _check_types("a transformation", each or (), str)


def _check_places(
    storage_data: Mapping[MetadataIndex, _StorageInfo], limits: Mapping[str, int]
) -> None:
    places = storage_data.values()
    paths = list(map(attrgetter("relative_path"), places))
    for path in set(paths):
        if path not in limits:
            raise MetadataError(f"data file {described(path)} is not described")
    ends = map(add, map(attrgetter("offset"), places), map(attrgetter("length"), places))
    if any(map(gt, ends, map(limits.__getitem__, paths))):
        raise MetadataError("bytes are said to lie behind the end of their data file")
    if sum(map(attrgetter("length"), places)) > sum(limits.values()):
        raise MetadataError("places overlap")


# --- a flattened state dict's paths ------------------------------------------------------------------


def _check_paths(planner_data: Any, entries: Iterable[str]) -> None:
    """Stock planners rebuild the nested state from ``planner_data``: names' paths of keys and list indices.

    A list grows to the largest index in it, which must not be just any number in a file. What else
    a planner keeps there is its own business.
    """
    if not isinstance(planner_data, dict):
        return
    indices: set[tuple[object, ...]] = set()
    largest: dict[tuple[object, ...], int] = {}
    for fqn in entries:
        path = planner_data.get(fqn)
        if type(path) is not tuple or not set(map(type, path)) <= {str, int}:
            continue
        for depth, key in enumerate(path):
            if type(key) is not int:
                continue
            if key < 0:
                raise MetadataError(f"the path of {described(fqn)} has a negative index")
            indices.add(path[: depth + 1])
            largest[path[:depth]] = max(largest.get(path[:depth], 0), key)
    if sum(largest.values(), len(largest)) > 16 * len(indices) + _SPARE_LIST_ITEMS:
        raise MetadataError("planner_data describe lists that are longer than what is in them")
