"""Which blocks a load needs, and which rank reads them if several ranks need them: pure functions.

The checkpoint's blocks have numbers (:class:`Blocks`). Blocks that follow each other, and that the same ranks need, are
a span. A span is cut into units of up to :data:`UNIT_BLOCKS`, which its readers own in turn. A rank receives the spans
that it needs, and derives units and owners from them: so the coordinator sends a few numbers for each run of blocks.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from dcp_datastates._native import BLOCK_BYTES, SEGMENT_BYTES
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.format.ragged import Ints, groups
from dcp_datastates.io.reads import Reads, Sizes
from dcp_datastates.io.tensor_memory import dense_strides
from dcp_datastates.planning.packing import Message
from dcp_datastates.wire.secret import Address

UNIT_BLOCKS: Final = SEGMENT_BYTES // BLOCK_BYTES
"""What the engine reads at once."""

MOST_READERS: Final = 64
"""Ranks that share what one of them reads, and to each of which it sends it. More ranks make several groups, each of
which reads once.
"""

LEAST_REPEATED: Final = 0.04
"""Less than this part of all bytes is not worth sharing: blocks at the edges of FSDP's shards, which two ranks need."""


class FileBlocks(NamedTuple):
    """Of one data file: its relative path, the number of its first block, and the end of its data, in bytes."""

    name: str
    first: int
    nbytes: int


def blocks_of(files: Mapping[str, FileRecord]) -> dict[str, FileBlocks]:
    """The numbers of the blocks of all data files, in order: the same on all ranks that load the same attempt.

    Between the last block of a file and the first of the next one, a number stays free: so no span lies in two files.
    """
    found, first = {}, 0
    for name in sorted(files):
        found[name] = FileBlocks(name, first, files[name].table_offset)
        first += -(-files[name].table_offset // BLOCK_BYTES) + 1
    return found


def needed_blocks(reads: Reads, blocks: Mapping[str, FileBlocks]) -> Ints:
    """(n, 2): the runs of blocks with bytes of ``reads``, the first block and the last plus 1; in order, and not
    adjacent. A file that the metadata do not describe has none: :mod:`restore` raises the error.
    """
    found = [np.empty((0, 2), np.int64)]
    for rows in groups(reads.files):
        file = blocks.get(reads.paths[reads.files[rows[0]]])
        if file is not None:
            begin, end = (np.clip(each, 0, file.nbytes) for each in _ranges(reads.take(rows)))
            found.append(
                file.first + np.stack([begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)], axis=1)
            )
    runs = np.concatenate(found)
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    runs = runs[runs[:, 0] < runs[:, 1]]
    reach = np.maximum.accumulate(runs[:, 1])
    starts = np.flatnonzero(np.r_[True, runs[1:, 0] > reach[:-1]][: len(runs)])
    stops = np.r_[starts[1:] - 1, len(runs) - 1][: len(starts)]
    return np.stack([runs[starts, 0], reach[stops]], axis=1)


def _ranges(reads: Reads) -> tuple[Ints, Ints]:
    """The begins and ends of the bytes in the file of all ``reads``, with gaps of less than a block included."""
    has_bytes, are_whole = reads.nbytes > 0, reads.are_whole
    whole = has_bytes & are_whole
    begins, ends = [reads.begins[whole]], [(reads.begins + reads.stored)[whole]]
    part = reads.take(np.flatnonzero(has_bytes & ~are_whole))
    columns = part.begins.tolist(), part.itemsizes.tolist()
    ragged = map(part.sizes, (part.chunk_sizes, part.offsets, part.lengths))
    for row in zip(*columns, *ragged, strict=True):
        first, length = _ranges_of_part(*row)
        begins.append(first)
        ends.append(first + length)
    return np.concatenate(begins), np.concatenate(ends)


def _ranges_of_part(
    begin: int, length: int, chunk_sizes: Sizes, offsets: Sizes, lengths: Sizes
) -> tuple[Ints, int]:
    """The begins of the ranges of a part of a chunk that begins there, and the length of each; ``length``: that of an
    element.
    """
    strides = dense_strides(chunk_sizes, length)
    begins = np.array([begin + sum(o * s for o, s in zip(offsets, strides, strict=True))], np.int64)
    for size, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if len(begins) == 1 and stride - length < BLOCK_BYTES:
            length += (size - 1) * stride
        else:
            begins = (np.arange(size, dtype=np.int64)[:, None] * stride + begins).ravel()
    return begins, length


# ---- who reads which -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Offer(Message):
    """What a rank that shares its reads tells the coordinator. ``address``: where it passes on what it reads, the
    fields of an :class:`~dcp_datastates.wire.secret.Address`. ``edges``: :attr:`runs`, one after the other.
    """

    address: tuple[Any, ...]
    edges: Ints

    @property
    def runs(self) -> Ints:
        """(n, 2), the first and the last block, plus 1, of each run of blocks that the rank needs; in order, and not
        adjacent.
        """
        return self.edges.reshape(-1, 2)


class Unit(NamedTuple):
    """The blocks [begin, end), which rank ``owner`` reads for all of so many ``readers``, itself included."""

    begin: int
    end: int
    owner: int
    readers: int

    @property
    def nbytes(self) -> int:
        """That it has at most: the last block of a file may be shorter."""
        return (self.end - self.begin) * BLOCK_BYTES


