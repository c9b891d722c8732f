"""Files whose bytes are known but for their tensors. They are written in one go, from the first byte to the last: to a
file system, or to a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from typing_extensions import Buffer

from dcp_datastates._native import BLOCK_BYTES, crc32c
from dcp_datastates.conversion.source import PIECE_BYTES, Source, as_bytes
from dcp_datastates.process.work import Done, Unit
from dcp_datastates.storage import operations
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.object_store import put_pieces

_PARTS_IN_FLIGHT: Final = 2
"""Of each file that goes to a store: beside the piece that is read and the one that becomes a part."""


class Output(NamedTuple):
    """What a target consists of."""

    units: Sequence[Unit]
    """Each writes one file with tensors."""
    finish: Callable[[], None] = lambda: None
    """Completes the target when the files are written."""


@dataclass(frozen=True)
class OutputFile:
    """A file: a header, tensors, objects and, if it has ``table_offset``, the checksums of all that."""

    path: Location
    nbytes: int
    header: bytes
    names: Sequence[str]
    """Of the tensors, in their order."""
    objects: Sequence[bytes] = ()
    table_offset: int | None = None

    def write(self, source: Source, done: Done) -> None:
        """Write the file with tensors of ``source``; its bytes are durable when this returns."""
        pieces = self._content(source, done)
        if self.table_offset is not None:
            pieces = _with_checksums(pieces, self.table_offset)
        if isinstance(self.path, ObjectPath):
            put_pieces(self.path.store, self.path.key, self.nbytes, pieces, _PARTS_IN_FLIGHT)
            return
        with explained("writing", self.path, self.nbytes):
            operations.write_new_file(self.path, pieces, "convert")

    def _content(self, source: Source, done: Done) -> Iterator[Buffer]:
        yield self.header
        for names in source.groups(self.names, PIECE_BYTES):
            yield from _pieces(source.read(names), done)
        yield from self.objects


def _pieces(tensors: list[torch.Tensor], done: Done) -> Iterator[Buffer]:
    """The bytes of ``tensors``. A function of its own: when it ends, their memory is free for the next ones."""
    for tensor in tensors:
        data = as_bytes(tensor)
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            yield piece
            done(len(piece))


def _with_checksums(pieces: Iterator[Buffer], table_offset: int) -> Iterator[Buffer]:
    """``pieces``, zeros up to ``table_offset``, and the table (``format/layout.py``)."""
    table = bytearray()
    crc, at = 0, 0

    def add(piece: Buffer) -> Buffer:
        nonlocal crc, at
        left = memoryview(piece).cast("B")
        while left:
            block = left[: BLOCK_BYTES - at % BLOCK_BYTES]
            crc, at, left = crc32c(block, crc), at + len(block), left[len(block) :]
            if at % BLOCK_BYTES == 0:
                table.extend(crc.to_bytes(4, "little"))
                crc = 0
        return piece

    yield from map(add, pieces)
    yield add(bytes(table_offset - at))
    if at % BLOCK_BYTES:
        table += crc.to_bytes(4, "little")
    yield bytes(table) + crc32c(table).to_bytes(4, "little")


def write_small_file(path: Path, data: bytes) -> None:
    """Write a new file at once. Its bytes are durable when this returns."""
    with explained("writing", path, len(data)):
        operations.write_new_file(path, [data], "convert")
