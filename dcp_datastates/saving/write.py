"""Carries out one rank's part of a plan: resolve it, lay it out, hand it to the engine, and wait until it is read.

The commit thread waits for the files to be durable, through :class:`WrittenPart`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates._native import DeviceEvent, Engine, Fault, SaveFile, SaveJob, Window
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import (
    ConfigurationError,
    DataStatesError,
    DeviceError,
    SnapshotTornError,
    StorageError,
)
from dcp_datastates.format.layout import FileLayout, SealedFile, lay_out
from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS
from dcp_datastates.io.devices import fences
from dcp_datastates.io.engine import engine, fit_cache
from dcp_datastates.planning.exchange import RankReport, Report
from dcp_datastates.planning.prepared_write import Prepared, report_of
from dcp_datastates.planning.rank_plan_cache import Share, SharesPlanner
from dcp_datastates.planning.replicas import sample
from dcp_datastates.process.memory_limit import largest_host_cache_bytes
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.paths import directories_to_sync
from dcp_datastates.saving.sources import Sources, files_to_write, resolve_object
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage import local
from dcp_datastates.storage.attempt import Attempt

__all__ = [
    "Ahead",
    "Writing",
    "WrittenPart",
    "begin_write",
    "fail_write",
    "read_ahead",
]

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
class _Content:
    """The files of a share, with their layouts and fences."""

    files: list[SaveFile]
    sealed: Sequence[SealedFile]
    layouts: Sequence[FileLayout]
    fences: list[DeviceEvent]
    """Events that device copies must wait for."""
    report: Report | None = None
    readers: list[DeviceEvent] = field(default_factory=list)
    """Events of the kernels that this thread has launched to resolve tensors."""


@dataclass(frozen=True, eq=False)
class Ahead:
    """The reads of a save that began before it was planned."""

    share: Share
    content: _Content


def read_ahead(save: SaveOperation, planner: SharesPlanner) -> Ahead | None:
    """Begin to read the data that this rank writes if the plan is unchanged. None if the plan is unknown, or reads must
    wait.
    """
    session, reads = save.session, save.reads
    if session is None or session.staged is None or not session.staged.is_plain():
        return None
    assert reads is not None
    foreseen = planner.foresee(session)
    if foreseen is None:
        return None
    keep: list[Any] = []
    names = [Path(layout.name) for layout in foreseen.prepared.layouts]
    bases = session.staged.bases()
    files, sealed, report = foreseen.prepared.files(names, *bases, foreseen.resolve, keep)
    after = reads.fences
    native = engine(save.call.config.host_cache_bytes)

    def start(window: Window) -> SaveJob:
        job = native.save_unplaced(
            files, save.call.order, window, keep, after, reads.staged.expected
        )
        save.progress.follow(job)
        return job

    if reads.foresee(start) is None:
        return None
    content = _Content(files, sealed, foreseen.prepared.layouts, after, report)
    return Ahead(foreseen.share, content)


def begin_write(
    save: SaveOperation,
    plan: SavePlan,
    planner: SavePlanner,
    attempt: Attempt,
    rank: int,
    ahead: Ahead | None = None,
) -> Writing:
    """Begin to read and write ``plan``, this rank's part of ``save``. The planner is not needed afterwards.

    ``rank`` is the rank in the files' names. When an error is raised, no read or write is in progress.
    """
    share = _share_of(save)
    global_plan = b"" if share is None else share.global_plan
    return _begin(_Write(save, plan, planner, share, attempt, rank, global_plan), ahead)


@dataclass(frozen=True, eq=False)
class _Write:
    """The arguments of :func:`begin_write`."""

    save: SaveOperation
    plan: SavePlan
    planner: SavePlanner
    share: Share | None
    attempt: Attempt
    rank: int
    global_plan: bytes
    """Name of the global plan of ``share``, which may be that of a later save by the time this one is read."""
    keep: list[Any] = field(default_factory=list)
    """Objects that must stay alive until they have been read."""

    @property
    def folder(self) -> Path:
        """The attempt's directory."""
        return self.save.resolved_path() / self.attempt.name


def _share_of(save: SaveOperation) -> Share | None:
    session = save.session
    if session is None:
        return None
    if save.call.own and session.taken_by is None:
        raise ConfigurationError(
            "set_up_planner() of the planner was replaced after async_save was called, by a function that "
            "takes no storage_meta or calls no super().set_up_planner(); set hooks before the call"
        )
    return (
        session.taken_by.share_of(session) if isinstance(session.taken_by, SharesPlanner) else None
    )


@dataclass(frozen=True, eq=False)
class Writing:
    """A rank's part of a save whose reads have begun."""

    _write: _Write
    _content: _Content
    _job: SaveJob
    _samples: bytes

    def settle(self) -> tuple[list[Any], WrittenPart]:
        """Wait until all data are read, and check that they are unchanged; returns what to tell the coordinator, and
        the files, on their way to storage.

        There is one result per item, with its place, and one per file, with its size (:class:`FileRecord`). If the
        planner knows this package, one :class:`RankReport` replaces them. Raises :class:`SnapshotTornError` and errors
        of storage; then no read or write is in progress.
        """
        write, content, job = self._write, self._content, self._job
        save, share = write.save, write.share
        nbytes = sum(file.nbytes for file in content.sealed)
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
                raise _error(job.fault, nbytes)
        except BaseException:
            _cancel(job)
            raise
        write.keep.clear()  # all is read: release the copies and the tensors
        part = WrittenPart(job, save.stats, nbytes)
        items = write.plan.items
        if share is None:
            return _results(items, content.layouts, content.sealed, write.attempt), part
        report = content.report or report_of(content.layouts, content.sealed, len(items))
        mine = _rank_report(share, write.global_plan, report, self._samples)
        _remember_reported(save, share, write.global_plan, report.digest)
        return [mine], part


