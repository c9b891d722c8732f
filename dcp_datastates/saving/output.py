"""Where a rank's files of one save go: to a directory, which the engine writes to; or to a store, which threads send
what the engine has read.

The commit thread waits for the files to be durable, through a :class:`WrittenPart`.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from dcp_datastates._native import Engine, ExpectedBytes, Fault, SaveJob, Window
from dcp_datastates.errors import DataStatesError, DeviceError, SnapshotTornError, StorageError
from dcp_datastates.planning.save_planning import WriteJob
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.saving.paths import directories_to_sync
from dcp_datastates.saving.store_upload import StoreUpload, check_fits
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location, ObjectPath

__all__ = ["Output", "WrittenPart", "cancel", "error_of", "output_to"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1


class WrittenPart:
    """One rank's files of one save, all read, on their way to stable storage (a ``round.Part``)."""

    def __init__(self, job: SaveJob, stats: SaveStats, nbytes: int) -> None:
        self._job = job
        self._stats = stats
        self._nbytes = nbytes

    def wait(self, seconds: float) -> bool:
        job, stats = self._job, self._stats
        if not job.wait(seconds):
            return False
        if job.fault is None and stats.bytes_written is None:
            stats.bytes_written = self._nbytes
            stats.read_seconds = job.read_seconds
            stats.total_seconds = job.total_seconds
            stats.cache_seconds += job.cache_seconds
            stats.timeline.begin("voting", after=max(0.0, job.total_seconds - job.read_seconds))
        return True

    @property
    def error(self) -> BaseException | None:
        fault = self._job.fault
        return None if fault is None else error_of(fault, self._nbytes)

    @property
    def progress(self) -> int:
        """Bytes read and written so far."""
        return self._job.bytes_read + self._job.bytes_written

    def cancel(self) -> None:
        self._job.cancel()

    def check(self) -> None:
        """A store has counted the bytes of each object that it has acknowledged."""


class _LocalPart(WrittenPart):
    def __init__(
        self, job: SaveJob, stats: SaveStats, nbytes: int, files: Mapping[Path, int]
    ) -> None:
        super().__init__(job, stats, nbytes)
        self._files = files

    def wait(self, seconds: float) -> bool:
        if not super().wait(seconds):
            return False
        if self._job.fault is None:
            self._stats.direct = self._job.direct
            if not self._job.direct:
                _log_buffered_once()
        return True

    def check(self) -> None:
        # Some mounts of object stores say yes to ftruncate() after direct writes, and do nothing.
        for path, nbytes in self._files.items():
            with local.explained("looking at what was written", path):
                found = os.stat(path).st_size
            if found != nbytes:
                raise StorageError(
                    errno.EIO,
                    f"{nbytes} bytes were written, and the file has {found}: the file system does not keep what it "
                    f"has acknowledged. If it is a mount of an object store, save to the store's URL (s3://…)",
                    str(path),
                )


class _StorePart(WrittenPart):
    def __init__(self, job: SaveJob, stats: SaveStats, nbytes: int, upload: StoreUpload) -> None:
        super().__init__(job, stats, nbytes)
        self._upload = upload

    def wait(self, seconds: float) -> bool:
        return super().wait(seconds) and (self._job.fault is None or self._upload.is_over(seconds))

    @property
    def error(self) -> BaseException | None:
        fault = self._job.fault
        if fault is not None and fault.kind == "io" and self._upload.failure is not None:
            return self._upload.failure
        return super().error


class Output(Protocol):
    """The folder of a rank's files of one save. One thread uses it."""

    def make_ready(self, rank: int) -> None:
        """Raise unless the files of ``rank`` can lie there. Operates on storage."""

    def save(
        self,
        engine: Engine,
        content: WriteJob,
        order: int,
        window: Window,
        expected: ExpectedBytes | None,
    ) -> SaveJob:
        """Begin to read and write. The arguments are those of ``Engine.save``."""

    def part(self, job: SaveJob, stats: SaveStats, nbytes: int) -> WrittenPart:
        """The part of a job that :meth:`save` has begun."""


class _Directory:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._synced: list[str] = []
        self._files: dict[Path, int] = {}

    def make_ready(self, rank: int) -> None:
        self._synced = directories_to_sync(self._folder, rank)

    def save(
        self,
        engine: Engine,
        content: WriteJob,
        order: int,
        window: Window,
        expected: ExpectedBytes | None,
    ) -> SaveJob:
        synced = self._synced if content.files else []
        self._files = {
            self._folder / layout.name: sealed.nbytes
            for layout, sealed in zip(content.layouts, content.sealed, strict=True)
        }
        return engine.save(
            content.files, synced, order, window, content.keep, content.fences, expected
        )

    def part(self, job: SaveJob, stats: SaveStats, nbytes: int) -> WrittenPart:
        return _LocalPart(job, stats, nbytes, self._files)


class _Prefix:
    def __init__(self, folder: ObjectPath) -> None:
        self._folder = folder
        self._upload: StoreUpload | None = None

    def make_ready(self, rank: int) -> None:
        pass  # a store has no directories

    def save(
        self,
        engine: Engine,
        content: WriteJob,
        order: int,
        window: Window,
        expected: ExpectedBytes | None,
    ) -> SaveJob:
        check_fits(content, engine)
        job = engine.save_streamed(
            content.files, order, window, content.keep, content.fences, expected
        )
        self._upload = StoreUpload(job, self._folder, content)
        return job

    def part(self, job: SaveJob, stats: SaveStats, nbytes: int) -> WrittenPart:
        assert self._upload is not None, "save() comes first"
        return _StorePart(job, stats, nbytes, self._upload)


def output_to(folder: Location) -> Output:
    """The output to a folder of either kind."""
    return _Prefix(folder) if isinstance(folder, ObjectPath) else _Directory(folder)


def cancel(job: SaveJob, seconds: float = math.inf) -> None:
    """Returns when no read or write is in progress, or after ``seconds``."""
    job.cancel()
    until = time.monotonic() + seconds
    while not job.wait(_POLL_SECONDS) and time.monotonic() < until:
        pass


def error_of(fault: Fault, nbytes: int) -> DataStatesError:
    """The error for the ``fault`` of a job that was to write ``nbytes`` bytes."""
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


_logged_buffered = False


def _log_buffered_once() -> None:
    global _logged_buffered
    if not _logged_buffered:
        _logged_buffered = True
        logger.log(
            once_per_job(logging.INFO),
            "the file system refuses O_DIRECT; writing through the page cache",
        )
