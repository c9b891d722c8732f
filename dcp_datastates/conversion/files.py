"""Reads files and objects of other programs: bytes, mapped bytes, or what ``torch.save`` has written."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import torch

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeObjectError,
)
from dcp_datastates.io.unpickling import unpickled
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location
from dcp_datastates.storage.readable import ReadableFile, open_readable

_REQUEST_BYTES: Final = 16 << 20
"""What is read of an object by one request."""


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


def part_of(file: ReadableFile, begin: int, nbytes: int) -> bytearray:
    """``nbytes`` of an open file from ``begin`` on; fewer at its end."""
    data = bytearray(max(0, min(nbytes, file.nbytes - begin)))
    count = 0
    with memoryview(data) as view:
        for at in range(0, len(data), _REQUEST_BYTES):
            count += file.read_at(begin + at, view[at : at + _REQUEST_BYTES])
    del data[count:]
    return data


def read_whole(path: Location, at_most: int | None = None) -> bytes:
    """The bytes of a file, or its first ``at_most``. Raises as :func:`opened`."""
    with opened(path) as file:
        return bytes(part_of(file, 0, file.nbytes if at_most is None else at_most))


@contextlib.contextmanager
def local_file(path: Location) -> Iterator[Path]:
    """A file with the bytes at ``path``: of an object in a store, a copy in the directory for temporary files, which is
    removed with the context; a mapping of it stays. Raises as :func:`opened`.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="dcp_datastates-") as copy:
        with opened(path) as file, explained("copying to a temporary file", copy.name, file.nbytes):
            for begin in range(0, file.nbytes, _REQUEST_BYTES):
                copy.write(part_of(file, begin, _REQUEST_BYTES))
            copy.flush()
        yield Path(copy.name)


def mapped(path: Location) -> torch.UntypedStorage:
    """The bytes of a file, mapped. Raises as :func:`opened`."""
    with local_file(path) as local, opened(local) as file:
        try:
            whole = torch.from_file(str(local), size=file.nbytes, dtype=torch.uint8, device="cpu")
            return whole.untyped_storage()
        except RuntimeError as error:
            raise StorageError(errno.EIO, f"mapping it failed: {error}", str(path)) from error


def loaded(
    file: str | IO[bytes],
    said: str,
    allow_objects: bool,
    way_out: str = "exclude it",
    mapped: bool = False,
) -> Any:
    """:func:`~dcp_datastates.io.unpickling.unpickled`, with tensors on the CPU.

    Raises :class:`UnsafeObjectError` as that; :class:`CheckpointCorruptError` or :class:`StorageError`.
    """
    try:
        return unpickled(file, said, allow_objects, device="cpu", way_out=way_out, mapped=mapped)
    except UnsafeObjectError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"reading {said} failed: {error.strerror}", said) from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{said}: torch cannot read it: {type(error).__name__}: {str(error)[:200]}"
        ) from error