def _begin(write: _Write, ahead: Ahead | None) -> Writing:
    save, share, folder = write.save, write.share, write.folder
    reads, stats = save.reads, save.stats
    native = engine(save.call.config.host_cache_bytes)
    synced = save.on_storage(
        "looking for the attempt", lambda: directories_to_sync(folder, write.rank)
    )
    if reads is not None and ahead is not None and ahead.share is share:
        stats.steady = True
        samples = _samples(write)  # while the gate still holds
        job = reads.adopt()
        try:
            paths = [str(folder / layout.name) for layout in ahead.content.layouts]
            job.place(paths, synced if paths else [])
        except BaseException:
            _cancel(job)
            raise
        return Writing(write, ahead.content, job, samples)
    if reads is not None:
        reads.discard()
    try:
        content = _content(write, native)
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
        samples = _samples(write)  # while the gate still holds
        job = native.save(
            content.files,
            synced if content.files else [],
            save.call.order,
            window,
            write.keep,
            content.fences,
            None if reads is None else reads.staged.expected,
        )
        save.progress.follow(job)
        return job

    job = start(Window(0.0)) if reads is None else reads.hand_over(start, content.readers)
    return Writing(write, content, job, samples)


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


def _fit_cache(config: WriterConfig, content: _Content) -> None:
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    most = largest_host_cache_bytes(ranks) if config.cache_grows else config.host_cache_bytes
    fit_cache(sum(file.nbytes for file in content.sealed), most)


def _content(write: _Write, native: Engine) -> _Content:
    save, items, folder = write.save, write.plan.items, write.folder
    reads, session = save.reads, save.session
    staged = None if session is None else session.staged
    prepared: Prepared | None = None
    if write.share is not None and staged is not None and staged.is_plain():
        prepared = _prepared(write, write.share)
    if prepared is None or staged is None:
        layouts = lay_out(items, write.rank)
        paths = [folder / layout.name for layout in layouts]
        sources = Sources(native, write.planner, reads, write.keep, save.progress)
        files, sealed = files_to_write(items, sources, layouts, paths)
        readers = fences(native, sources.devices)
        after = [*(reads.fences if reads is not None else ()), *readers]
        return _Content(files, sealed, layouts, after, readers=readers)
    paths = [folder / layout.name for layout in prepared.layouts]
    files, sealed, report = prepared.files(
        paths, *staged.bases(), lambda item: resolve_object(write.planner, items[item]), write.keep
    )
    return _Content(files, sealed, prepared.layouts, staged.fences, report)


def _prepared(write: _Write, share: Share) -> Prepared | None:
    session, planner = write.save.session, write.planner
    # A planner around the one that has the session may resolve data otherwise: then it is asked.
    if session is None or session.taken_by is not planner or not isinstance(planner, SharesPlanner):
        return None
    return planner.prepare(share, write.rank)


def _samples(write: _Write) -> bytes:
    share, attempt, session = write.share, write.attempt, write.save.session
    if share is None or session is None or not len(share.final.shared):
        return b""
    assert isinstance(session.taken_by, SharesPlanner)
    held, _keep = session.taken_by.replicas(share)
    return sample(share.final, held, attempt.incarnation ^ attempt.sequence)


def _rank_report(share: Share, plan: bytes, report: Report, samples: bytes) -> RankReport:
    known = share.reported.get(plan) == report.digest
    share.sent = report.digest
    if not known:
        share.reported = {}
    return RankReport(report.digest, None if known else report.encode(), samples)


def _remember_reported(save: SaveOperation, share: Share, plan: bytes, digest: bytes) -> None:
    """Once the save is committed, remember that the coordinator has this rank's report, and need not receive
    it again.
    """

    def note(committed: Future[None]) -> None:
        # After a failure it is unknown which report the coordinator has.
        known = save.committed.peek() is None and share.sent == digest
        share.reported = {plan: digest} if known else {}

    save.committed.add_done_callback(note)


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


def _results(
    items: Sequence[WriteItem],
    layouts: Sequence[FileLayout],
    sealed: Sequence[SealedFile],
    attempt: Attempt,
) -> list[WriteResult]:
    results = []
    for layout, file in zip(layouts, sealed, strict=True):
        path = f"{attempt.name}/{layout.name}"
        record = FileRecord(path, file.nbytes, file.table_offset)
        first = items[(layout.tensors or layout.objects)[0].item]
        results.append(WriteResult(first.index, file.nbytes, record))
        for entry in layout.tensors:
            info = _StorageInfo(path, entry.offset, entry.nbytes, TRANSFORM_DESCRIPTORS)
            results.append(WriteResult(items[entry.item].index, entry.nbytes, info))
        for element, offset, size in zip(
            layout.objects, file.object_offsets, file.object_sizes, strict=True
        ):
            info = _StorageInfo(path, offset, size, TRANSFORM_DESCRIPTORS)
            results.append(WriteResult(items[element.item].index, size, info))
    return results
