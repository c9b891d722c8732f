"""Carrying out one rank's part of a plan: resolve, lay out, hand over to the engine, see it read.

What comes after, up to durable files, is waited for by the commit thread, through :class:`WrittenPart`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates._native import DeviceEvent, Engine, Fault, SaveFile, SaveJob, Transfer, Window
from dcp_datastates.errors import (
    ConfigurationError,
    DataStatesError,
    DeviceError,
    SnapshotTornError,
    StorageError,
    UnsupportedStateError,
)
from dcp_datastates.format.layout import FileLayout, SealedFile, TensorEntry, lay_out
from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS
from dcp_datastates.io.devices import HOST, THROUGH_TORCH, dense, fences, place
from dcp_datastates.io.tensor_memory import add_region, check_storable, local_tensor
from dcp_datastates.planning.exchange import Report, Session, Told
from dcp_datastates.planning.prepared_write import Prepared, report_of
from dcp_datastates.planning.rank_memory import Share, SharesPlanner
from dcp_datastates.planning.replicas import sample
from dcp_datastates.process.progress import Progress
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.attempt import Attempt

__all__ = ["Ahead", "WrittenPart", "read_ahead", "write_plan"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1


@dataclass
class _Columns:
    """Contiguous regions of one file, for one call into the engine."""

    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)


class WrittenPart:
    """One rank's files of one save, all read, on their way to stable storage (a ``round.Part``)."""

    def __init__(self, job: SaveJob, stats: SaveStats, nbytes: int) -> None:
        self._job = job
        self._stats = stats
        self._nbytes = nbytes

    def wait(self, seconds: float) -> bool:
        """Whether the files are durable, or have failed and nothing touches them any more."""
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
        """Why they failed; None while under way, and once durable."""
        fault = self._job.fault
        return None if fault is None else _error(fault, self._nbytes)

    @property
    def progress(self) -> int:
        """Bytes read and written so far."""
        return self._job.bytes_read + self._job.bytes_written

    def cancel(self) -> None:
        """Fail them if they are not durable. Returns at once."""
        self._job.cancel()


@dataclass(frozen=True, eq=False)
class _Content:
    """The files of a share and what is known of them."""

    files: list[SaveFile]
    sealed: Sequence[SealedFile]
    layouts: Sequence[FileLayout]
    fences: list[DeviceEvent]
    """What copies by devices come after."""
    report: Report | None = None
    readers: list[DeviceEvent] = field(default_factory=list)
    """What this thread had devices make of tensors on the way."""


@dataclass(frozen=True, eq=False)
class Ahead:
    """A save that is being read before it is planned."""

    share: Share
    content: _Content


def read_ahead(
    planner: SharesPlanner,
    engine: Engine,
    order: int,
    reads: DeferredReads,
    progress: Progress,
    session: Session,
) -> Ahead | None:
    """Begin to read what will be written if nothing has changed; None if that is not known, or must wait."""
    foreseen = planner.foresee(session)
    if foreseen is None or not _is_plain(session):
        return None
    assert session.staged is not None
    keep: list[Any] = []
    names = [Path(layout.name) for layout in foreseen.prepared.layouts]
    bases = session.staged.bases()
    files, sealed, report = foreseen.prepared.files(names, *bases, foreseen.resolve, keep)

    after = reads.fences

    def start(window: Window) -> SaveJob:
        job = engine.save_unplaced(files, order, window, keep, after)
        progress.follow(job)
        return job

    if reads.foresee(start) is None:
        return None
    content = _Content(files, sealed, foreseen.prepared.layouts, after, report)
    return Ahead(foreseen.share, content)


