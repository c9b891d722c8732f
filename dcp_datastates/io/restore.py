"""Reads what one rank asks for: the engine reads, verifies and scatters the bytes of its requests."""

from __future__ import annotations

import errno
import logging
import math
import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

import torch

from dcp_datastates._native import BLOCK_BYTES, Engine, Fault, RestoreJob, RestorePlan
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DataStatesError,
    DeviceError,
    StorageError,
)
from dcp_datastates.format.contents import Contents, some_of
from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.io import stored_files
from dcp_datastates.io.devices import fences
from dcp_datastates.io.reads import Request, choose_devices, contents, storage_of
from dcp_datastates.io.streams import ReadRange, fetch
from dcp_datastates.io.tensor_memory import local_tensor
from dcp_datastates.process.ending import Phase, patience_is_over
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.storage.object_path import Location, ObjectPath, leave_copy

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_DETOUR_BYTES: Final = 256 << 20
"""Host memory for tensors that the engine cannot scatter into directly (they need a cast, or it cannot access them)."""

_SHARED_BYTES: Final = 512 << 20
"""What is read at once of files that ranks share: two of them keep half of it each (``sharing/shared_reads.py``)."""

_file_of: Final = operator.attrgetter("file")


class StoredCheckpoint:
    """A committed checkpoint, to read from: each data file in the nearest place whose copy has not failed so far. One
    thread uses it.

    Args:
        places: its directories, the nearest first; usually one. All have the same attempt, or lack its files.
        sharing: reads the files in the nearest place, if this rank reads for others, and they for it.
    """

    def __init__(
        self, table: MetadataTable, places: Sequence[Location], sharing: Sharing | None = None
    ) -> None:
        self.table: Final = table
        self.files: Final = table.note.files
        self.sharing: Final = sharing
        self._places: Final = tuple(places)
        self._used: dict[str, int] = {}  # the index of the place, if it is not the first
        self._first_errors: dict[str, DataStatesError] = {}

    def sharing_at(self, place: Location) -> Sharing | None:
        """What reads the files in ``place``, if ranks share their reads there."""
        return self.sharing if place is self._places[0] else None

    def by_place(self, requests: list[Request]) -> list[tuple[Location, list[Request]]]:
        """``requests`` by the place that their files are read from."""
        if not self._used:
            return [(self._places[0], requests)]
        found: dict[int, list[Request]] = {}
        for request in requests:
            found.setdefault(self._used.get(request.file, 0), []).append(request)
        return [(self._places[index], group) for index, group in sorted(found.items())]

    def leave(self, files: Iterable[str], error: DataStatesError) -> None:
        """Read ``files`` from their next copies from now on, because of ``error``: in the same place, if its store has
        several, else in the next place. If a file has no other, raises the error of its nearest copy.
        """
        for file in files:
            used = self._used.get(file, 0)
            if leave_copy(self._places[used] / file, error):
                continue
            first = self._first_errors.setdefault(file, error)
            if used + 1 == len(self._places):
                raise first
            self._used[file] = used + 1
            logger.warning("%s; reading the copy in %s", error, self._places[used + 1])


class Sharing(Protocol):
    """Reads files together with other ranks (:class:`dcp_datastates.sharing.shared_reads.SharedReads`)."""

    def reading(self, requests: Iterable[Request]) -> AbstractContextManager[ReadRange]:
        """What reads ranges of files, for a restore of ``requests``."""

    def leave(self, files: Collection[str]) -> bool:
        """Share the reads of ``files`` no more; returns whether that is new."""


def restore(
    requests: list[Request],
    source: StoredCheckpoint,
    engine: Engine,
    deliver: Callable[[Request], None],
    release: Callable[[Iterable[torch.UntypedStorage]], None],
    count: Callable[[int], None],
) -> None:
    """Read all ``requests``, whose tensors have been aimed at their destinations.

    Args:
        deliver: called with each request that was read: the bytes of an object are in its ``data``, and a tensor has
            its values.
        release: is given the storages of the destinations before the first byte is read, and returns when they may be
            written to. It looks at them only if something reads memory now.
        count: is told now and then how many bytes more have been read.

    Raises :class:`CheckpointCorruptError` (tensors may be partly overwritten by then),
    :class:`CheckpointNotFoundError` if a data file is missing, or :class:`StorageError`.
    """
    with collection_paused():
        choose_devices(requests, engine)
    _check_files(requests, source)
    release(s for request in requests if (s := storage_of(request)) is not None)
    sharing = source.sharing
    most_bytes = math.inf
    reading: AbstractContextManager[ReadRange | None] = nullcontext()
    if sharing is not None:
        # All ranks want the bytes of a file at about the same time: within a job, its table comes in this order.
        requests = sorted(requests, key=lambda each: (each.file, each.begin))
        most_bytes, reading = _SHARED_BYTES, sharing.reading(requests)
    with reading as shared:
        for batch in _batches(requests, most_bytes):
            left = batch
            while left:
                left = _read_nearest(left, source, engine, shared, count)
            for request in batch:
                if request.memory is not request.target:
                    _settle(request)
                deliver(request)
                if request.dtype is None:
                    request.data = b""  # it has been unpickled


