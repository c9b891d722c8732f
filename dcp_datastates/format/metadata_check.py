"""Checks the columns of a checkpoint's metadata for everything that readers rely on: lengths, ranges, and places.

A checksum detects damage, but not malice, and a user's planner may have defects. So this checks all that
:mod:`dcp_datastates.io.restore` and DCP's load planners rely on, before a file is written and when it is opened. A
checkpoint may have millions of chunks, so all work per chunk is done on columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from dcp_datastates.format.checksums import file_bytes
from dcp_datastates.format.key_paths import check_paths
from dcp_datastates.format.metadata_table import Catalog, FileRecord, Ints, Placement, once
from dcp_datastates.format.ragged import starts_of, volumes
from dcp_datastates.format.validate import validate
from dcp_datastates.format.values import ValueRefused, described

MAX_BYTES: Final = (1 << 63) - 1
"""The greatest file offset (``off_t``), and the greatest size in torch."""

_MAX_DIMENSIONS: Final = 64
"""The limit of torch."""

_MAX_SPARSITY: Final = 1 << 16
"""A tensor may be this many times larger than the data files: a rank that saves alone stores only its shard."""


def check(catalog: Catalog, placement: Placement, files: Mapping[str, FileRecord]) -> None:
    """Raise :class:`ValueRefused` unless the columns agree, chunks lie within their tensors without overlap, their
    bytes lie within the data files without overlap, and no tensor or list is too large for the stored bytes.

    ``files``: the records of ``placement.paths``. Linear in the size of the columns, except for sorting. Checks of the
    catalog alone run once per catalog.
    """
    sound = _check_catalog(catalog)
    for record in files.values():
        _check_file(record)
    if placement.paths != tuple(files):
        raise ValueRefused("the data files of places are not those that are described")
    limits = [record.table_offset for record in files.values()]
    there = sum(limits)
    if sound.largest > _MAX_SPARSITY * there or there > MAX_BYTES:
        raise ValueRefused(
            f"tensors are said to be larger than the {there} bytes of the data files: {described(sound.name)} has "
            f"{sound.largest}"
        )
    _check_places(catalog, placement, sound.chunk_bytes, np.array(limits, np.int64))


class _Sound(NamedTuple):
    """The sizes of a checked catalog, in bytes."""

    chunk_bytes: Ints
    """The bytes of each chunk."""
    largest: int
    """The bytes of the largest global tensor."""
    name: str


# --- tensors and chunks -------------------------------------------------------------------------------


@once
def _check_catalog(catalog: Catalog) -> _Sound:
    _check_lengths(catalog)
    itemsizes = np.array([*(each.dtype.itemsize for each in catalog.table), 0], np.int64)
    itemsize = itemsizes[catalog.properties]
    largest, name = _largest(catalog, itemsize)
    if wrong := validate(catalog, filled=False):
        raise ValueRefused(wrong[0])
    check_paths(catalog.mappings, catalog.names)
    of_chunk = np.repeat(np.arange(len(catalog.names)), catalog.counts)
    chunk_bytes = volumes(catalog.ndims[of_chunk], catalog.sizes) * itemsize[of_chunk]
    return _Sound(chunk_bytes, largest, name)


def _check_lengths(catalog: Catalog) -> None:
    """Check the columns' lengths. Only bounded numbers are summed, so no sum overflows."""
    count = len(catalog.names)
    if len(set(catalog.names)) != count:
        raise ValueRefused("a name is there twice")
    for name in ("properties", "ndims", "counts"):
        if len(getattr(catalog, name)) != count:
            raise ValueRefused(f"{name} has another length than names")
    _check_range("properties", catalog.properties, len(catalog.table), least=-1)
    _check_range("ndims", catalog.ndims, _MAX_DIMENSIONS + 1)
    _check_range("counts", catalog.counts, len(catalog.offsets) + count + 1)
    _check_range("shapes", catalog.shapes, MAX_BYTES)
    objects = catalog.properties < 0
    if catalog.ndims[objects].any() or catalog.counts[objects].any():
        raise ValueRefused("an object has dimensions or chunks")
    scalars = catalog.ndims == 0
    if (catalog.counts[scalars] > 1).any():
        raise ValueRefused("a tensor without dimensions has several chunks")
    if int(catalog.ndims.sum()) != len(catalog.shapes):
        raise ValueRefused("shapes has another length than its tensors have dimensions")
    in_chunks = sum(map(int.__mul__, catalog.ndims.tolist(), catalog.counts.tolist()))
    if not in_chunks == len(catalog.offsets) == len(catalog.sizes):
        raise ValueRefused("offsets and sizes have other lengths than their chunks have dimensions")


