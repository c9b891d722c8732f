"""Checks the columns of a checkpoint's metadata for everything that readers rely on: lengths, ranges, and places.

A checksum detects damage, but not malice, and a user's planner may have defects. So this checks all that
:mod:`dcp_datastates.io.restore` and DCP's load planners rely on, before a file is written and when it is opened. A
checkpoint may have millions of chunks, so all work per chunk is done on columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.key_paths import check_paths
from dcp_datastates.format.layout import file_bytes
from dcp_datastates.format.metadata_table import Catalog, FileRecord, Placement, once
from dcp_datastates.format.ragged import Ints, distinct, positions, starts_of, sums, volumes
from dcp_datastates.format.stored_names import wrappers
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
    chunk_bytes = volumes(np.repeat(catalog.ndims, catalog.counts), catalog.sizes)
    chunk_bytes *= np.repeat(itemsize, catalog.counts)
    return _Sound(chunk_bytes, largest, name)


def _check_lengths(catalog: Catalog) -> None:
    """Check the columns' lengths. Only bounded numbers are summed, so no sum overflows."""
    count = len(catalog.names)
    if len(catalog.number) != count:
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
    with np.errstate(
        all="ignore"
    ):  # of sizes that are made up; without a number where one of them is 0
        estimates = volumes(catalog.ndims, catalog.shapes.astype(np.float64)) * itemsize
    number = int(np.nan_to_num(estimates, nan=0.0).argmax())
    shape = catalog.shape(number)
    nbytes = math.prod(shape) * int(itemsize[number])
    if nbytes > MAX_BYTES:
        raise ValueRefused(
            f"{described(catalog.names[number])}: {described(str(list(shape)))} is larger than any tensor"
        )
    return nbytes, catalog.names[number]


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
            f"bytes of {_name(catalog, int(beyond[0]))} are said to lie beyond the end of their data file"
        )
    begins = offsets + (np.cumsum(limits) - limits)[files]
    # Spans do not overlap if and only if, at each begin, as many spans have ended as have begun before it.
    if (np.sort(begins)[1:] < np.sort(begins + lengths)[:-1]).any():
        some = np.flatnonzero(lengths)
        order = some[np.argsort(begins[some], kind="stable")]
        reach = np.maximum.accumulate((begins + lengths)[order])
        at = int(np.flatnonzero(begins[order[1:]] < reach[:-1])[0])
        one, other = (_name(catalog, int(row)) for row in order[at : at + 2])
        raise ValueRefused(f"places overlap: bytes of {other} lie where those of {one} do")


def _name(catalog: Catalog, row: int) -> str:
    """The name that a placement's row belongs to."""
    return described(catalog.names[int(catalog.owners()[row])])


# ---- chunks: within their tensors, without overlaps ----------------------------------------------
# As stock DCP requires. Overlaps are found without comparing pairs: along one dimension, the chunks of a tensor fall
# into clusters that do not touch; each cluster is divided in the same way along the next dimension. Grids, and all
# shardings of parallel training, are divided until every chunk is alone. Only chunks that cannot be separated are
# compared in pairs.


_STEPS_PER_BOX: Final = 64
_SPARE_STEPS: Final = 1 << 20


def validate(catalog: Catalog, *, filled: bool) -> list[str]:
    """The faults found, in the order of names: per tensor, one message for each kind of fault, for the first chunk.

    ``filled``: the chunks must cover each tensor (stock DCP requires this with more than one rank). As in stock DCP,
    tensors without dimensions are not checked.

    Raises :class:`ValueRefused` if the check for overlaps would take longer than for the chunks of any real job: the
    catalog may come from an untrusted file.
    """
    chunks = _Chunks(catalog)
    found = [*_out_of_bounds(catalog, chunks), *_overlaps(catalog, chunks)]
    if filled:
        found += _unfilled(catalog)
    return [message for _, message in sorted(found, key=lambda entry: entry[0])]


def check_covered(
    name: str, shape: Sequence[int], chunk_sizes: Iterable[Sequence[int]], way_out: str
) -> None:
    """Raise :class:`IncompatibleStateError` unless chunks that do not overlap cover the tensor."""
    stored = sum(map(math.prod, chunk_sizes))
    if stored != math.prod(shape):
        raise IncompatibleStateError(
            f"of {name!r}, {stored} of {math.prod(shape)} elements are stored (a rank saved its shard alone?); "
            f"{way_out}"
        )


def elements(catalog: Catalog) -> tuple[Ints, Ints]:
    """For each name, the elements of the tensor, and those of its chunks together; 1 and 0 for an object."""
    stored = sums(catalog.counts, volumes(_Chunks(catalog).ndims, catalog.sizes))
    return volumes(catalog.ndims, catalog.shapes), stored


class _Chunks:
    """C chunks: for each, the tensor, the dimensions and the position in the ragged columns."""

    def __init__(self, catalog: Catalog) -> None:
        self.tensor = np.repeat(np.arange(len(catalog.names)), catalog.counts)
        self.ndims = catalog.ndims[self.tensor]
        self.starts = starts_of(self.ndims)


def _out_of_bounds(catalog: Catalog, chunks: _Chunks) -> Iterator[tuple[int, str]]:
    where = positions(starts_of(catalog.ndims)[chunks.tensor], chunks.ndims)
    offsets, sizes = catalog.offsets, catalog.sizes
    outside = (offsets < 0) | (sizes < 0) | (sizes > catalog.shapes[where] - offsets)
    if not outside.any():
        return
    chunk = np.repeat(np.arange(len(chunks.tensor)), chunks.ndims)[outside]
    tensors, first = np.unique(chunks.tensor[chunk], return_index=True)
    for tensor, at in zip(tensors.tolist(), chunk[first].tolist(), strict=True):
        what = f"tensor-size:{catalog.shape(tensor)} chunk: {_box(catalog, chunks, at)}"
        yield tensor, f"key:{catalog.names[tensor]} has out of bounds chunk: {what}"