def write_plan(
    plan: SavePlan,
    planner: SavePlanner,
    engine: Engine,
    directory: Path,
    attempt: Attempt,
    rank: int,
    order: int,
    reads: DeferredReads | None,
    stats: SaveStats,
    progress: Progress,
    session: Session | None = None,
    share: Share | None = None,
    ahead: Ahead | None = None,
) -> tuple[list[Any], WrittenPart]:
    """Begin to write ``plan``'s items below ``directory``; returns when all has been read, and was whole.

    The results name every item's place, and every file's size in a result of its own
    (:class:`FileRecord`); with a ``share``, all is in one :class:`Told`. On an error nothing is under way any more.
    """
    folder = directory / attempt.name
    check_shared(folder, rank)
    samples = b""
    job: SaveJob | None = None
    keep: list[Any] = []
    try:
        if reads is not None and ahead is not None and ahead.share is share:
            content = ahead.content
            stats.steady = True
            samples = _samples(planner, share, attempt)  # while the gate still holds
            job = reads.adopt()
            paths = [str(folder / layout.name) for layout in content.layouts]
            job.place(paths, _directories(folder, paths))
        else:
            if reads is not None:
                reads.discard()
            content = _content(
                plan, planner, engine, folder, rank, reads, keep, progress, session, share
            )
            stats.steady = content.report is not None
            directories = _directories(folder, content.files)

            def start(window: Window) -> SaveJob:
                nonlocal samples
                samples = _samples(planner, share, attempt)  # while the gate still holds
                job = engine.save(content.files, directories, order, window, keep, content.fences)
                progress.follow(job)
                return job

            readers = content.readers
            job = start(Window(0.0)) if reads is None else reads.hand_over(start, readers)
        if reads is None:
            while not job.wait_read(-1, _POLL_SECONDS):
                pass
        else:
            reads.settle()
            if reads.failure is not None:
                raise reads.failure
        if job.fault is not None:
            raise _error(job.fault, sum(file.nbytes for file in content.sealed))
    except BaseException:
        if job is not None:
            job.cancel()
            while not job.wait(_POLL_SECONDS):
                pass
        raise
    keep.clear()  # all is read: the copies may go, and the tensors
    part = WrittenPart(job, stats, sum(file.nbytes for file in content.sealed))
    if share is None:
        return _results(plan.items, content.layouts, content.sealed, attempt), part
    report = content.report or report_of(content.layouts, content.sealed, len(plan.items))
    return [_told(share, report, samples)], part


def _directories(folder: Path, files: Sequence[object]) -> list[str]:
    """What to sync, for the entries of these files."""
    return [str(parent) for parent in local.sync_directories(folder)] if files else []


def _content(
    plan: SavePlan,
    planner: SavePlanner,
    engine: Engine,
    folder: Path,
    rank: int,
    reads: DeferredReads | None,
    keep: list[Any],
    progress: Progress,
    session: Session | None,
    share: Share | None,
) -> _Content:
    prepared = _prepared(planner, session, share, rank)
    layouts = lay_out(plan.items, rank) if prepared is None else prepared.layouts
    paths = [folder / layout.name for layout in layouts]
    if prepared is None:
        sources = _Sources(engine, planner, reads, keep, progress)
        files, sealed = _files(plan.items, sources, layouts, paths)
        readers = fences(engine, sources.devices)
        after = [*(reads.fences if reads is not None else ()), *readers]
        return _Content(files, sealed, layouts, after, readers=readers)
    assert session is not None
    assert session.staged is not None
    files, sealed, report = prepared.files(
        paths,
        *session.staged.bases(),
        lambda item: _resolve_object(planner, plan.items[item]),
        keep,
    )
    return _Content(files, sealed, layouts, session.staged.fences, report)


def _prepared(
    planner: SavePlanner, session: Session | None, share: Share | None, rank: int
) -> Prepared | None:
    """The share's files as they were laid out before, if the state is as it was captured."""
    if session is None or share is None or not _is_plain(session):
        return None
    assert isinstance(planner, SharesPlanner)
    return planner.prepare(share, rank)


def _is_plain(session: Session) -> bool:
    return session.staged is not None and session.staged.is_plain()


def _samples(planner: SavePlanner, share: Share | None, attempt: Attempt) -> bytes:
    if share is None or not len(share.final.shared):
        return b""
    assert isinstance(planner, SharesPlanner)
    held, _keep = planner.replicas(share)
    return sample(share.final, held, attempt.incarnation ^ attempt.sequence)


def _told(share: Share, report: Report, samples: bytes) -> Told:
    known = share.told.get(share.whole) == report.digest
    share.sent = report.digest
    if not known:
        share.told = {}
    return Told(report.digest, None if known else report.encode(), samples)


def check_shared(folder: Path, rank: int) -> None:
    """Raise :class:`ConfigurationError` unless this rank sees the directory that the coordinator made.

    It is made once more, and must be there: that asks the server of a network file system, which a look does not, for
    half a minute after a process has looked for it in vain.
    """
    made = local.make_directories(folder, "share")
    if not made:
        return
    for path in made:
        with contextlib.suppress(OSError):
            operations.remove_directory(path, "share")
    raise ConfigurationError(
        f"rank {rank} on {socket.gethostname()} does not see {str(folder)!r}, which the coordinator has just created: "
        f"the checkpoint's path must be one directory for all ranks, on a shared file system"
    )


