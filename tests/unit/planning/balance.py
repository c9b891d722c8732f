"""What ``planning/balance.py`` computes in columns, in loops: the reference that it is compared with.

Chunks with one holder are that rank's, and those that are not declared equal the lowest holder's. The others are
divided among their holders, one set of holders after another: small chunks go whole to the rank with the fewest bytes;
large ones are laid end to end, and cut where the loads come level.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from support.state.plans import plan
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_datastates.planning.balance import LEAST_SLICE, SPLIT_FROM
from dcp_datastates.planning.replicas import gather

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A chunk: its name, offsets and sizes."""


def key_of(item):
    chunk = item.tensor_data.chunk if item.tensor_data else None
    return (
        (item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))
        if chunk
        else (item.index.fqn, (), ())
    )


@dataclass(eq=False)
class _Chunk:
    key: Key
    nbytes: int
    hash: int
    """The package's: it decides between equals."""
    holders: list[int] = field(default_factory=list)
    declared: bool = True
    """Equal on all its holders."""

    @property
    def rows(self):
        return self.key[2][0] if self.key[2] else 1

    @property
    def may_be_cut(self):
        return self.declared and self.rows > 1 and self.nbytes >= SPLIT_FROM


def divided(ranks):
    """What each rank writes, of the items that each holds."""
    written = [set() for _ in ranks]
    loads = [0] * len(ranks)

    def write(rank, chunk, begin, end):
        written[rank].add((chunk.key, begin, end))
        loads[rank] += chunk.nbytes // max(chunk.rows, 1) * (end - begin)

    sets = defaultdict(list)
    for chunk in _chunks(ranks):
        if len(chunk.holders) == 1:
            write(chunk.holders[0], chunk, 0, chunk.rows)
        else:
            sets[tuple(chunk.holders)].append(chunk)
    for holders in sorted(sets, key=lambda of: (len(of), min(chunk.hash for chunk in sets[of]))):
        chunks = sorted(sets[holders], key=lambda chunk: (chunk.key[0], chunk.hash))
        by_load = sorted(holders, key=lambda rank: (loads[rank], rank))
        first = chunks[0].hash % len(holders)  # of all, also of those that are not declared
        in_turn = by_load[first:] + by_load[:first]
        for chunk in chunks:
            if not chunk.declared:
                write(min(holders), chunk, 0, chunk.rows)
        chunks = [chunk for chunk in chunks if chunk.declared]
        empty = [chunk for chunk in chunks if not chunk.nbytes]
        for number, chunk in enumerate(empty):
            write(in_turn[number % len(in_turn)], chunk, 0, chunk.rows)
        small = [chunk for chunk in chunks if chunk.nbytes and not chunk.may_be_cut]
        for chunk in sorted(small, key=lambda chunk: -chunk.nbytes):
            write(min(in_turn, key=lambda rank: loads[rank]), chunk, 0, chunk.rows)
        if large := [chunk for chunk in chunks if chunk.may_be_cut]:
            quotas = _level([loads[rank] for rank in by_load], sum(chunk.nbytes for chunk in large))
            for holder, chunk, begin, end in _cut(large, quotas):
                write(by_load[holder], chunk, begin, end)
    return written


def _chunks(ranks):
    chunks = {}
    for rank, items in enumerate(ranks):
        for item in items:
            key, data = key_of(item), item.tensor_data
            if key not in chunks:
                nbytes = prod(key[2]) * data.properties.dtype.itemsize if data else 0
                chunks[key] = _Chunk(key, nbytes, int(gather([plan(item)]).prints[0]))
            chunks[key].holders.append(rank)
            chunks[key].declared &= item.type is WriteItemType.SHARD
    return list(chunks.values())


def _level(loads, amount):
    """What each gets of ``amount``, poured over the ``loads`` like water."""
    low, high = min(loads), min(loads) + amount
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(middle - load, 0) for load in loads) <= amount:
            low = middle
        else:
            high = middle - 1
    return [max(low - load, 0) for load in loads]


def _cut(chunks, quotas):
    """The ``chunks``, laid end to end and cut at the quotas, as holder, chunk, first row and row after the last."""
    scale = sum(chunk.nbytes for chunk in chunks) / sum(quotas)
    smallest = min(quota for quota in quotas if quota)
    cuts, given = [(0, 0)], 0  # number of the chunk, and row
    for quota in quotas[:-1]:
        given += quota
        wanted, number, before = given * scale, 0, 0
        while number < len(chunks) - 1 and wanted >= before + chunks[number].nbytes:
            before += chunks[number].nbytes
            number += 1
        row = _row(chunks[number], wanted - before, smallest)
        cuts.append(max(cuts[-1], (number, row)))
    cuts.append((len(chunks) - 1, chunks[-1].rows))
    for holder, ((first, row), (last, until)) in enumerate(pairwise(cuts)):
        for number in range(first, last + 1):
            begin = row if number == first else 0
            end = until if number == last else chunks[number].rows
            if begin < end:
                yield holder, chunks[number], begin, end


def _row(chunk, nbytes, smallest):
    """The row nearest to ``nbytes`` into the chunk at which a cut leaves no sliver on either side."""
    row_bytes = chunk.nbytes // chunk.rows
    least = -(-LEAST_SLICE // row_bytes)
    if (
        smallest < (2 * least + 1) * row_bytes
    ):  # two cuts of one chunk could come too close: on a grid
        step = round(nbytes / row_bytes / least)
        return step * least if step < chunk.rows // least else chunk.rows
    row = round(nbytes / row_bytes)
    inside = min(max(row, least), chunk.rows - least)
    return min(inside, 0, chunk.rows, key=lambda choice: abs(choice - row))
