"""Writes checkpoints of stock DCP, which ``FileSystemReader`` reads.

Each chunk is an archive of ``torch.save``; a file holds several, one after another. Large tensors are cut into chunks,
so that memory does not depend on their sizes.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_datastates.conversion.job import Job, Limits
from dcp_datastates.conversion.memory import scratch_tensor
from dcp_datastates.conversion.output_file import write_small_file
from dcp_datastates.conversion.source import Source, Want, metadata_of_source
from dcp_datastates.process.work import Done, Unit
from dcp_datastates.storage import local

__all__ = ["stock_job"]

Chunk = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets, sizes, and the number of elements before it, in row-major order."""

Item = tuple[str, Chunk]
"""A chunk, with its tensor's name."""


def stock_job(source: Source, folder: Path, limits: Limits) -> Job:
    """A checkpoint of stock DCP, with a file for each thread."""
    writing = _Writing(source, folder, limits.piece_bytes)
    return Job(writing.units(limits.threads), writing.files, writing.write_metadata)


class _Writing:
    def __init__(self, source: Source, folder: Path, chunk_bytes: int) -> None:
        self._source = source
        self._folder = folder
        self._chunk_bytes = chunk_bytes
        self._chunks: dict[str, list[Chunk]] = {
            name: list(_cut(info.shape, max(1, chunk_bytes // info.dtype.itemsize)))
            for name, info in source.tensors.items()
        }
        self._lock = threading.Lock()  # guards _places
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self.files: tuple[Path, ...] = ()

    def units(self, count: int) -> list[Unit]:
        """One unit for each of ``count`` files. Chunks go to the file with the fewest bytes."""
        shares: list[list[Item]] = [[] for _ in range(count)]
        sizes = [0] * count
        for name, chunks in self._chunks.items():
            for chunk in chunks:
                least = sizes.index(min(sizes))
                shares[least].append((name, chunk))
                sizes[least] += self._nbytes((name, chunk)) + 1
        used = [share for share in shares if share] or [[]]
        self.files = tuple(self._folder / f"__{number}_0.distcp" for number in range(len(used)))
        objects = (self._source.objects, *[()] * (len(used) - 1))
        return list(map(self._unit, self.files, used, objects))

    def _unit(self, file: Path, share: Sequence[Item], objects: Sequence[str]) -> Unit:
        def write(done: Done) -> None:
            with local.explained("writing", file), file.open("xb") as stream:
                for name in objects:
                    begin = stream.tell()
                    stream.write(self._source.object_bytes(name))
                    self._put(MetadataIndex(name), file, begin, stream.tell())
                for batch in self._batches(share):
                    tensors = self._read(batch)
                    for (name, (offsets, _, _)), tensor in zip(batch, tensors, strict=True):
                        begin = stream.tell()
                        _save(tensor, stream)
                        self._put(MetadataIndex(name, offsets), file, begin, stream.tell())
                        done(tensor.nbytes)
                    del tensor, tensors
                stream.flush()
                os.fsync(stream.fileno())

        return write

    def _batches(self, share: Sequence[Item]) -> Iterator[list[Item]]:
        """Small chunks are read together."""
        batch: list[Item] = []
        room = self._chunk_bytes
        for item in share:
            nbytes = self._nbytes(item)
            if batch and nbytes > room:
                yield batch
                batch, room = [], self._chunk_bytes
            batch.append(item)
            room -= nbytes
        if batch:
            yield batch

    def _nbytes(self, item: Item) -> int:
        name, (_, sizes, _) = item
        return math.prod(sizes) * self._source.tensors[name].dtype.itemsize

    def _read(self, batch: Sequence[Item]) -> list[torch.Tensor]:
        wants = []
        for name, (_, sizes, before) in batch:
            count = math.prod(sizes)
            memory = scratch_tensor(count, self._source.tensors[name].dtype)
            wants.append(Want(name, before, before + count, memory))
        self._source.fill(wants)
        return [want.into.view(item[1][1]) for want, item in zip(wants, batch, strict=True)]

    def _put(self, index: MetadataIndex, file: Path, begin: int, end: int) -> None:
        with self._lock:
            self._places[index] = _StorageInfo(file.name, begin, end - begin)

    def write_metadata(self) -> None:
        """Write ``.metadata``, which makes it a checkpoint."""

        def chunks_of(name: str) -> list[ChunkStorageMetadata]:
            return [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for offsets, sizes, _ in self._chunks[name]
            ]

        metadata = metadata_of_source(self._source, chunks_of, self._places)
        buffer = io.BytesIO()
        pickle.dump(metadata, buffer)
        write_small_file(self._folder / local.METADATA_NAME, buffer.getvalue())


def _save(tensor: torch.Tensor, stream: IO[bytes]) -> None:
    """``torch.save``, straight into ``stream``: a copy in between would be as large as the tensor. Raises OSError."""
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:  # torch's own words for a full disk do not name it
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _cut(shape: Sequence[int], most: int) -> Iterator[Chunk]:
    """Chunks of at most ``most`` elements, each contiguous in row-major order."""
    numel = math.prod(shape)
    if numel <= most or not shape:
        yield (0,) * len(shape), tuple(shape), 0
        return
    row = math.prod(shape[1:])
    if row <= most:
        rows = most // row
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            rest = (0,) * (len(shape) - 1)
            yield (first, *rest), (count, *shape[1:]), first * row
        return
    for first, (offsets, sizes, before) in itertools.product(
        range(shape[0]), list(_cut(shape[1:], most))
    ):
        yield (first, *offsets), (1, *sizes), first * row + before
