"""Reads arrays from places in files."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_datastates.conversion.memory import scratch_tensor
from dcp_datastates.conversion.source import Want, boxes
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
)
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location
from dcp_datastates.storage.readable import ReadableFile, open_readable

__all__ = ["Array", "Files", "as_bytes", "fill_from"]

_MOST_OPEN: Final = 200
"""Files that stay open: a process may have 1,024."""


class Files:
    """Files that are opened at first use. The first ones stay open. Any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _open
        self._open: dict[Location, ReadableFile] = {}

    def nbytes(self, path: Location) -> int:
        """The size of the file in bytes."""
        with self._opened(path) as file:
            return file.nbytes

    def read(self, path: Location, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of the file from ``offset``.

        Raises :class:`CheckpointCorruptError` if the file ends before, :class:`CheckpointNotFoundError` or
        :class:`StorageError`.
        """
        with self._opened(path) as file, explained("reading", path):
            if file.read_at(offset, into) < len(into):
                raise CheckpointCorruptError(
                    f"{path} is cut short: it ends before byte {offset + len(into)}"
                )

    @contextlib.contextmanager
    def _opened(self, path: Location) -> Iterator[ReadableFile]:
        with self._lock:
            file = self._open.get(path)
            if file is None and len(self._open) < _MOST_OPEN:
                file = self._open[path] = _open(path)
        if file is not None:
            yield file
            return
        file = _open(path)
        try:
            yield file
        finally:
            file.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()


def _open(path: Location) -> ReadableFile:
    try:
        return open_readable(path)
    except OSError as error:
        kind = CheckpointNotFoundError if error.errno == errno.ENOENT else StorageError
        raise kind(error.errno, f"opening {path} failed: {error.strerror}", str(path)) from error


@dataclass(frozen=True)
class Array:
    """A strided array in a file. ``offset``: the place of its first element in the file, in bytes."""

    path: Location
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""

    def read(
        self, files: Files, offsets: Sequence[int], sizes: Sequence[int], into: torch.Tensor
    ) -> None:
        """Copy the box at ``offsets`` into a tensor of shape ``sizes``.

        The bytes between the box's first and last element are read. If the array is row-major and the box is contiguous
        in it, these are the bytes of the box; if not, they may be nearly all of the array's.
        """
        if 0 in sizes:
            return
        itemsize = self.dtype.itemsize
        first = sum(at * step for at, step in zip(offsets, self.strides, strict=True))
        span = 1 + sum((size - 1) * step for size, step in zip(sizes, self.strides, strict=True))
        place = self.offset + first * itemsize
        box = torch.empty_strided(tuple(sizes), self.strides, dtype=self.dtype, device="meta")
        if span == into.numel() and into.is_contiguous() and box.is_contiguous():
            files.read(self.path, place, as_bytes(into))
            return
        data = scratch_tensor(span, self.dtype)
        files.read(self.path, place, as_bytes(data))
        into.copy_(data.as_strided(tuple(sizes), self.strides))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    if not tensor.numel():
        return memoryview(bytearray())
    data: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def fill_from(arrays: Mapping[str, Array], files: Files, wants: Sequence[Want]) -> None:
    """Read what ``wants`` asks for from ``arrays``, by name."""
    for want in wants:
        array = arrays[want.name]
        done = 0
        for offsets, sizes in boxes(array.shape, want.begin, want.end):
            count = torch.Size(sizes).numel()
            array.read(files, offsets, sizes, want.into[done : done + count].view(sizes))
            done += count
