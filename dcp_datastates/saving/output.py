"""Where a rank's files of one save go: to a directory, which the engine writes to; or to a store, which threads send
what the engine has read.

The commit thread waits for the files to be durable, through a :class:`WrittenPart`.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dcp_datastates._native import SEGMENT_BYTES, Engine, Fault, SaveJob, Segment
from dcp_datastates.errors import (
    ConfigurationError,
    DataStatesError,
    DeviceError,
    SnapshotTornError,
    StorageError,
)
from dcp_datastates.io.streams import MOST_FILES_AT_ONCE, Upload
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.results import SaveStats
from dcp_datastates.storage import local
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.object_store import MOST_PARTS, part_bytes
from dcp_datastates.text import size as show_size

logger = logging.getLogger(__name__)


class WrittenPart:
    """One rank's files of one save, on their way to stable storage (a ``place.Part``).

    ``sizes``: the bytes of each file in ``folder``, by name, in the order of the job.
    """

    def __init__(
        self, job: SaveJob, stats: SaveStats, folder: Location, sizes: Mapping[str, int]
    ) -> None:
        self.job = job
        self._stats = stats
        self._folder = folder
        self._sizes = sizes

    def wait(self, seconds: float) -> bool:
        job, stats = self.job, self._stats
        if not job.wait(seconds):
            return False
        if job.fault is None and stats.written_bytes is None:
            stats.written_bytes = sum(self._sizes.values())
            stats.read_seconds = job.read_seconds
            stats.total_seconds = job.total_seconds
            stats.cache_seconds += job.cache_seconds
            stats.timeline.begin("voting", after=max(0.0, job.total_seconds - job.read_seconds))
        return True

    @property
    def error(self) -> BaseException | None:
        fault = self.job.fault
        return None if fault is None else _error_of(fault, sum(self._sizes.values()))

    @property
    def progress(self) -> int:
        """Bytes read and written so far."""
        return self.job.bytes_read + self.job.bytes_written

    def cancel(self) -> None:
        self.job.cancel()

    def check(self) -> None:
        """A store has counted the bytes of each object that it has acknowledged."""


class LocalPart(WrittenPart):
    """Files that the engine writes to a directory."""

    def wait(self, seconds: float) -> bool:
        if not super().wait(seconds):
            return False
        if self.job.fault is None:
            self._stats.direct = self.job.direct
            if not self.job.direct:
                _log_buffered()
        return True

    def check(self) -> None:
        # Some mounts of object stores say yes to ftruncate() after direct writes, and do nothing.
        for name, nbytes in self._sizes.items():
            path = Path(str(self._folder / name))
            with local.explained("looking at what was written", path):
                found = os.stat(path).st_size
            if found != nbytes:
                raise StorageError(
                    errno.EIO,
                    f"{nbytes} bytes were written, and the file has {found}: the file system does not keep what it "
                    f"has acknowledged. If it is a mount of an object store, save to the store's URL (s3://…)",
                    str(path),
                )


def _error_of(fault: Fault, nbytes: int) -> DataStatesError:
    if fault.kind == "io":
        # StorageError adds the number and the path itself.
        text = fault.message.replace(f" of '{fault.path}'", "").replace(
            f" (errno {fault.errno})", ""
        )
        text += local.about_space(fault.errno, fault.path, nbytes)
        return StorageError(fault.errno or None, text, fault.path)
    if fault.kind == "device":
        return DeviceError(fault.message)
    if fault.kind in ("lost", "torn"):
        return SnapshotTornError(fault.message)
    return DataStatesError(fault.message)


@functools.cache
def _log_buffered() -> None:
    """Once per process."""
    logger.log(
        once_per_job(logging.INFO),
        "the file system refuses O_DIRECT; writing through the page cache",
    )


# ---- uploads to a store --------------------------------------------------------------------------

PARTS_IN_FLIGHT: Final = 16
"""Of all files that are sent at once."""

_ABORT_SECONDS: Final = 3.0
"""How long a failed save waits until its parts are removed, before it reports the failure."""

_LAST_SECONDS: Final = 10.0
"""How long the end of the process waits for that."""


def check_fits(sizes: Iterable[int], engine: Engine) -> None:
    """Raise :class:`ConfigurationError` unless the host cache has room for the parts of the largest file.

    ``sizes``: the bytes of each file.
    """
    largest = max(sizes, default=0)
    part = part_bytes(largest)
    if part > SEGMENT_BYTES and 4 * part > engine.host_cache_bytes:
        raise ConfigurationError(
            f"a file of {show_size(largest)} goes to a store in {MOST_PARTS} parts of {show_size(part)}, and the host "
            f"cache of {show_size(engine.host_cache_bytes)} has no room for four of them: give "
            f"host_cache_size={show_size(4 * part)!r}, at least"
        )


class StorePart(WrittenPart):
    """Files that threads send to a store. The threads end with the job."""

    def __init__(
        self, job: SaveJob, stats: SaveStats, folder: Location, sizes: Mapping[str, int]
    ) -> None:
        super().__init__(job, stats, folder, sizes)
        many = all(part_bytes(nbytes) == SEGMENT_BYTES for nbytes in self._sizes.values())
        # A file whose parts take several segments must not wait for those that another file's parts hold.
        self._at_once = max(1, min(len(self._sizes), MOST_FILES_AT_ONCE)) if many else 1
        self._failure: BaseException | None = None  # the store's first error
        self._gives_up_at: float | None = None
        self._upload = Upload(job, list(self._sizes), self._put, self._at_once)
        _uploads.add(self)

    def wait(self, seconds: float) -> bool:
        return super().wait(seconds) and (self.job.fault is None or self._has_stopped(seconds))

    def _has_stopped(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until nothing is sent any more, and unfinished parts are removed; return whether that
        is so. True, too, if the store has not answered for some seconds.
        """
        now = time.monotonic()
        if self._gives_up_at is None:
            self._gives_up_at = now + _ABORT_SECONDS
        return self._upload.join(max(0.0, min(seconds, self._gives_up_at - now))) or (
            time.monotonic() >= self._gives_up_at
        )

    @property
    def error(self) -> BaseException | None:
        fault = self.job.fault
        if fault is not None and fault.kind == "io" and self._failure is not None:
            return self._failure
        return super().error

    def abort(self, until: float) -> None:
        """Cancel the job; wait until nothing is sent any more, or the monotonic clock says ``until``."""
        self.job.cancel()
        self._upload.join(max(0.0, until - time.monotonic()))

    def _put(self, name: str, pieces: Iterator[Segment]) -> None:
        """Store one file. Its pieces are segments, held by the library alone."""
        path = self._folder / name
        assert isinstance(path, ObjectPath)
        store, key = path.store, path.key
        nbytes = self._sizes[name]
        part = part_bytes(nbytes)
        try:
            hit("upload.before")
            if nbytes <= part:
                store.put(key, next(pieces))
                next(pieces, None)
            else:
                in_flight = max(1, PARTS_IN_FLIGHT // self._at_once)
                store.put_stream(key, pieces, part_bytes=part, parts_in_flight=in_flight)
            if self.job.fault is not None:
                # All was sent before the job failed. Whoever cleans up may have done so.
                store.delete([key])
            hit("upload.after")
        except BaseException as error:
            self._failure = self._failure or error
            raise


_uploads: weakref.WeakSet[StorePart] = weakref.WeakSet()


def _abort_all() -> None:
    """A thread in a store's library must not outlive the interpreter, and parts that are never completed cost money."""
    until = time.monotonic() + _LAST_SECONDS
    for part in list(_uploads):
        part.abort(until)


at_end(_abort_all, Phase.GIVE_UP)