def _largest(catalog: Catalog, itemsize: Ints) -> tuple[int, str]:
    """Bytes of the largest tensor, and its name."""
    if not catalog.names:
        return 0, ""
    starts = starts_of(catalog.ndims)
    with np.errstate(over="ignore", invalid="ignore"):
        roughly = volumes(catalog.ndims, catalog.shapes.astype(np.float64)) * itemsize
    for number in np.flatnonzero(~(roughly < MAX_BYTES / 2)).tolist():  # an infinity times 0 too
        shape = catalog.shapes[starts[number] : starts[number] + catalog.ndims[number]].tolist()
        if math.prod(shape) * int(itemsize[number]) > MAX_BYTES:
            raise ValueRefused(
                f"{described(catalog.names[number])}: {described(str(shape))} is larger than any tensor"
            )
    dense = volumes(catalog.ndims, catalog.shapes) * itemsize
    number = int(np.argmax(dense))
    return int(dense[number]), catalog.names[number]


def _check_range(what: str, values: Ints, limit: int, least: int = 0) -> None:
    if len(values) and (values.min() < least or values.max() >= limit):
        raise ValueRefused(f"{what} has a value that is negative or too large")


# --- files and places ---------------------------------------------------------------------------------


def _check_file(record: FileRecord) -> None:
    name = record.relative_path
    if "\0" in name or not name.isprintable():
        raise ValueRefused(f"a data file is called {described(name)}")
    if not {"", ".", ".."}.isdisjoint(name.split("/")):  # an absolute path begins with ""
        raise ValueRefused(f"data file {described(name)} lies outside the checkpoint")
    table = record.table_offset
    if (
        not 0 < table < record.nbytes <= MAX_BYTES
        or table % 4
        or record.nbytes != file_bytes(table)
    ):
        raise ValueRefused(
            f"data file {described(name)} cannot be {record.nbytes} bytes long with its checksums at {table}"
        )


def _check_places(catalog: Catalog, placement: Placement, chunk_bytes: Ints, limits: Ints) -> None:
    count = len(chunk_bytes) + int((catalog.properties < 0).sum())
    for column in ("files", "begins", "lengths"):
        if len(getattr(placement, column)) != count:
            raise ValueRefused(f"{column} has another length than there are chunks and objects")
    files, offsets, lengths = placement.files, placement.begins, placement.lengths
    _check_range("the files of places", files, len(limits))
    _check_range("the offset of a place", offsets, MAX_BYTES)
    _check_range("the length of a place", lengths, MAX_BYTES)
    wrong = np.flatnonzero(lengths[: len(chunk_bytes)] != chunk_bytes)
    if len(wrong):
        at = int(wrong[0])
        raise ValueRefused(
            f"a chunk of {_name(catalog, at)} has {chunk_bytes[at]} bytes, and {lengths[at]} in its data file"
        )
    beyond = np.flatnonzero(offsets > limits[files] - lengths)
    if len(beyond):
        raise ValueRefused(
            f"bytes of {_name(catalog, int(beyond[0]))} are said to lie behind the end of their data file"
        )
    begins = offsets + (np.cumsum(limits) - limits)[files]
    some = np.flatnonzero(lengths)
    first, last = np.sort(begins[some]), np.sort(begins[some] + lengths[some])
    # Spans do not overlap if and only if, at each begin, as many spans have ended as have begun before it.
    if (first[1:] < last[:-1]).any():
        order = some[np.argsort(begins[some], kind="stable")]
        reach = np.maximum.accumulate((begins + lengths)[order])
        at = int(np.flatnonzero(begins[order[1:]] < reach[:-1])[0])
        one, other = (_name(catalog, int(row)) for row in order[at : at + 2])
        raise ValueRefused(f"places overlap: bytes of {other} lie where those of {one} do")


def _name(catalog: Catalog, row: int) -> str:
    """The name that a placement's row belongs to."""
    return described(catalog.names[int(catalog.owners()[row])])