def _unfilled(catalog: Catalog) -> Iterator[tuple[int, str]]:
    volume, stored = elements(catalog)
    wrong = (stored != volume) & (catalog.ndims > 0)
    if not wrong.any():
        return
    split = wrappers(catalog.names)
    for tensor in np.flatnonzero(wrong).tolist():
        name = catalog.names[tensor]
        figures = f"tensor-volume: {volume[tensor]} chunks-volume: {stored[tensor]}"
        cause = (
            ": its shards are wrapper subclasses on some ranks and plain tensors on others, which cannot be stored; "
            "torchao leaves small and empty shards plain, so shard this tensor evenly, or keep it out of the optimizer "
            "with low-bit states"
            if name in split
            else ""
        )
        yield tensor, f"key:{name} invalid fill {figures}{cause}"


def _overlaps(catalog: Catalog, chunks: _Chunks) -> Iterator[tuple[int, str]]:
    several = catalog.counts[chunks.tensor] > 1
    for dimensions in distinct(chunks.ndims[several & (chunks.ndims > 0)]):
        members = np.flatnonzero(several & (chunks.ndims == dimensions))
        where = chunks.starts[members, np.newaxis] + np.arange(dimensions)
        begins = catalog.offsets[where]
        ends = begins + catalog.sizes[where]
        told = -1
        for cluster in _inseparable(chunks.tensor[members], begins, ends):
            tensor = int(chunks.tensor[members[cluster[0]]])
            if tensor == told:
                continue
            pair = _overlapping_pair(begins[cluster], ends[cluster])
            if pair is not None:
                told = tensor
                one, other = (_box(catalog, chunks, members[cluster[at]]) for at in pair)
                yield tensor, f"key:{catalog.names[tensor]} has overlapping chunks: {one} {other}"


def _inseparable(tensor: Ints, begins: Ints, ends: Ints) -> list[Ints]:
    """Boxes that no dimension separates, in lists of two or more, by tensor.

    ``tensor``: (M,), ascending; the corners are (M, D).
    """
    boxes, group = np.arange(len(tensor)), tensor
    dimensions = begins.shape[1]
    dimension = in_vain = steps = 0
    while len(boxes) and in_vain < dimensions:
        steps += len(boxes)
        _check_steps(steps, len(tensor) * dimensions)
        before = (len(boxes), np.count_nonzero(np.diff(group)))
        along = (begins[boxes, dimension], ends[boxes, dimension])
        kept, group = _separated(group, *along)
        boxes = boxes[kept]
        in_vain = in_vain + 1 if (len(boxes), np.count_nonzero(np.diff(group))) == before else 0
        dimension = (dimension + 1) % dimensions
    return np.split(boxes, np.flatnonzero(np.diff(group)) + 1) if len(boxes) else []


def _separated(group: Ints, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Clusters of two or more spans within each group: the spans' positions, by cluster; and the number of each span's
    cluster.
    """
    same = group[1:] == group[:-1]
    ascending = (begins[1:] > begins[:-1]) | ((begins[1:] == begins[:-1]) & (ends[1:] >= ends[:-1]))
    order = np.arange(len(group))
    if not (ascending | ~same).all():
        order = np.lexsort((ends, begins, group))
        group, begins, ends = group[order], begins[order], ends[order]
    first = np.ones(len(group), dtype=bool)
    first[1:] = group[1:] != group[:-1]
    first[1:] |= begins[1:] >= _reach(np.cumsum(first), ends)[:-1]
    cluster = np.cumsum(first) - 1
    kept = np.bincount(cluster)[cluster] > 1
    return order[kept], cluster[kept]


def _reach(group: Ints, ends: Ints) -> Ints:
    """The running maximum of the ends within each group (numbered from 1 on)."""
    least = ends.min()
    stride = int(ends.max() - least) + 1
    if stride < (1 << 62) // len(group):
        raised = np.maximum.accumulate(ends - least + group * stride)
        reach: Ints = raised - group * stride + least
        return reach
    values, rank = np.unique(ends, return_inverse=True)
    raised = np.maximum.accumulate(rank + group * len(values))
    return values[raised - group * len(values)]


def _check_steps(steps: int, boxes: int) -> None:
    if steps > _STEPS_PER_BOX * boxes + _SPARE_STEPS:
        raise ValueRefused("the chunks of a tensor are too entangled to see whether they overlap")


def _overlapping_pair(begins: Ints, ends: Ints) -> tuple[int, int] | None:
    """Two of these boxes that overlap; the corners are (n, D)."""
    along = int(np.argmax([len(np.unique(column)) for column in begins.T]))
    order = np.lexsort((ends[:, along], begins[:, along]))
    begins, ends = begins[order], ends[order]
    reach = np.searchsorted(begins[:, along], ends[:, along])
    _check_steps(int((reach - np.arange(len(order))).sum()), len(order))
    for at in np.flatnonzero(reach > np.arange(len(order)) + 1).tolist():
        later = slice(at + 1, reach[at])
        hit = ((begins[later] < ends[at]) & (begins[at] < ends[later])).all(axis=1)
        if hit.any():
            return int(order[at]), int(order[at + 1 + int(np.argmax(hit))])
    return None


def _box(catalog: Catalog, chunks: _Chunks, chunk: int) -> ChunkStorageMetadata:
    begin, end = int(chunks.starts[chunk]), int(chunks.starts[chunk] + chunks.ndims[chunk])
    return ChunkStorageMetadata(
        torch.Size(catalog.offsets[begin:end].tolist()),
        torch.Size(catalog.sizes[begin:end].tolist()),
    )
