"""Checks that a catalog's chunks lie within their tensors, do not overlap, and cover them, as stock DCP requires.

Overlaps are found without comparing pairs: along one dimension, the chunks of a tensor fall into clusters that do not
touch; each cluster is divided in the same way along the next dimension. Grids, and all shardings of parallel training,
are divided until every chunk is alone. Only chunks that cannot be separated are compared in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.metadata_table import Catalog, Ints
from dcp_datastates.format.ragged import distinct, positions, starts_of, sums, volumes
from dcp_datastates.format.stored_names import wrappers
from dcp_datastates.format.values import ValueRefused

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
        what = f"tensor-size:{_shape(catalog, tensor)} chunk: {_box(catalog, chunks, at)}"
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


def _shape(catalog: Catalog, tensor: int) -> torch.Size:
    begin = int(catalog.ndims[:tensor].sum())
    return torch.Size(catalog.shapes[begin : begin + int(catalog.ndims[tensor])].tolist())


def _box(catalog: Catalog, chunks: _Chunks, chunk: int) -> ChunkStorageMetadata:
    begin, end = int(chunks.starts[chunk]), int(chunks.starts[chunk] + chunks.ndims[chunk])
    return ChunkStorageMetadata(
        torch.Size(catalog.offsets[begin:end].tolist()),
        torch.Size(catalog.sizes[begin:end].tolist()),
    )
