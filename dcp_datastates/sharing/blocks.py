"""The blocks of a checkpoint's data files, numbered; and which of them a load needs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.format.ragged import Ints
from dcp_datastates.io.requests import Request
from dcp_datastates.io.tensor_memory import dense_strides


class FileBlocks(NamedTuple):
    """Of one data file: its relative path, the number of its first block, and the end of its data, in bytes."""

    name: str
    first: int
    nbytes: int


class Blocks:
    """The numbers of the blocks of all data files: the same on all ranks that load the same attempt.

    Between the last block of a file and the first of the next one, a number stays free: so no span lies in two files.
    """

    def __init__(self, files: Mapping[str, FileRecord]) -> None:
        self.files: Final[dict[str, FileBlocks]] = {}
        first = 0
        for name in sorted(files):
            nbytes = files[name].table_offset
            self.files[name] = FileBlocks(name, first, nbytes)
            first += -(-nbytes // BLOCK_BYTES) + 1
        self._in_order: Final = list(self.files.values())
        self._firsts: Final = [each.first for each in self._in_order]

    def file_of(self, block: int) -> FileBlocks:
        """The file that has ``block``."""
        return self._in_order[bisect_right(self._firsts, block) - 1]


def needed_blocks(requests: Iterable[Request], blocks: Blocks) -> Ints:
    """(n, 2): the runs of blocks with bytes of ``requests``, the first block and the last plus 1; in order, and not
    adjacent. A file that the metadata do not describe has none: :mod:`restore` raises the error.
    """
    found = [np.empty((0, 2), np.int64)]
    for request in requests:
        file = blocks.files.get(request.file)
        if file is not None and (ranges := _ranges(request)) is not None:
            begin, end = (np.clip(each, 0, file.nbytes) for each in ranges)
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


def _ranges(request: Request) -> tuple[Ints, Ints] | None:
    """The begins and ends of the request's bytes in its file, with gaps of less than a block included; None if it has
    no bytes.
    """
    if request.dtype is None:
        begin = np.array([request.begin], np.int64)
        return (begin, begin + request.stored) if request.stored else None
    if 0 in request.lengths:
        return None
    length = request.dtype.itemsize
    strides = dense_strides(request.chunk_sizes, length)
    first = request.begin + sum(o * s for o, s in zip(request.offsets, strides, strict=True))
    begins = np.array([first], np.int64)
    for size, stride in zip(reversed(request.lengths), reversed(strides), strict=True):
        if len(begins) == 1 and stride - length < BLOCK_BYTES:
            length += (size - 1) * stride
        else:
            begins = (np.arange(size, dtype=np.int64)[:, None] * stride + begins).ravel()
    return begins, begins + length