def _check_files(requests: list[Request], source: StoredCheckpoint) -> None:
    """Check the sizes of files with objects: the metadata determine how much memory an object gets. If the engine does
    not open the files, because they lie in a store or are shared, check the sizes of all: it cannot.
    """
    left = requests
    while left:
        again: list[Request] = []
        for place, group in source.by_place(left):
            try:
                found = _sizes(place, group, source)
            except (StorageError, CheckpointNotFoundError) as error:
                source.leave({*map(_file_of, group)}, error)
                again += group
                continue
            for file, nbytes in found.items():
                if nbytes != (said := source.files[file].nbytes):
                    needed = tuple(dict.fromkeys(e.name for e in requests if e.file == file))
                    wrong = CheckpointCorruptError(
                        f"{place / file} has {nbytes} bytes and the metadata say {said} (needed for {some_of(needed)})"
                    )
                    source.leave([file], wrong)
                    again += [request for request in group if request.file == file]
        left = again


def _sizes(place: Location, requests: list[Request], source: StoredCheckpoint) -> dict[str, int]:
    if source.sharing_at(place) is None and not isinstance(place, ObjectPath):
        requests = [each for each in requests if each.dtype is None]
    files = {*map(_file_of, requests)} & source.files.keys()
    found = {}
    for file, nbytes in stored_files.sizes(place, files).items():
        if isinstance(nbytes, int):
            found[file] = nbytes
            continue
        kind = CheckpointNotFoundError if isinstance(nbytes, FileNotFoundError) else StorageError
        path = place / file
        raise kind(nbytes.errno, f"open {path}: {nbytes.strerror}", str(path)) from nbytes
    return found


def _batches(requests: list[Request], most_bytes: float) -> Iterator[list[Request]]:
    """Batches of at most about ``most_bytes``, whose detours have bounded memory. At least a file each, if its detours
    have room.
    """
    if math.isinf(most_bytes) and not any(request.detour for request in requests):
        yield requests
        return
    batch: list[Request] = []
    room, left = _DETOUR_BYTES, most_bytes
    for request in requests:
        detour = request.nbytes if request.detour else 0
        if batch and (detour > room or (left <= 0 and _file_of(batch[-1]) != _file_of(request))):
            yield batch
            batch, room, left = [], _DETOUR_BYTES, most_bytes
        batch.append(request)
        room -= detour
        left -= request.nbytes
    if batch:
        yield batch


def _read_nearest(
    requests: list[Request],
    source: StoredCheckpoint,
    engine: Engine,
    shared: ReadRange | None,
    count: Callable[[int], None],
) -> list[Request]:
    """Read each file from its nearest place; returns the requests that are to be read again, from another one.

    ``shared`` reads those in the nearest place of all.
    """
    again: list[Request] = []
    for place, group in source.by_place(requests):
        files = {*map(_file_of, group)}
        sharing = source.sharing_at(place)
        read_range = None if sharing is None else shared
        try:
            fault = _read(group, source, place, engine, read_range, count)
        except (StorageError, CheckpointNotFoundError) as error:
            source.leave(files, error)
            again += group
            continue
        if fault is not None:
            failure = read_error(fault, group, source, place)
            if fault.kind not in ("corrupt", "io"):
                raise failure
            failed = {fault.path.removeprefix(f"{place}/")} & files or files
            # Bytes from another rank may have been damaged on the way, or in its memory.
            if sharing is None or fault.kind != "corrupt" or not sharing.leave(failed):
                source.leave(failed, failure)
            again += group
    return again