def _error(fault: Fault, nbytes: int) -> DataStatesError:
    """Of a job that was to write ``nbytes`` bytes."""
    if fault.kind == "io":
        # The system's error adds its number and the path.
        text = fault.message.replace(f" of '{fault.path}'", "").replace(
            f" (errno {fault.errno})", ""
        )
        text += local.about_space(fault.errno, fault.path, nbytes)
        return StorageError(fault.errno or None, text, fault.path)
    if fault.kind == "device":
        return DeviceError(fault.message)
    if fault.kind == "lost":
        return SnapshotTornError(fault.message)
    return DataStatesError(fault.message)


_logged_buffered = False


def _log_buffered_once() -> None:
    global _logged_buffered
    if not _logged_buffered:
        _logged_buffered = True
        logger.info("the file system refuses O_DIRECT; writing through the page cache")


@dataclass(eq=False)
class _Sources:
    """What the planner resolves the items of a plan to, and what must be kept until that has been read."""

    engine: Engine
    planner: SavePlanner
    reads: DeferredReads | None
    keep: list[Any]
    progress: Progress
    devices: set[int] = field(default_factory=set)
    """Those with tensors that are not among the deferred ones: what made these may still be under way."""


def _files(
    items: Sequence[WriteItem],
    sources: _Sources,
    layouts: Sequence[FileLayout],
    paths: Sequence[Path],
) -> tuple[list[SaveFile], list[SealedFile]]:
    files, sealed = [], []
    for layout, path in zip(layouts, paths, strict=True):
        sources.progress.step()
        objects = [_resolve_object(sources.planner, items[entry.item]) for entry in layout.objects]
        file = layout.seal([len(data) for data in objects])
        content = Transfer()
        content.add_buffer(0, file.header, STABLE)
        sources.keep.append(file.header)
        _add_tensors(content, items, sources, layout.tensors)
        for offset, data in zip(file.object_offsets, objects, strict=True):
            if len(data):
                content.add_buffer(offset, data, STABLE)
        sources.keep.extend(objects)
        files.append(SaveFile(str(path), file.table_offset, content))
        sealed.append(file)
    return files, sealed


def _resolve_object(planner: SavePlanner, item: WriteItem) -> memoryview:
    try:
        data = planner.resolve_data(item)
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # as pickle says no
        raise UnsupportedStateError(
            f"object {item.index.fqn!r} of the state cannot be stored: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(data, io.BytesIO):
        raise DataStatesError(
            f"the planner resolved {item.index.fqn!r} to a {type(data).__name__}; its plan says BYTE_IO"
        )
    return data.getbuffer()


def _add_tensors(
    content: Transfer,
    items: Sequence[WriteItem],
    sources: _Sources,
    entries: Sequence[TensorEntry],
) -> None:
    columns = _Columns()
    reads = sources.reads
    for entry in entries:
        sources.progress.step()
        tensor, device = _resolve_tensor(sources, items[entry.item], entry)
        address = tensor.data_ptr()
        group = STABLE if reads is None else reads.group_of(address, entry.nbytes)
        if device != HOST and group == STABLE:
            sources.devices.add(device)
            tensor = dense(tensor)
            address = tensor.data_ptr()
        sources.keep.append(tensor)
        if not entry.nbytes:
            continue
        if tensor.is_contiguous():
            columns.offsets.append(entry.offset)
            columns.sizes.append(entry.nbytes)
            columns.addresses.append(address)
            columns.groups.append(group)
            columns.devices.append(device)
        else:
            add_region(content, entry.offset, tensor, entry.nbytes, group, device)
    content.add_many(
        columns.offsets, columns.sizes, columns.addresses, columns.groups, columns.devices
    )


def _resolve_tensor(
    sources: _Sources, item: WriteItem, entry: TensorEntry
) -> tuple[torch.Tensor, int]:
    """The tensor with the bytes that ``entry`` describes, and where it is: in reach of the engine."""
    data = sources.planner.resolve_data(item)
    name = item.index.fqn
    if not isinstance(data, torch.Tensor):
        raise DataStatesError(
            f"the planner resolved {name!r} to a {type(data).__name__}; its plan says tensor"
        )
    tensor = local_tensor(data).detach()
    check_storable(tensor, name)
    as_planned = tuple(tensor.shape) == entry.sizes or tensor.numel() == entry.nbytes == 0
    if not as_planned or tensor.dtype != entry.dtype:
        raise DataStatesError(
            f"the planner resolved {name!r} to {tensor.dtype} {tuple(tensor.shape)}; its plan says "
            f"{entry.dtype} {entry.sizes}: a planner that transforms data must plan what it returns"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    device = place(sources.engine, tensor)
    if device == THROUGH_TORCH:
        return tensor.cpu(), HOST
    return tensor, device


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
