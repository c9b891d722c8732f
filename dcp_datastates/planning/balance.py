"""Balance: divides chunks that several ranks hold among these ranks.

In stock DCP, one of the holders writes a whole replicated tensor. Here the holders share it: they write equal numbers
of bytes within 1 %, if the chunks are large enough to be cut so (a share is off by 64 KiB at most, or by a row of a
chunk).

Chunks that are too small to be cut go whole to the rank with the fewest bytes; the large chunks then even out the
loads. They are laid end to end, and this line is cut at the holders' quotas: n holders need n - 1 cuts, however many
tensors there are.

``tests/support/state/balance.py`` computes the same in plain loops.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_datastates.format.chunk_table import Catalog, Ints
from dcp_datastates.format.ragged import fingerprints, leaders, positions, starts_of
from dcp_datastates.planning.local_plan import LocalPlan
from dcp_datastates.planning.rank_plan import RankPlan
from dcp_datastates.planning.replicas import Holdings, gather

__all__ = ["SPLIT_FROM", "RankPlan", "assign"]

SPLIT_FROM = 1 << 20
"""Least size of a chunk that may be cut, in bytes."""
LEAST_SLICE = 64 << 10
"""Least size of a slice, in bytes: smaller slices cost every reader more than an even load gains."""


@dataclass(frozen=True, eq=False)
class _Shares:
    """S slices of chunks, with the rank that writes each."""

    rank: Ints
    row: Ints
    """(S,): row of the holdings, from the rank's own variant."""
    begin: Ints
    end: Ints

    @staticmethod
    def joined(parts: Sequence[_Shares]) -> _Shares:
        columns = ([part.rank for part in parts], [part.row for part in parts])
        bounds = ([part.begin for part in parts], [part.end for part in parts])
        return _Shares(*(np.concatenate(column) for column in (*columns, *bounds)))

    def taken(self, which: Ints) -> _Shares:
        return _Shares(self.rank[which], self.row[which], self.begin[which], self.end[which])


@dataclass(frozen=True, eq=False)
class _HolderSet:
    """A set of ranks that hold the same groups."""

    ranks: Ints
    copies: Ints
    """For each rank: which of a group's rows, counted from the group's first, belongs to the rank."""
    groups: Ints
    begins: Ints
    """For each group: its first position in the holdings' ``order``."""


@dataclass(frozen=True, eq=False)
class _Replicas:
    """Chunks that a set of ranks holds: those that its members divide, or those that are not declared equal."""

    ranks: Ints
    copies: Ints
    """For each rank: as in :class:`_HolderSet`."""
    items: Mapping[int, Ints]
    """By copy: the indices of a rank's items, in the same order on all ranks."""
    declared: bool


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
    replicas: list[_Replicas] = []
    shares = _dealt(
        holdings, len(plans), split and not dedup_to_lowest_rank, dedup_to_lowest_rank, replicas
    )
    shares = _by_rank(holdings, shares)
    return _finished(holdings, shares, _held(len(plans), replicas), mappings)


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


def _dealt(
    holdings: Holdings, ranks: int, split: bool, to_lowest: bool, replicas: list[_Replicas]
) -> _Shares:
    """Give chunks with one holder to that rank; then deal for each set of holders, small sets first, which have the
    least choice.
    """
    lowest = np.array([of_variant[0] for of_variant in holdings.ranks], dtype=np.int64)
    many = np.array([len(of_variant) > 1 for of_variant in holdings.ranks])
    begins = starts_of(holdings.count)
    first = holdings.order[begins]
    shared = (holdings.count > 1) | many[holdings.variant[first]]
    alone = first if to_lowest else first[~shared]
    own = _Shares(
        lowest[holdings.variant[alone]],
        alone,
        np.zeros_like(alone),
        holdings.extent[alone],
    )
    groups = np.flatnonzero(shared)
    if to_lowest or not len(groups):
        return own
    loads = np.bincount(own.rank, holdings.nbytes[alone], ranks).astype(np.int64)
    parts = [own]
    for holders in _holder_sets(holdings, groups):
        parts += _deal(holdings, holders, loads, split, replicas)
    return _Shares.joined(parts)