def _read(
    requests: list[Request],
    source: StoredCheckpoint,
    place: Location,
    engine: Engine,
    read_range: ReadRange | None,
    count: Callable[[int], None],
) -> Fault | None:
    plan = _native_plan(requests, source, place)
    _say_written(requests)  # before and after: a save may begin, or look, at any moment
    # Kernels that write to the target tensors may still be running.
    after = fences(engine, {each.device for each in requests})
    if read_range is None and isinstance(place, ObjectPath):
        read_range = stored_files.range_reader({place / _file_of(each) for each in requests})
    begin = engine.restore if read_range is None else engine.restore_streamed
    job = begin(plan, requests, after)
    try:
        if read_range is not None:
            fetch(job, read_range)
        _await(job, place, count)
    except BaseException:
        job.cancel()
        while not job.wait(_POLL_SECONDS):  # until it writes to no memory any more
            pass
        raise
    _say_written(requests)
    return job.fault


def _await(job: RestoreJob, place: Location, count: Callable[[int], None]) -> None:
    """Wait for ``job``, which reads below ``place``; at the end of the process, only while there is progress."""
    done, since, ended = 0, time.monotonic(), False
    while not ended:
        ended = job.wait(_POLL_SECONDS)
        if (read := job.bytes_read) != done:
            count(read - done)
            done, since = read, time.monotonic()
        elif patience_is_over(since, Phase.GIVE_UP):
            raise StorageError(
                errno.ETIMEDOUT,
                f"the process ends, and a load has waited {time.monotonic() - since:.0f} s for storage",
                str(place),
            )


@collection_paused()
def _native_plan(requests: list[Request], source: StoredCheckpoint, place: Location) -> RestorePlan:
    """What the engine is to read, and where to; makes the memory of detours."""
    for request in requests:
        if request.detour:
            request.memory = torch.empty(request.lengths, dtype=request.dtype, device="cpu")
    plan = RestorePlan()
    for relative_path, content in contents(requests).items():
        record = source.files.get(relative_path)
        if record is None:
            raise CheckpointCorruptError(
                f"the metadata do not describe data file {relative_path!r}"
            )
        if not content.nbytes:
            continue
        path = str(place / relative_path)
        try:
            plan.add_file(path, record.nbytes, record.table_offset, content)
        except ValueError as error:
            raise CheckpointCorruptError(
                f"{path}: the metadata have tensors or objects lie where others do: {error}"
            ) from error
    return plan


def _say_written(requests: list[Request]) -> None:
    """Move the version counters: the engine's writes bypass torch."""
    written = [request.memory for request in requests if request.memory is not None]
    torch.autograd.graph.increment_version(written)


def _settle(request: Request) -> None:
    target, memory = request.target, request.memory
    if target is not None and memory is not None and memory is not local_tensor(target):
        target.detach().copy_(memory)
        request.memory = None


# ---- what could not be read ----------------------------------------------------------------------


def read_error(
    fault: Fault, asked: Iterable[Request], source: StoredCheckpoint, place: Location
) -> DataStatesError:
    """The error for ``fault`` in a restore of what was ``asked`` for, from ``place``."""
    if fault.kind == "corrupt":
        return CheckpointCorruptError(f"{fault.message} {_affected(fault, asked, source, place)}")
    if fault.kind == "io" and fault.errno == 2:
        return CheckpointNotFoundError(fault.errno, fault.message, fault.path)
    if fault.kind == "io":
        return StorageError(fault.errno or None, fault.message, fault.path)
    if fault.kind == "device":
        return DeviceError(fault.message)
    return DataStatesError(fault.message)


def _affected(
    fault: Fault, asked: Iterable[Request], source: StoredCheckpoint, place: Location
) -> str:
    relative_path = fault.path.removeprefix(f"{place}/")
    record = source.files.get(relative_path)
    begin, end = fault.offset, fault.offset + BLOCK_BYTES
    # A wrong size, or damage in the checksums, is that of the whole file.
    is_whole = fault.operation == "fstat" or (record is not None and begin >= record.table_offset)
    hit = [each for each in asked if each.file == relative_path and each.stored]
    if not is_whole:
        hit = [each for each in hit if each.begin < end and each.begin + each.stored > begin]
    names = [each.name for each in sorted(hit, key=lambda each: each.begin)]
    if is_whole:
        needed = some_of(tuple(dict.fromkeys(names)))
        return f"(the file's checksums or size; {needed} cannot be verified)"
    names += Contents(source.table).names(relative_path, begin, end)
    return f"(bytes of {some_of(tuple(dict.fromkeys(names)))})" if names else "(the file's header)"
