"""Carries out one rank's part of a plan: resolve it, lay it out, hand it to the engine, and wait until it is read.

The commit thread waits for the files to be durable, through :class:`WrittenPart`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates._native import Engine, Fault, SaveJob, Window
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import DataStatesError, DeviceError, SnapshotTornError, StorageError
from dcp_datastates.format.layout import lay_out
from dcp_datastates.io.devices import fences
from dcp_datastates.io.engine import engine, fit_cache
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.planning.write_job import WriteJob
from dcp_datastates.process.memory_limit import largest_host_cache_bytes
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.paths import directories_to_sync
from dcp_datastates.saving.sources import Sources, files_to_write, resolve_object
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage import local
from dcp_datastates.storage.attempt import Attempt

__all__ = ["Writing", "WrittenPart", "begin_write", "fail_write"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1


class WrittenPart:
    """One rank's files of one save, all read, on their way to stable storage (a ``round.Part``)."""

    def __init__(self, job: SaveJob, stats: SaveStats, nbytes: int) -> None:
        self._job = job
        self._stats = stats
        self._nbytes = nbytes

    def wait(self, seconds: float) -> bool:
        job = self._job
        if not job.wait(seconds):
            return False
        if job.fault is None:
            self._stats.bytes_written = self._nbytes
            self._stats.read_seconds = job.read_seconds
            self._stats.total_seconds = job.total_seconds
            self._stats.direct = job.direct
            if not job.direct:
                _log_buffered_once()
        return True

    @property
    def error(self) -> BaseException | None:
        fault = self._job.fault
        return None if fault is None else _error(fault, self._nbytes)

    @property
    def progress(self) -> int:
        """Bytes read and written so far."""
        return self._job.bytes_read + self._job.bytes_written

    def cancel(self) -> None:
        self._job.cancel()


@dataclass(frozen=True, eq=False)
class Writing:
    """A rank's part of a save whose reads have begun."""

    _save: SaveOperation
    _planning: SavePlanning
    _attempt: Attempt
    _content: WriteJob
    _job: SaveJob
    _samples: bytes

    def finish(self) -> None:
        """Wait until all data are read, and check that they are unchanged; then the files are for the commit thread.

        Raises :class:`SnapshotTornError` and errors of storage; then no read or write is in progress.
        """
        save, content, job, planning = self._save, self._content, self._job, self._planning
        try:
            if save.reads is None:
                while not job.wait_read(-1, _POLL_SECONDS):
                    pass
            else:
                try:
                    save.reads.settle()
                finally:
                    save.reads.raise_failure()
            if job.fault is not None:
                raise _error(job.fault, content.nbytes)
        except BaseException:
            _cancel(job)
            raise
        content.keep.clear()  # all is read: release the copies and the tensors
        report = planning.report(self._attempt, content, self._samples)
        save.committed.add_done_callback(lambda _: planning.ended(save.committed.peek() is None))
        part = WrittenPart(job, save.stats, content.nbytes)
        save.submit(part, report, planning.compose(save.call.metrics))


def begin_write(save: SaveOperation, planning: SavePlanning) -> Writing:
    """Begin to read and write this rank's part of ``save``. The planning lets go of the state.

    When an error is raised, no read or write is in progress.
    """
    try:
        return _begin(save, planning, save.ticket().attempt)
    finally:
        planning.release()


def _begin(save: SaveOperation, planning: SavePlanning, attempt: Attempt) -> Writing:
    reads, stats, rank = save.reads, save.stats, save.group.rank_set.rank
    folder = save.resolved_path() / attempt.name
    native = engine(save.call.config.host_cache_bytes)
    synced = save.on_storage("looking for the attempt", lambda: directories_to_sync(folder, rank))
    try:
        content = _content(save, planning, folder, native)
    except RuntimeError:  # the planner met a tensor that is not as planned
        if reads is not None:
            reads.check_unchanged()
        raise
    if reads is not None and reads.fences:  # from devices
        _fit_cache(save.call.config, content)
    stats.steady = content.report is not None
    samples = b""

    def start(window: Window) -> SaveJob:
        nonlocal samples
        samples = planning.sample(attempt)  # while the gate still holds
        job = native.save(
            content.files,
            synced if content.files else [],
            save.call.order,
            window,
            content.keep,
            content.fences,
            None if reads is None else reads.staged.expected,
        )
        save.progress.follow(job)
        return job

    job = start(Window(0.0)) if reads is None else reads.hand_over(start, content.readers)
    return Writing(save, planning, attempt, content, job, samples)


def fail_write(save: SaveOperation, error: BaseException) -> None:
    """Free the save's memory, and vote against it: the vote decides the outcome on all ranks."""
    if save.reads is not None:
        save.reads.fail(error)
    save.submit_failure(error)


def _cancel(job: SaveJob) -> None:
    """Returns when no read or write is in progress."""
    job.cancel()
    while not job.wait(_POLL_SECONDS):
        pass


def _fit_cache(config: WriterConfig, content: WriteJob) -> None:
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    most = largest_host_cache_bytes(ranks) if config.cache_grows else config.host_cache_bytes
    fit_cache(content.nbytes, most)


def _content(save: SaveOperation, planning: SavePlanning, folder: Path, native: Engine) -> WriteJob:
    reads, items = save.reads, planning.items
    keep: list[Any] = []
    prepared = planning.prepared()
    if prepared is not None and reads is not None:
        paths = [folder / layout.name for layout in prepared.layouts]
        files, sealed, report = prepared.files(
            paths,
            *reads.staged.bases(),
            lambda item: resolve_object(planning, items[item]),
            keep,
        )
        return WriteJob(files, sealed, prepared.layouts, reads.fences, keep, report)
    layouts = lay_out(items, save.group.rank_set.rank)
    paths = [folder / layout.name for layout in layouts]
    sources = Sources(native, planning, reads, keep, save.progress)
    files, sealed = files_to_write(items, sources, layouts, paths)
    readers = fences(native, sources.devices)
    after = [*(reads.fences if reads is not None else ()), *readers]
    return WriteJob(files, sealed, layouts, after, keep, readers=readers)


def _error(fault: Fault, nbytes: int) -> DataStatesError:
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
        logger.info("the file system refuses O_DIRECT; writing through the page cache")
