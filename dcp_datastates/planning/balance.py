"""Balance: divides chunks that several ranks hold among these ranks.

In stock DCP, one of the holders writes a whole replicated tensor. Here the holders share it: they write equal numbers
of bytes within 1 %, if the chunks are large enough to be cut so (a share is off by 64 KiB at most, or by a row of a
chunk). This is done for each set of ranks that hold the same chunks, small sets first, which have the least choice::

    chunks    a 16 MiB   b 6 MiB   c 40 KiB   d 8 KiB   e: a tensor that nothing declares equal on all ranks

    1.  e       to the lowest rank: what is stored is one rank's state
    2.  c, d    whole, the largest first, each to the rank that has the fewest bytes so far
    3.  a, b    laid end to end, and this line is cut at the ranks' quotas, which even out what they have so far:

                |a a a a a a a a a a a a a a a a|b b b b b b|
                |    rank 2    |    rank 0    |   rank 1    |

n ranks need n - 1 cuts, however many tensors there are. ``tests/unit/planning/balance.py`` computes the same in plain
loops.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_datastates.format.metadata_table import Catalog
from dcp_datastates.format.ragged import Ints, fingerprints, leaders, positions, starts_of
from dcp_datastates.planning.messages import LocalPlan, RankPlan, Why, sliced
from dcp_datastates.planning.replicas import Holdings, gather

SPLIT_FROM = 1 << 20
"""Least size of a chunk that may be cut, in bytes."""
LEAST_SLICE = 64 << 10
"""Least size of a slice, in bytes: smaller slices cost every reader more than an even load gains."""


_Slices = tuple[Ints, Ints, Ints, Ints]
"""S slices of chunks: the rank that writes each, its row of the holdings (of the rank's own variant), and its first row
of dimension 0 and the one after the last.
"""


def assign(
    plans: Sequence[LocalPlan], *, split: bool = True, dedup_to_lowest_rank: bool = False
) -> tuple[list[RankPlan], Catalog]:
    """Assign each rank its share. Returns the shares by rank, and the checkpoint's metadata. ``plans``: at least one,
    by rank.

    Chunks with the same name, offsets and sizes are replicas. Without ``split``, one holder writes the whole chunk: the
    holder with the fewest bytes, or with ``dedup_to_lowest_rank`` (which never splits) the lowest rank. With ``split``,
    chunks of 1 MiB and more are cut into rows of dimension 0, and smaller chunks are dealt whole. Between holders with
    equal loads, a hash of the chunk's name decides. Only an item of type SHARD declares that it is the same on all
    ranks. Any other, a plain tensor or an object, is written by the lowest rank that holds it: what is stored is one
    rank's state, as that of DDP's buffers is the first rank's. The order of the items has no influence, and renumbering
    the ranks permutes the shares of what is declared (except for ties between holders with different other chunks).

    ValueError: ranks do not agree on a name's shape, dtype or kind.
    """
    holdings = gather(plans)
    mappings = _merged(plans)
    several = np.array([len(ranks) > 1 for ranks in holdings.ranks])
    first = holdings.order[starts_of(holdings.count)]
    shared = (holdings.count > 1) | several[holdings.variant[first]]
    if dedup_to_lowest_rank:
        shared[:] = False
    slices = _to_lowest(holdings, first[~shared])
    sets = []
    if shared.any():
        rank, row, _, _ = slices
        loads = np.bincount(rank, holdings.nbytes[row], len(plans)).astype(np.int64)
        parts = [slices]
        for variants, groups, begins in _holder_sets(holdings, np.flatnonzero(shared)):
            holders = _Holders(holdings, variants, groups, begins, loads)
            parts += holders.deal(split)
            sets.append(holders)
        ranks, rows, begins, ends = map(np.concatenate, zip(*parts, strict=True))
        slices = ranks, rows, begins, ends
    compared = _compared(holdings, sets)
    return _finished(holdings, _by_rank(holdings, slices), compared, mappings)


def _merged(plans: Sequence[LocalPlan]) -> Mapping[str, tuple[Any, ...]] | None:
    """All ranks' paths; for a name that several ranks have, the lowest rank's. None if no rank has paths."""
    distinct = {
        id(plan.head.mappings): plan.head.mappings
        for plan in plans
        if plan.head.mappings is not None
    }
    first, *others = distinct.values() or [None]
    if not others:
        return first
    merged = dict(first or {})
    for mapping in others:
        if mapping is not None and mapping.keys() - merged.keys():
            merged = {**mapping, **merged}
    return merged


def _to_lowest(holdings: Holdings, rows: Ints) -> _Slices:
    """Whole chunks, written by the lowest rank of each row's variant."""
    lowest = np.array([ranks[0] for ranks in holdings.ranks], dtype=np.int64)
    return lowest[holdings.variant[rows]], rows, np.zeros_like(rows), holdings.extent[rows]


def _holder_sets(holdings: Holdings, groups: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """The sets of ranks that hold these groups, small ones first; apart from that, in an order that does not depend on
    the ranks' numbers. Of each set: its variants, its groups, and their first positions in the holdings' ``order``.
    """
    begins, count = starts_of(holdings.count)[groups], holdings.count[groups]
    variants = holdings.variant[holdings.order[positions(begins, count)]]
    none = np.zeros_like(groups)
    leader = leaders(fingerprints(none, count, variants), none, count, variants)
    distinct, number = np.unique(leader, return_inverse=True)
    width = np.array([len(ranks) for ranks in holdings.ranks], dtype=np.int64)
    at = starts_of(count)
    holders = np.add.reduceat(width[variants], at)[distinct]
    least = np.full(len(distinct), np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(least, number, holdings.prints[groups])
    turn = np.empty(len(distinct), dtype=np.int64)
    turn[np.lexsort((least, holders))] = np.arange(len(distinct))
    order = np.lexsort((holdings.prints[groups], holdings.place[groups], turn[number]))
    for members in np.split(order, np.cumsum(np.bincount(turn[number]))[:-1]):
        first = members[0]
        held_by = variants[at[first] : at[first] + count[first]]
        yield held_by, groups[members], begins[members]


class _Holders:
    """A set of ranks that hold the same groups (chunks), which are in an order that does not depend on the ranks'
    numbers. Deals the chunks to these ranks, and adds them to the ``loads``.
    """

    def __init__(
        self, holdings: Holdings, variants: Ints, groups: Ints, begins: Ints, loads: Ints
    ) -> None:
        ranks = [holdings.ranks[variant] for variant in variants]
        # For each rank, the position of its variant, and of its row among a group's rows.
        copies = np.repeat(np.arange(len(ranks)), list(map(len, ranks)))
        holders = np.concatenate(ranks)
        least_first = np.lexsort((holders, loads[holders]))
        self._ranks, self._copies = holders[least_first], copies[least_first]
        self._loads, self._order, self._begins = loads, holdings.order, begins
        first = holdings.order[begins]
        self._nbytes, self._extent = holdings.nbytes[first], holdings.extent[first]
        self._declared = holdings.declared[groups]
        self._turn = int(holdings.prints[groups[0]]) % len(self._ranks)
        """The position of the rank that comes first among ranks with equal loads."""
        self.variants = variants
        self.undeclared = np.flatnonzero(~self._declared)
        """Positions of the chunks that only the lowest rank writes; as in :attr:`small` and :attr:`large`."""
        self.small = self.large = self.undeclared[:0]
        """Those that are dealt whole, the largest first; and those that are cut."""

    def deal(self, split: bool) -> list[_Slices]:
        nbytes, declared, extent = self._nbytes, self._declared, self._extent
        large = declared & (nbytes >= SPLIT_FROM) & (extent > 1) & split
        small = np.flatnonzero(declared & ~large & (nbytes > 0))
        empty = np.flatnonzero(declared & (nbytes == 0))
        self.small = small[np.argsort(-nbytes[small], kind="stable")]
        self.large = np.flatnonzero(large)
        slices = [
            self._whole(self.undeclared, np.full(len(self.undeclared), self._ranks.argmin())),
            self._whole(empty, (self._turn + np.arange(len(empty))) % len(self._ranks)),
        ]
        least = to_least_loaded(nbytes[self.small], self._loads[self._ranks], self._turn)
        slices.append(self._whole(self.small, least))
        if len(self.large):
            row_bytes = nbytes[self.large] // extent[self.large]
            quota = quotas(self._loads[self._ranks], int(nbytes[self.large].sum()))
            chunk, holder, begin, end = cut_line(extent[self.large], row_bytes, quota)
            sizes = (end - begin) * row_bytes[chunk]
            slices.append(self._give(self.large[chunk], holder, begin, end, sizes))
        return slices

    def rows(self, chunks: Ints, copy: int = 0) -> Ints:
        """The chunks' rows of the holdings, of the variant at the position ``copy``."""
        rows: Ints = self._order[self._begins[chunks] + copy]
        return rows

    def _whole(self, chunk: Ints, holder: Ints) -> _Slices:
        begin, end = np.zeros_like(chunk), self._extent[chunk]
        return self._give(chunk, holder, begin, end, self._nbytes[chunk])

    def _give(self, chunk: Ints, holder: Ints, begin: Ints, end: Ints, nbytes: Ints) -> _Slices:
        """``chunk``, ``holder``: positions in the set."""
        np.add.at(self._loads, self._ranks[holder], nbytes)
        row = self._order[self._begins[chunk] + self._copies[holder]]
        return self._ranks[holder], row, begin, end


def _compared(holdings: Holdings, sets: Sequence[_Holders]) -> list[tuple[Ints, Ints]]:
    """For each variant, the items to compare with other ranks, and the number of each item's set."""
    found: list[list[tuple[int, Ints]]] = [[] for _ in holdings.ranks]
    number = 0
    for holders in sets:
        rows = holders.rows(holders.undeclared)
        is_object = holdings.names.properties[holdings.name[rows]] < 0
        undeclared = holders.undeclared[is_object | (holdings.nbytes[rows] > 0)]
        kinds = ((Why.UNDECLARED, undeclared), (Why.CUT, holders.large), (Why.WHOLE, holders.small))
        for kind, which in kinds:
            for copy, variant in enumerate(holders.variants.tolist()):
                items = holdings.item[holders.rows(which, copy)]
                found[variant].append((len(Why) * number + kind, items))
            number += len(which) > 0
    none: tuple[int, Ints] = (0, np.zeros(0, np.int64))
    columns = []
    for parts in found:
        numbers, of_sets = zip(none, *parts, strict=True)
        lengths = list(map(len, of_sets))
        columns.append((np.concatenate(of_sets), np.repeat(numbers, lengths)))
    return columns


def _by_rank(holdings: Holdings, slices: _Slices) -> _Slices:
    """Sort by rank, then in the order of the rank's items."""
    rank, row, begin, end = slices
    stride = int(holdings.item.max(initial=0)) + 1
    key = rank * stride + holdings.item[row]
    if (key[1:] > key[:-1]).all():
        return slices
    order = np.argsort(key)
    return rank[order], row[order], begin[order], end[order]


def _finished(
    holdings: Holdings,
    slices: _Slices,
    compared: Sequence[tuple[Ints, Ints]],
    mappings: Mapping[str, tuple[Any, ...]] | None,
) -> tuple[list[RankPlan], Catalog]:
    """The plans of all ranks and the chunk table, from slices in the order of ranks and items."""
    names = holdings.names
    rank, row, begin, end = slices
    name, item = holdings.name[row], holdings.item[row]
    tensors = np.flatnonzero(names.properties[name] >= 0)
    chunks = tensors[np.argsort(name[tensors], kind="stable")]
    counts = np.bincount(name[chunks], minlength=len(names.names))
    hints = np.full(len(name), -1, dtype=np.int64)
    hints[chunks] = np.arange(len(chunks)) - np.repeat(starts_of(counts), counts)
    boxes = (holdings.ndims, holdings.offsets, holdings.sizes)
    offsets, sizes = sliced(*boxes, row[chunks], begin[chunks], end[chunks])
    catalog = Catalog(
        names=names.names,
        table=names.table,
        properties=names.properties,
        ndims=names.ndims,
        shapes=names.shapes,
        counts=counts,
        offsets=offsets,
        sizes=sizes,
        mappings=mappings,
    )
    variant_of = np.empty(sum(map(len, holdings.ranks)), dtype=np.int64)
    for variant, ranks in enumerate(holdings.ranks):
        variant_of[ranks] = variant
    edges = np.searchsorted(rank, np.arange(len(variant_of) + 1)).tolist()
    plans = [
        RankPlan(item[a:b], begin[a:b], end[a:b], hints[a:b], *compared[variant])
        for (a, b), variant in zip(pairwise(edges), variant_of.tolist(), strict=True)
    ]
    return plans, catalog


# --- dividing chunks among a set of holders ------------------------------------------------------------


def quotas(loads: Ints, amount: int) -> Ints:
    """(n,) bytes: ``amount`` poured over the ``loads`` like water, so that the lowest come level."""
    low_first = np.sort(loads)
    level = (np.cumsum(low_first) + amount) // np.arange(1, len(loads) + 1)
    wet = np.flatnonzero(low_first <= level)[-1]
    shares: Ints = np.maximum(level[wet] - loads, 0)
    return shares


def to_least_loaded(nbytes: Ints, loads: Ints, turn: int) -> Ints:
    """For each chunk, the position of the holder with the fewest bytes when its turn comes.

    Largest first is best (Graham, 1969). Between holders with equal loads, the holder at ``turn`` comes first, then the
    next, so that low ranks do not always get more.
    """
    count = len(loads)
    heap = [load * count + (at - turn) % count for at, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    chosen = []
    for size in nbytes.tolist():
        least = heap[0]
        chosen.append(least % count)
        heapq.heapreplace(heap, least + size * count)
    return (np.array(chosen, dtype=np.int64) + turn) % count


def cut_line(rows: Ints, row_bytes: Ints, quota: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut chunks, laid end to end in one line, at the quotas. Returns four columns, with a row per slice.

    ``rows`` and ``row_bytes`` of each chunk; ``quota`` of each holder, in bytes. The columns: position of the chunk,
    position of the holder, first row in the chunk, row after the last.

    Each cut is at the row nearest to its ideal position, and no slice is below ``LEAST_SLICE`` bytes. Errors do not add
    up along the line.
    """
    ends = np.cumsum(rows * row_bytes)
    wanted = np.cumsum(quota)[:-1] * (ends[-1] / max(int(quota.sum()), 1))
    chunk = np.minimum(np.searchsorted(ends, wanted, side="right"), len(rows) - 1)
    within = wanted - (ends - rows * row_bytes)[chunk]
    least = -(-LEAST_SLICE // row_bytes)
    smallest = int(quota[quota > 0].min(initial=ends[-1]))
    roomy = smallest >= (2 * least + 1) * row_bytes
    cuts = np.where(
        roomy[chunk],
        _near(within / row_bytes[chunk], rows[chunk], least[chunk]),
        _on_grid(within / row_bytes[chunk], rows[chunk], least[chunk]),
    )
    row_ends = np.cumsum(rows)
    holder_ends = np.maximum.accumulate((row_ends - rows)[chunk] + cuts)
    edges = np.unique(np.concatenate([[0], row_ends, holder_ends]))
    begins, ends_ = edges[:-1], edges[1:]
    piece = np.searchsorted(row_ends, begins, side="right")
    holder = np.searchsorted(holder_ends, begins, side="right")
    first = (row_ends - rows)[piece]
    return piece, holder, begins - first, ends_ - first


def _near(row: npt.NDArray[np.float64], rows: Ints, least: Ints) -> Ints:
    """The nearest row that leaves at least ``least`` rows on each side, or all rows on one side."""
    nearest = np.rint(row).astype(np.int64)
    low = np.where(2 * nearest < least, 0, np.maximum(nearest, least))
    return np.where(
        2 * (rows - nearest) < least, rows, np.where(nearest > rows - least, rows - least, low)
    )


def _on_grid(row: npt.NDArray[np.float64], rows: Ints, least: Ints) -> Ints:
    """The nearest multiple of ``least``, for quotas so small that cuts could come too close."""
    steps = rows // least
    step = np.minimum(np.rint(row / least).astype(np.int64), steps)
    return np.where(step == steps, rows, step * least)
