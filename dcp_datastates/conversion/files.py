"""Reads files and objects of other programs: all of one, a part as a stream, or as a local file."""

from __future__ import annotations

import contextlib
import errno
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dcp_datastates.errors import CheckpointNotFoundError, StorageError
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location
from dcp_datastates.storage.readable import ReadableFile, open_readable

_BUFFER_BYTES: Final = 64 << 10
"""What a stream reads at a time: of an object, by one request."""

_COPIED_BYTES: Final = 8 << 20
"""What is copied of an object at a time."""


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
            stream = stream_of(file)
            while data := stream.read(_COPIED_BYTES):
                copy.write(data)
            copy.flush()
        yield Path(copy.name)


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
