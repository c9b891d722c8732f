"""Carries out one rank's part of a plan: lay it out, hand it to the engine, and wait until it is read, and durable.

Where it is known where the tensors are in the state, only their addresses are looked up; else the planning resolves
each item. The files go to a directory, which the engine writes to; or to a store, which threads send what the engine
has read. The commit thread waits for the files through a :class:`WrittenPart`.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates._native import (
    SEGMENT_BYTES,
    Engine,
    SaveFile,
    SaveJob,
    Segment,
    Transfer,
    Window,
)
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import (
    ConfigurationError,
    DataStatesError,
    DeviceError,
    SnapshotTornError,
    StorageError,
    UnsupportedStateError,
)
from dcp_datastates.format.layout import TensorEntry
from dcp_datastates.io.devices import HOST, THROUGH_TORCH, accelerator, fences, numbers
from dcp_datastates.io.engine import engine, fit_cache
from dcp_datastates.io.streams import MOST_FILES_AT_ONCE, Upload
from dcp_datastates.io.tensor_memory import add_region, check_storable, local_tensor
from dcp_datastates.planning.messages import Report
from dcp_datastates.planning.part_files import KnownFiles, PartFiles
from dcp_datastates.planning.save_planning import SavePlanning, Told, Written
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.process.memory_limit import largest_host_cache_bytes
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.start import directories_to_sync
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.storage import local
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.object_store import MOST_PARTS, part_bytes
from dcp_datastates.text import size as show_size

logger = logging.getLogger(__name__)

_CANCEL_SECONDS: Final = 3.0
"""How long a failed save waits for its reads and writes to end, before it reports the failure."""


class Content:
    """The files that ``rank`` writes below ``folder``, and what the engine reads for them.

    Args:
        step: called for each item that the planning resolves.

    Raises :class:`UnsupportedStateError`, :class:`UnsupportedTensorError`, and what ``resolve_data`` raises.
    """

    def __init__(
        self,
        native: Engine,
        planning: SavePlanning,
        reads: DeferredReads,
        folder: Location,
        rank: int,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._planning, self._reads = native, planning, reads
        self._folder, self._step = folder, step
        self.files: list[SaveFile] = []
        self.sizes: dict[str, int] = {}
        """The bytes of each file that is written, by name, in the order of :attr:`files`; they come first."""
        self.compared: dict[int, range] = {}
        """For each set of ranks, the numbers of those that are summed, to be compared with the others'."""
        self.keep: list[Any] = []
        """Objects that must stay alive until they have been read."""
        self._devices: set[int] = set()
        """Devices of tensors that are not deferred: the kernels that compute these tensors may still be running."""
        part = planning.files(rank)
        self.is_known = isinstance(part, KnownFiles)
        """Whether it was known where the tensors are in the state."""
        self.report = self._add(part, is_written=True)
        for number, each in planning.compared().items():
            begin = len(self.files)
            self._add(each, is_written=False)
            self.compared[number] = range(begin, len(self.files))
        self.readers = fences(native, self._devices)
        """Events of the kernels that this thread has launched to resolve tensors."""

    def _add(self, part: PartFiles, is_written: bool) -> Report:
        """Add the files of ``part``. Returns where its items are in them."""
        if isinstance(part, KnownFiles):
            add_tensors = functools.partial(part.add_tensors, *self._reads.staged.bases())
        else:
            add_tensors = functools.partial(self._add_tensors, part)
        objects = [
            [self._object(part.items[entry.item]) for entry in layout.objects]
            for layout in part.layouts
        ]
        sealed, report = part.seal(tuple([tuple(map(len, of_file)) for of_file in objects]))
        for number, (layout, file) in enumerate(zip(part.layouts, sealed, strict=True)):
            transfer = Transfer()
            transfer.add_buffer(0, file.header, STABLE)
            add_tensors(transfer, number)
            for offset, data in zip(file.object_offsets, objects[number], strict=True):
                if len(data):
                    transfer.add_buffer(offset, data, STABLE)
            self.keep.append((file.header, objects[number]))
            path = str(self._folder / layout.name) if is_written else None
            self.files.append(SaveFile(path, file.table_offset, transfer))
            if is_written:
                self.sizes[layout.name] = file.nbytes
        return report

    def begin(self, stats: SaveStats, order: int, window: Window, synced: list[str]) -> WrittenPart:
        """Begin to read the files, and to write them. ``synced``: the directories to sync with those of a directory."""
        staged, native, files = self._reads.kept, self._engine, self.files
        behind, expected = ([], None) if staged is None else (staged.fences, staged.expected)
        further = (order, window, self.keep, [*behind, *self.readers], expected)
        to = (stats, self._folder, self.sizes)
        if isinstance(self._folder, ObjectPath):
            check_fits(self.sizes.values(), native)
            return StorePart(native.save_streamed(files, *further), *to)
        return WrittenPart(native.save(files, synced if self.sizes else [], *further), *to)

    def _object(self, item: WriteItem) -> memoryview:
        """The bytes of a BYTE_IO item."""
        self._step()
        try:
            data = self._planning.resolve_data(item)
        except (pickle.PicklingError, TypeError, AttributeError) as error:  # any of pickle's
            raise UnsupportedStateError(
                f"object {item.index.fqn!r} of the state cannot be stored: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(data, io.BytesIO):
            raise DataStatesError(
                f"the planner resolved {item.index.fqn!r} to a {type(data).__name__}; its plan says BYTE_IO"
            )
        return data.getbuffer()

    @collection_paused()
    def _add_tensors(self, part: PartFiles, transfer: Transfer, file: int) -> None:
        """Add to ``transfer`` the tensors of a file of ``part``, which the planning resolves."""
        for entry in part.layouts[file].tensors:
            self._step()
            tensor, device = self._resolved(part.items[entry.item], entry)
            group = self._reads.group_of(tensor.data_ptr(), entry.nbytes)
            if device != HOST and group == STABLE:
                self._devices.add(device)
                tensor = accelerator.dense(tensor)
            self.keep.append(tensor)
            if entry.nbytes:
                add_region(transfer, entry.offset, tensor, entry.nbytes, group, device)

    def _resolved(self, item: WriteItem, entry: TensorEntry) -> tuple[torch.Tensor, int]:
        """The tensor with the bytes that ``entry`` describes, in memory that the engine can read, and its device."""
        name, data = item.index.fqn, self._planning.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            raise DataStatesError(
                f"the planner resolved {name!r} to a {type(data).__name__}; its plan says tensor"
            )
        tensor = local_tensor(data)
        check_storable(tensor, name)
        tensor = tensor.detach()
        as_planned = tuple(tensor.shape) == entry.sizes or tensor.numel() == entry.nbytes == 0
        if not as_planned or tensor.dtype != entry.dtype:
            raise DataStatesError(
                f"the planner resolved {name!r} to {tensor.dtype} {tuple(tensor.shape)}; its plan says "
                f"{entry.dtype} {entry.sizes}: a planner that transforms data must plan what it returns"
            )
        tensor = tensor.resolve_conj().resolve_neg()
        (device,) = numbers(self._engine, (tensor,))
        if device == THROUGH_TORCH:
            return tensor.cpu(), HOST
        return tensor, device


def begin_write(save: SaveOperation, planning: SavePlanning) -> Callable[[], None]:
    """Begin to read and write this rank's part of ``save``. The planning lets go of the state.

    Returns what waits until all data are read and unchanged, and hands the files to the commit thread. It raises
    :class:`SnapshotTornError`, :class:`SaveStalledError` and errors of storage; then, as when this raises, no read or
    write is in progress but one that a device or storage holds up.
    """
    try:
        attempt = save.ticket().attempt
        folder, rank = save.resolved_path() / attempt.name, save.group.rank_set.rank
        reads, stats = save.reads, save.stats
        synced: list[str] = []
        if isinstance(folder, Path):
            look = functools.partial(directories_to_sync, folder, rank)
            synced = save.on_storage("looking for the attempt", look)
        native = engine(save.config.host_cache_bytes)
        try:
            content = Content(native, planning, reads, folder, rank, save.step)
        except RuntimeError:  # the planner met a tensor that is not as planned
            reads.check_unchanged()
            raise
        if content.readers or (reads.kept is not None and reads.kept.fences):  # devices hold it
            _fit_cache(save.config, content)
        stats.steady = planning.is_cached and content.is_known
        window = reads.prepare(content.readers)
        planning.sample(attempt)  # while the gate still holds
        part = content.begin(stats, save.order, window, synced)
        save.job = part.job
        reads.hand_over(part.job)
        stats.timeline.begin("window")
        compared = functools.partial(_checksums, part.job, content.compared)
        told = planning.report(content.report, Written(str(save.path), save.metrics, compared))
        return functools.partial(_finish, save, part, content.keep, told)
    finally:
        planning.release()


def _fit_cache(config: WriterConfig, content: Content) -> None:
    """Let the host cache grow to what this rank writes."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    most = largest_host_cache_bytes(ranks) if config.cache_grows else config.host_cache_bytes
    fit_cache(sum(content.sizes.values()), most)


def _finish(save: SaveOperation, part: WrittenPart, keep: list[Any], told: Told) -> None:
    try:
        try:
            save.reads.settle(save.config.read_deadline)
        finally:
            save.reads.raise_failure()
        if (error := part.error) is not None:
            raise error
    except BaseException:
        part.job.cancel()
        part.job.wait(_CANCEL_SECONDS)
        raise
    save.stats.timeline.begin("reading", part.job.read_seconds)
    save.stats.timeline.begin("flushing")
    keep.clear()  # all is read: release the copies and the tensors
    save.submit(part, *told)


def _checksums(job: SaveJob, compared: Mapping[int, range]) -> dict[int, bytes]:
    """Of what is compared, for each set of ranks: the checksums of all blocks."""
    return {number: b"".join(map(job.checksums, files)) for number, files in compared.items()}


# ---- the files on their way to stable storage -----------------------------------------------------


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
            if isinstance(self._folder, Path):
                stats.direct = job.direct
                if not job.direct:
                    _log_buffered()
        return True

    @property
    def error(self) -> BaseException | None:
        fault = self.job.fault
        if fault is None:
            return None
        if fault.kind == "device":
            return DeviceError(fault.message)
        if fault.kind in ("lost", "torn"):
            return SnapshotTornError(fault.message)
        if fault.kind != "io":
            return DataStatesError(fault.message)
        # StorageError adds the number and the path itself.
        text = fault.message.replace(f" of '{fault.path}'", "")
        text = text.replace(f" (errno {fault.errno})", "")
        text += local.about_space(fault.errno, fault.path, sum(self._sizes.values()))
        return StorageError(fault.errno or None, text, fault.path)

    @property
    def progress(self) -> int:
        """Bytes read and written so far."""
        return self.job.bytes_read + self.job.bytes_written

    def cancel(self) -> None:
        self.job.cancel()

    def check(self) -> None:
        if not isinstance(self._folder, Path):
            return  # a store has counted the bytes of each object that it has acknowledged
        # Some mounts of object stores say yes to ftruncate() after direct writes, and do nothing.
        for name, nbytes in self._sizes.items():
            path = self._folder / name
            with local.explained("looking at what was written", path):
                found = os.stat(path).st_size
            if found != nbytes:
                raise StorageError(
                    errno.EIO,
                    f"{nbytes} bytes were written, and the file has {found}: the file system does not keep what it "
                    f"has acknowledged. If it is a mount of an object store, save to the store's URL (s3://…)",
                    str(path),
                )


@functools.cache
def _log_buffered() -> None:
    """Once per process."""
    level = once_per_job(logging.INFO)
    logger.log(level, "the file system refuses O_DIRECT; writing through the page cache")


PARTS_IN_FLIGHT: Final = 16
"""Of all files that are sent at once."""

_ABORT_SECONDS: Final = 3.0
"""How long a failed save waits until its parts are removed, before it reports the failure."""

_LAST_SECONDS: Final = 10.0
"""How long the end of the process waits for that."""


def check_fits(sizes: Iterable[int], engine: Engine) -> None:
    """Raise :class:`ConfigurationError` unless the host cache has room for the parts of the largest file. ``sizes``: in
    bytes.
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
        """Of a failed job, wait also until nothing is sent any more, and unfinished parts are removed, unless the store
        has not answered for some seconds.
        """
        if not super().wait(seconds):
            return False
        if self.job.fault is None:
            return True
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
