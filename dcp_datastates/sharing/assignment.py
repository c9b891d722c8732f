"""Which blocks a load needs, and which rank reads them if several ranks need them: pure functions.

The checkpoint's blocks have numbers (:class:`Blocks`). Blocks that follow each other, and that the same ranks need, are
a span. A span is cut into units of up to :data:`UNIT_BLOCKS`, which its readers own in turn. A rank receives the spans
that it needs, and derives units and owners from them: so the coordinator sends a few numbers for each run of blocks.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

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
    ranks = np.array(sorted(offers), np.int64)
    counts = [len(offers[rank].runs) for rank in ranks.tolist()]
    runs = np.concatenate([np.empty((0, 2), np.int64), *(offers[r].runs for r in ranks.tolist())])
    who = np.repeat(ranks, counts)
    begins, ends, sets, repeated = _shared_spans(runs, who)
    if repeated <= LEAST_REPEATED * (runs[:, 1] - runs[:, 0]).sum():
        return {}
    parts: dict[int, list[tuple[Ints, tuple[int, ...]]]] = {}
    by_set = groups(sets)
    needed = _needing(begins[[chosen[0] for chosen in by_set]], [offers[r].runs for r in ranks])
    for number, chosen in enumerate(by_set):
        needing = ranks[needed[:, number]]
        units = -(-(ends[chosen] - begins[chosen]) // UNIT_BLOCKS)
        first = number + np.cumsum(units) - units  # not every set begins with its first reader
        spans = np.stack([begins[chosen], ends[chosen], first, np.zeros_like(first)], axis=1)
        for readers in np.array_split(needing, -(-len(needing) // MOST_READERS)):
            for rank in readers.tolist():
                parts.setdefault(rank, []).append((spans, tuple(readers.tolist())))
    return {rank: _share(rank, of_rank, offers) for rank, of_rank in parts.items()}


def _shared_spans(runs: Ints, who: Ints) -> tuple[Ints, Ints, npt.NDArray[np.uint64], int]:
    """The spans that two ranks or more need: begins, ends, and a number for the set of their readers; and how many
    blocks are read again if each rank reads all that it needs.

    Each rank has a random number; a set has the sum of its ranks' (modulo 2**64), so that equal sums mean equal sets,
    but for a probability of about sets**2 / 2**64.
    """
    edges, where = np.unique(runs, return_inverse=True)
    where = where.reshape(runs.shape)
    random = np.random.default_rng().integers(1, 1 << 63, int(who.max(initial=0)) + 1, np.uint64)
    sums, readers = np.zeros(len(edges), np.uint64), np.zeros(len(edges), np.int64)
    for column, add in ((0, np.add), (1, np.subtract)):
        add.at(sums, where[:, column], random[who])
        add.at(readers, where[:, column], 1)
    counts = np.cumsum(readers)[:-1]
    shared = counts > 1
    begins, ends = edges[:-1][shared], edges[1:][shared]
    repeated = int(((counts[shared] - 1) * (ends - begins)).sum())
    return begins, ends, np.cumsum(sums)[:-1][shared], repeated


def _needing(blocks: Ints, runs_of: Sequence[Ints]) -> npt.NDArray[np.bool_]:
    """(ranks, blocks): whether the rank with these runs needs the block."""
    needed = np.zeros((len(runs_of), len(blocks)), np.bool_)
    for row, runs in zip(needed, runs_of, strict=True):
        if len(runs):
            at = np.searchsorted(runs[:, 0], blocks, "right") - 1
            row[:] = (at >= 0) & (blocks < runs[at, 1])
    return needed


def _share(
    rank: int, parts: list[tuple[Ints, tuple[int, ...]]], offers: Mapping[int, Offer]
) -> Share:
    spans = np.concatenate([spans for spans, _ in parts])
    spans[:, 3] = np.repeat(np.arange(len(parts)), [len(spans) for spans, _ in parts])
    readers = [readers for _, readers in parts]
    others = {each for group in readers for each in group if each != rank}
    addresses = [(each, *offers[each].address) for each in sorted(others)]
    return Share(rank, spans[np.argsort(spans[:, 0])].ravel(), readers, addresses)