def _holder_sets(holdings: Holdings, groups: Ints) -> Iterator[_HolderSet]:
    """The sets of holders, small ones first; apart from that, in an order that does not depend on the ranks'
    numbers.
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
        parts = [holdings.ranks[v] for v in variants[at[first] : at[first] + count[first]]]
        yield _HolderSet(
            np.concatenate(parts),
            np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
            groups[members],
            begins[members],
        )


def _deal(
    holdings: Holdings,
    holders: _HolderSet,
    loads: Ints,
    split: bool,
    replicas: list[_Replicas],
) -> list[_Shares]:
    """Divide this set's chunks among its ranks. Adds them to the ``loads``, and those that are cut, or are not
    declared equal, to the ``replicas``.
    """
    by_load = np.lexsort((holders.ranks, loads[holders.ranks]))
    ranks, copies = holders.ranks[by_load], holders.copies[by_load]
    first = holdings.order[holders.begins]
    nbytes, extent = holdings.nbytes[first], holdings.extent[first]
    turn = int(holdings.prints[holders.groups[0]]) % len(ranks)

    def shares(chunk: Ints, holder: Ints, begin: Ints, end: Ints, dealt: Ints) -> _Shares:
        np.add.at(loads, ranks[holder], dealt)
        return _Shares(
            ranks[holder], holdings.order[holders.begins[chunk] + copies[holder]], begin, end
        )

    def whole(chunk: Ints, holder: Ints) -> _Shares:
        return shares(chunk, holder, np.zeros_like(chunk), extent[chunk], nbytes[chunk])

    def note(chunks: Ints, declared: bool) -> None:
        begins = holders.begins[chunks]
        copies = set(holders.copies.tolist())
        items = {copy: holdings.item[holdings.order[begins + copy]] for copy in copies}
        replicas.append(_Replicas(holders.ranks, holders.copies, items, declared))

    declared = holdings.declared[holders.groups]
    cuttable = declared & (nbytes >= SPLIT_FROM) & (extent > 1) & split
    parts = []
    others = np.flatnonzero(~declared)
    if len(others):
        parts.append(whole(others, np.full(len(others), ranks.argmin())))
        is_object = holdings.names.properties[holdings.name[first[others]]] < 0
        told = others[is_object | (nbytes[others] > 0)]
        if len(told):
            note(told, False)
    empty = np.flatnonzero(declared & (nbytes == 0))
    parts.append(whole(empty, (turn + np.arange(len(empty))) % len(ranks)))
    small = np.flatnonzero(declared & ~cuttable & (nbytes > 0))
    small = small[np.argsort(-nbytes[small], kind="stable")]
    parts.append(whole(small, to_least_loaded(nbytes[small], loads[ranks], turn)))
    large = np.flatnonzero(cuttable)
    if len(large):
        note(large, True)
        row_bytes = nbytes[large] // extent[large]
        quota = quotas(loads[ranks], int(nbytes[large].sum()))
        chunk, holder, begin, end = cut_line(extent[large], row_bytes, quota)
        parts.append(shares(large[chunk], holder, begin, end, (end - begin) * row_bytes[chunk]))
    return parts


def _by_rank(holdings: Holdings, shares: _Shares) -> _Shares:
    """Sort by rank, then in the order of the rank's items."""
    stride = int(holdings.item.max(initial=0)) + 1
    key = shares.rank * stride + holdings.item[shares.row]
    if (key[1:] > key[:-1]).all():
        return shares
    return shares.taken(np.argsort(key))


def _held(ranks: int, replicas: Sequence[_Replicas]) -> list[tuple[Ints, Ints]]:
    """For each rank, the items to compare with other ranks, and the number of each item's set, which is even if these
    are declared equal. Equal results are one object.
    """
    members: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for number, each in enumerate(replicas):
        for rank, copy in zip(each.ranks.tolist(), each.copies.tolist(), strict=True):
            members[rank].append((number, copy))
    known: dict[tuple[tuple[int, int], ...], tuple[Ints, Ints]] = {}
    for key in set(map(tuple, members)):
        parts = [replicas[number].items[copy] for number, copy in key]
        sets = np.array([2 * n + (not replicas[n].declared) for n, _ in key], np.int64)
        items = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        known[key] = items, np.repeat(sets, [len(part) for part in parts])
    return [known[tuple(key)] for key in members]


def _finished(
    holdings: Holdings,
    shares: _Shares,
    held: Sequence[tuple[Ints, Ints]],
    mappings: Mapping[str, tuple[Any, ...]] | None,
) -> tuple[list[RankPlan], Catalog]:
    """The plans of all ranks and the chunk table, from shares in the order of ranks and items."""
    names = holdings.names
    name = holdings.name[shares.row]
    tensors = np.flatnonzero(names.properties[name] >= 0)
    chunks = tensors[np.argsort(name[tensors], kind="stable")]
    counts = np.bincount(name[chunks], minlength=len(names.names))
    hints = np.full(len(name), -1, dtype=np.int64)
    hints[chunks] = np.arange(len(chunks)) - np.repeat(starts_of(counts), counts)
    offsets, sizes = _boxes(holdings, shares.taken(chunks))
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
    items = holdings.item[shares.row]
    edges = np.searchsorted(shares.rank, np.arange(len(held) + 1)).tolist()
    plans = [
        RankPlan(items[a:b], shares.begin[a:b], shares.end[a:b], hints[a:b], shared, sets)
        for (a, b), (shared, sets) in zip(pairwise(edges), held, strict=True)
    ]
    return plans, catalog


def _boxes(holdings: Holdings, shares: _Shares) -> tuple[Ints, Ints]:
    """The offsets and sizes of these slices, ragged."""
    ndims = holdings.ndims[shares.row]
    where = positions(starts_of(holdings.ndims)[shares.row], ndims)
    offsets, sizes = holdings.offsets[where], holdings.sizes[where]
    cuttable = ndims > 0
    first = starts_of(ndims)[cuttable]
    offsets[first] += shares.begin[cuttable]
    sizes[first] = (shares.end - shares.begin)[cuttable]
    return offsets, sizes


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
