"""Sharing out what several ranks hold, so that all of them write the same number of bytes.

Chunks that are too small to be cut go whole to the rank that has least; then those that are left level it out. They
are laid in one line, and the line is cut at the holders' quotas: n holders need n - 1 cuts, however many tensors there
are.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from dcp_datastates.format.chunk_table import Ints

__all__ = ["LEAST_SLICE", "SPLIT_FROM", "cut_line", "quotas", "to_least_loaded"]

SPLIT_FROM = 1 << 20
"""Bytes from which on a chunk may be cut."""
LEAST_SLICE = 64 << 10
"""Bytes that a slice has at least: more chunks cost every reader more than a level load is worth."""


def quotas(loads: Ints, amount: int) -> Ints:
    """(n,) bytes: ``amount`` poured over the ``loads`` like water, so that the lowest come level."""
    low_first = np.sort(loads)
    level = (np.cumsum(low_first) + amount) // np.arange(1, len(loads) + 1)
    wet = np.flatnonzero(low_first <= level)[-1]
    shares: Ints = np.maximum(level[wet] - loads, 0)
    return shares


def to_least_loaded(nbytes: Ints, loads: Ints, turn: int) -> Ints:
    """For each chunk the position of the holder that has least when its turn comes.

    Largest first is best (Graham, 1969). Of holders that have the same, the one at ``turn`` comes first, then
    the one after it, so that low ranks are not always the ones that have more.
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
    """Cut chunks, laid in one line, at the quotas: four columns, a line for each slice.

    ``rows`` and ``row_bytes`` of each chunk; ``quota`` of each holder, in bytes. Returns positions of the
    chunk and of the holder, and the rows of the chunk from where, and up to where.

    A cut is made at the row that is nearest to where it should be, and no slice is below ``LEAST_SLICE``
    bytes. Errors do not add up along the line.
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
    """The nearest row that leaves ``least`` on both sides, or all on one."""
    nearest = np.rint(row).astype(np.int64)
    low = np.where(2 * nearest < least, 0, np.maximum(nearest, least))
    return np.where(
        2 * (rows - nearest) < least, rows, np.where(nearest > rows - least, rows - least, low)
    )


def _on_grid(row: npt.NDArray[np.float64], rows: Ints, least: Ints) -> Ints:
    """The nearest multiple of ``least``: where quotas are so small that cuts could come too close."""
    steps = rows // least
    step = np.minimum(np.rint(row / least).astype(np.int64), steps)
    return np.where(step == steps, rows, step * least)
