"""Files whose size and places are known before a byte of a tensor is read. They are written piece by piece.

A piece is a range of the file, a whole number of checksum blocks long. It may hold many small tensors, or a part of a
large one: memory does not depend on the tensors. Threads write pieces of one file at the same time.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from dcp_datastates._native import BLOCK_BYTES, crc32c
from dcp_datastates.conversion.files import as_bytes, scratch_tensor
from dcp_datastates.conversion.source import Source, Want
from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.checksums import blocks, table_words
from dcp_datastates.process.work import Done, Progress, Unit, work
from dcp_datastates.storage import operations
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location

__all__ = [
    "Contents",
    "Limits",
    "Output",
    "OutputFile",
    "Piece",
    "Placed",
    "write_outputs",
    "write_small_file",
]


@dataclass(frozen=True)
class Placed:
    """Elements ``[begin, end)`` of a tensor of the source, at ``offset`` in the file, in bytes: a multiple of the
    element size.
    """

    name: str
    offset: int
    begin: int
    end: int


@dataclass(frozen=True)
class OutputFile:
    """A file: the bytes that are known, and the places of tensors. What is neither is not written."""

    path: Location
    nbytes: int
    known: Sequence[tuple[int, bytes]]
    """Offsets and bytes."""
    tensors: Sequence[Placed]
    table_offset: int | None = None
    """Where the table of checksums begins; None: there is none. It covers all bytes before it."""


@dataclass(frozen=True)
class Output:
    """What a target consists of."""

    files: Sequence[OutputFile]
    finish: Callable[[], None] = lambda: None
    """Completes the target when the files are written."""


@dataclass(frozen=True)
class Limits:
    """How much is done at a time."""

    threads: int
    piece_bytes: int
    """The memory for what a thread writes at a time, in bytes: a multiple of 1 MiB."""
    shard_bytes: int
    """The most bytes of tensors in one file, where a format has several. A larger tensor has a file of its own."""


class Contents:
    """The bytes of one file, read piece by piece in any order; last the table of checksums. Any thread."""

    def __init__(self, output: OutputFile, source: Source) -> None:
        self.output = output
        self.end = output.nbytes if output.table_offset is None else output.table_offset
        """Where the pieces end, in bytes."""
        self._source = source
        self._table = bytearray(4 * table_words(self.end))
        self._tensors: list[tuple[int, int, Placed]] = []
        for placed in output.tensors:
            begin, itemsize = placed.offset, source.tensors[placed.name].dtype.itemsize
            if begin % itemsize:
                raise DataStatesError(
                    f"{output.path}: {placed.name!r} would lie at byte {begin}, between elements"
                )
            span = begin, begin + (placed.end - placed.begin) * itemsize, placed
            self._tensors.append(span)
        self._tensors.sort(key=lambda span: span[:2])

    def piece(self, begin: int, end: int) -> Piece:
        """The bytes ``[begin, end)``; ``begin`` is a multiple of 1 MiB."""
        buffer = scratch_tensor(end - begin, torch.uint8).zero_()
        spans, wants = [], []
        data = as_bytes(buffer)
        for offset, known in self.output.known:
            low, high = max(begin, offset), min(end, offset + len(known))
            if low < high:
                spans.append((low, high))
                data[low - begin : high - begin] = known[low - offset : high - offset]
        nbytes = 0
        first = bisect_right(self._tensors, begin, key=lambda span: span[1])
        last = bisect_left(self._tensors, end, key=lambda span: span[0])
        for start, stop, placed in self._tensors[first:last]:
            low, high = max(begin, start), min(end, stop)
            if low >= high:
                continue
            spans.append((low, high))
            dtype = self._source.tensors[placed.name].dtype
            wants.append(
                Want(
                    placed.name,
                    placed.begin + (low - start) // dtype.itemsize,
                    placed.begin + (high - start) // dtype.itemsize,
                    buffer[low - begin : high - begin].view(dtype),
                )
            )
            nbytes += high - low
        self._source.fill(wants)
        if self.output.table_offset is not None:
            for start, stop in blocks(begin, end):
                at = 4 * (start // BLOCK_BYTES)
                word = crc32c(data[start - begin : stop - begin])
                self._table[at : at + 4] = word.to_bytes(4, "little")
        return Piece(data, spans, nbytes)

    def table(self) -> memoryview:
        """The table of checksums, once all pieces were read."""
        own = crc32c(memoryview(self._table)[:-4])
        self._table[-4:] = own.to_bytes(4, "little")
        return memoryview(self._table)


@dataclass(frozen=True)
class Piece:
    """A range of a file."""

    data: memoryview
    spans: Sequence[tuple[int, int]]
    """What of it is known, in bytes of the file; the rest is zero."""
    tensor_bytes: int
    """How many bytes of tensors are in it."""


def write_outputs(
    outputs: Iterable[OutputFile], source: Source, limits: Limits, progress: Progress | None
) -> None:
    """Write ``outputs`` with tensors of ``source``; all are synced. ``progress`` is called as by :func:`work`."""
    total = sum(info.nbytes for info in source.tensors.values())
    files = (_units(Contents(output, source), limits.piece_bytes) for output in outputs)
    work(chain.from_iterable(files), total, limits.threads, progress)


def write_small_file(path: Path, data: bytes) -> None:
    """Write a new file at once. Its bytes are durable when this returns."""
    with explained("writing", path, len(data)):
        operations.write_new_file(path, [data], "convert")


def _units(contents: Contents, piece_bytes: int) -> Iterator[Unit]:
    """What writes one file of a file system. The unit that is done last completes it."""
    output = contents.output
    begins = range(0, max(contents.end, 1), piece_bytes)
    lock, left = threading.Lock(), len(begins)  # the lock guards left

    def write(begin: int, done: Done) -> None:
        nonlocal left
        piece = contents.piece(begin, min(begin + piece_bytes, contents.end))
        with explained("writing", output.path, output.nbytes):
            descriptor = os.open(str(output.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                for low, high in piece.spans:
                    _write(descriptor, low, piece.data[low - begin : high - begin])
                with lock:
                    left -= 1
                    is_last = not left
                if is_last:
                    os.truncate(descriptor, output.nbytes)
                    if output.table_offset is not None:
                        _write(descriptor, output.table_offset, contents.table())
                # Of each unit: another descriptor need not learn of the errors of this one.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        done(piece.tensor_bytes)

    return (partial(write, begin) for begin in begins)


def _write(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        wrote = os.pwrite(descriptor, data, offset)
        offset += wrote
        data = data[wrote:]