@dataclass(frozen=True, eq=False)
class Share(Message):
    """What rank ``rank`` shares.

    Attributes:
        spans: four numbers for each span, in order: the first block, the last plus 1, the number of its first unit, and
            its place in ``readers``. Unit u of a span belongs to reader u modulo their number.
        readers: the ranks that share a span, in order.
        others: the other ranks in ``readers``, each with the fields of its address.
    """

    rank: int
    spans: Ints
    readers: list[tuple[int, ...]]
    others: list[tuple[Any, ...]]

    @property
    def addresses(self) -> dict[int, Address]:
        """Of the other ranks in ``readers``."""
        return {rank: Address(*address) for rank, *address in self.others}

    @functools.cached_property
    def units(self) -> list[Unit]:
        """What the rank shares, in order."""
        found = []
        for begin, end, number, place in self.spans.reshape(-1, 4).tolist():
            readers = self.readers[place]
            for at, start in enumerate(range(begin, end, UNIT_BLOCKS), number):
                owner, stop = readers[at % len(readers)], min(start + UNIT_BLOCKS, end)
                found.append(Unit(start, stop, owner, len(readers)))
        return found

    @functools.cached_property
    def _begins(self) -> list[int]:
        return [unit.begin for unit in self.units]

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, Unit | None]]:
        """The blocks [begin, end), cut where another unit begins: first block, last plus 1, and the unit; None if no
        other rank needs them.
        """
        at = max(0, bisect_right(self._begins, begin) - 1)
        for unit in itertools.islice(self.units, at, bisect_left(self._begins, end)):
            if begin < unit.begin:
                yield begin, unit.begin, None
            begin = max(begin, unit.begin)
            if begin < unit.end:
                yield begin, min(unit.end, end), unit
                begin = min(unit.end, end)
        if begin < end:
            yield begin, end, None

    def own_units(self, runs: Ints) -> list[Unit]:
        """The units of this rank's that have a block of ``runs``, in order."""
        every = (unit for begin, end in runs.tolist() for *_, unit in self.pieces(begin, end))
        return [unit for unit in dict.fromkeys(every) if unit and unit.owner == self.rank]


def assign(offers: Mapping[int, Offer]) -> dict[int, Share]:
    """The shares of the ranks with ``offers``; ranks that share nothing have none.

    None has one if that would save less than :data:`LEAST_REPEATED` of what they read.
    """
    shared = _shared_spans(offers)
    repeated = sum((len(ranks) - 1) * int(np.diff(spans).sum()) for ranks, spans in shared)
    if repeated <= LEAST_REPEATED * sum(int(np.diff(each.runs).sum()) for each in offers.values()):
        return {}
    parts = defaultdict[int, list[tuple[Ints, tuple[int, ...]]]](list)
    for number, (ranks, spans) in enumerate(shared):
        units = -(-np.diff(spans)[:, 0] // UNIT_BLOCKS)
        first = number + np.cumsum(units) - units  # not every set begins with its first reader
        numbered = np.column_stack([spans, first])
        for group in np.array_split(ranks, -(-len(ranks) // MOST_READERS)):
            readers = tuple(group.tolist())
            for rank in readers:
                parts[rank].append((numbered, readers))
    return {rank: _share(rank, of_rank, offers) for rank, of_rank in parts.items()}


def _shared_spans(offers: Mapping[int, Offer]) -> list[tuple[Ints, Ints]]:
    """For each set of two ranks or more that need the same: the ranks, in order; and (n, 2), the spans that they need
    and no other does, in order.
    """
    alike = defaultdict[bytes, int](
        int
    )  # of each offer the ranks, a bit for each: replicas offer the same
    for rank, offer in offers.items():
        alike[offer.edges.tobytes()] |= 1 << rank
    each_edges = [np.frombuffer(edges, np.int64) for edges in alike]
    edges, bits = np.concatenate([*each_edges, np.empty(0, np.int64)]), [*alike.values()]
    who = np.repeat(np.arange(len(alike)), [*map(len, each_edges)])
    order = np.argsort(edges, kind="stable")
    by_set = defaultdict[int, list[tuple[int, int]]](list)
    begin = needing = 0  # the bits of the ranks that need the blocks from ``begin`` on
    for edge, number in zip(edges[order].tolist(), who[order].tolist(), strict=True):
        if edge > begin and needing & (needing - 1):
            by_set[needing].append((begin, edge))
        begin = edge
        needing ^= bits[number]
    return [(_ranks_in(needing), np.array(spans)) for needing, spans in by_set.items()]


def _ranks_in(bits: int) -> Ints:
    data = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))


def _share(
    rank: int, parts: list[tuple[Ints, tuple[int, ...]]], offers: Mapping[int, Offer]
) -> Share:
    places = np.repeat(np.arange(len(parts)), [len(spans) for spans, _ in parts])
    spans = np.column_stack([np.concatenate([spans for spans, _ in parts]), places])
    readers = [readers for _, readers in parts]
    others = {each for group in readers for each in group if each != rank}
    addresses = [(each, *offers[each].address) for each in sorted(others)]
    return Share(rank, spans[np.argsort(spans[:, 0])].ravel(), readers, addresses)
