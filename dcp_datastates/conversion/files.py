"""Reads files and objects of other programs: all of one, a part as a stream, arrays at places in it."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_datastates.conversion.source import Part
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
)
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location
from dcp_datastates.storage.readable import ReadableFile, open_readable

__all__ = ["Array", "as_bytes", "opened", "read_parts", "read_whole", "scratch_tensor", "stream_of"]

_BUFFER_BYTES: Final = 64 << 10
"""What a stream reads at a time: of an object, by one request."""

_MAPPED_FROM: Final = 256 << 10
"""Bytes from which a mapping is worth its cost."""


@contextlib.contextmanager
def opened(path: Location) -> Iterator[ReadableFile]:
    """The open file at ``path``. A read that fails in the block raises :class:`StorageError`.

    Raises :class:`CheckpointNotFoundError` or :class:`StorageError`.
    """
    try:
        file = open_readable(path)
    except OSError as error:
        kind = CheckpointNotFoundError if error.errno == errno.ENOENT else StorageError
        raise kind(error.errno, f"opening {path} failed: {error.strerror}", str(path)) from error
    with contextlib.closing(file), explained("reading", path):
        yield file


def read_whole(path: Location, at_most: int = -1) -> bytes:
    """The bytes of a file, or its first ``at_most``. Raises as :func:`opened`."""
    with opened(path) as file:
        return stream_of(file).read(at_most)


def stream_of(file: ReadableFile, begin: int = 0, nbytes: int | None = None) -> io.BufferedReader:
    """The bytes of an open file from ``begin`` on, or ``nbytes`` of them, as a stream that can seek."""
    return io.BufferedReader(
        _Stream(file, begin, file.nbytes - begin if nbytes is None else nbytes), _BUFFER_BYTES
    )


class _Stream(io.RawIOBase):
    def __init__(self, file: ReadableFile, begin: int, nbytes: int) -> None:
        super().__init__()
        self._file, self._begin, self._nbytes, self._at = file, begin, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._at)]
        count = self._file.read_at(self._begin + self._at, into)
        self._at += count
        return count


@dataclass(frozen=True)
class Array:
    """A strided array in a file. ``offset``: the place of its first element in the file, in bytes."""

    path: Location
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""

    def read(self, file: ReadableFile, part: Part) -> None:
        """Copy a part of the array from its open file.

        The bytes between the part's first and last element are read. If the array is row-major and the part is
        contiguous in it, these are the bytes of the part; if not, they may be nearly all of the array's.
        """
        sizes, into = part.sizes, part.into
        if 0 in sizes:
            return
        first = sum(at * step for at, step in zip(part.offsets, self.strides, strict=True))
        span = 1 + sum((size - 1) * step for size, step in zip(sizes, self.strides, strict=True))
        box = torch.empty_strided(sizes, self.strides, dtype=self.dtype, device="meta")
        dense = span == into.numel() and into.is_contiguous() and box.is_contiguous()
        data = into if dense else scratch_tensor(span, self.dtype)
        place, view = self.offset + first * self.dtype.itemsize, as_bytes(data)
        if file.read_at(place, view) < len(view):
            raise CheckpointCorruptError(
                f"{self.path} is cut short: it ends before byte {place + len(view)}"
            )
        if not dense:
            into.copy_(data.as_strided(sizes, self.strides))


def scratch_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``count`` elements, (N,), on the host; its values are undefined. Its memory goes back to the system
    immediately: ``malloc`` keeps much of what threads allocate and free in sizes of megabytes.
    """
    nbytes = count * dtype.itemsize
    if nbytes < _MAPPED_FROM:
        return torch.empty(count, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a hundredth of the page faults
    return torch.frombuffer(memory, dtype=dtype)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    if not tensor.numel():
        return memoryview(bytearray())
    data: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def read_parts(wanted: Iterable[tuple[Array, Part]]) -> None:
    """Read parts of arrays. Each file is opened once.

    Raises :class:`CheckpointCorruptError` if a file ends before, and the errors of :func:`opened`.
    """
    by_file: dict[Location, list[tuple[Array, Part]]] = {}
    for array, part in wanted:
        by_file.setdefault(array.path, []).append((array, part))
    for path, here in by_file.items():
        with opened(path) as file:
            for array, part in here:
                array.read(file, part)
