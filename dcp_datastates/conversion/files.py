"""Reads arrays from places in files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dcp_datastates.conversion.memory import scratch_tensor
from dcp_datastates.conversion.source import Part
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
)
from dcp_datastates.storage.local import explained, open_regular, read_at

__all__ = ["Array", "as_bytes", "opened", "read_parts"]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The open file at ``path``. A read that fails in the block raises :class:`StorageError`.

    Raises :class:`CheckpointNotFoundError` or :class:`StorageError`.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        kind = CheckpointNotFoundError if error.errno == errno.ENOENT else StorageError
        raise kind(error.errno, f"opening {path} failed: {error.strerror}", str(path)) from error
    with os.fdopen(descriptor, "rb") as file, explained("reading", path):
        yield file


@dataclass(frozen=True)
class Array:
    """A strided array in a file. ``offset``: the place of its first element in the file, in bytes."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""

    def read(self, file: io.BufferedReader, part: Part) -> None:
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
        if read_at(file.fileno(), place, view) < len(view):
            raise CheckpointCorruptError(
                f"{self.path} is cut short: it ends before byte {place + len(view)}"
            )
        if not dense:
            into.copy_(data.as_strided(sizes, self.strides))


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
    by_file: dict[Path, list[tuple[Array, Part]]] = {}
    for array, part in wanted:
        by_file.setdefault(array.path, []).append((array, part))
    for path, here in by_file.items():
        with opened(path) as file:
            for array, part in here:
                array.read(file, part)
