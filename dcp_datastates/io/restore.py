"""Reads what one rank asks for: the engine reads, verifies and scatters the bytes of its requests."""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final, Protocol

import numpy as np
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
from dcp_datastates.io import committed
from dcp_datastates.io.devices import fences
from dcp_datastates.io.reads import Reads
from dcp_datastates.io.streams import ReadRange, fetch
from dcp_datastates.process.ending import Phase, patience_is_over
from dcp_datastates.storage.object_path import Location, ObjectPath, leave_copy

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_DETOUR_BYTES: Final = 256 << 20
"""Host memory for tensors that the engine cannot scatter into directly (they need a cast, or it cannot access them)."""

_SHARED_BYTES: Final = 512 << 20
"""What is read at once of files that ranks share: two of them keep half of it each (``sharing/shared_reads.py``)."""

Again = Mapping[str, DataStatesError | None]
"""Files that are to be read again; with an error, from their next copies."""


class Sharing(Protocol):
    """Reads files together with other ranks (:class:`dcp_datastates.sharing.shared_reads.SharedReads`)."""

    def reading(self, reads: Reads) -> AbstractContextManager[ReadRange]:
        """What reads ranges of files, for a restore of ``reads``."""

    def leave(self, files: Collection[str]) -> bool:
        """Share the reads of ``files`` no more; returns whether that is new."""


class Restore:
    """Reads from a committed checkpoint: each data file in the nearest place whose copy has not failed so far. One
    thread uses it.

    Args:
        places: its directories, the nearest first; usually one. All have the same attempt, or lack its files.
        count: is told now and then how many bytes more have been read.
        sharing: reads the files in the nearest place, if this rank reads for others, and they for it.
    """

    def __init__(
        self,
        table: MetadataTable,
        places: Sequence[Location],
        engine: Engine,
        count: Callable[[int], None],
        sharing: Sharing | None,
    ) -> None:
        self._table: Final = table
        self._files: Final = table.note.files
        self._places: Final = tuple(places)
        self._engine: Final = engine
        self._count: Final = count
        self._sharing: Final = sharing
        self._used: dict[str, int] = {}  # the index of the place, if it is not the first
        self._first_errors: dict[str, DataStatesError] = {}

    def read(
        self,
        reads: Reads,
        deliver: Callable[[Reads], None],
        release: Callable[[Iterable[torch.UntypedStorage]], None],
    ) -> None:
        """Read all ``reads``, whose tensors have been aimed at their destinations.

        Args:
            deliver: called with each part that was read: it has the bytes of its objects, and its tensors have their
                values.
            release: is given the storages of the destinations before the first byte is read, and returns when they may
                be written to. It looks at them only if something reads memory now.

        Raises :class:`CheckpointCorruptError` (tensors may be partly overwritten by then),
        :class:`CheckpointNotFoundError` if a data file is missing, or :class:`StorageError`.
        """
        reads.choose_devices(self._engine)
        self._check_files(reads)
        release(reads.storages())
        most_bytes = math.inf
        reading: AbstractContextManager[ReadRange | None] = nullcontext()
        if self._sharing is not None:
            # All ranks want the bytes of a file at about the same time: within a job, its table comes in this order.
            by_name = np.argsort(np.argsort(np.array(reads.paths)))[reads.files]
            reads = reads.take(np.lexsort((reads.begins, by_name)))
            most_bytes, reading = _SHARED_BYTES, self._sharing.reading(reads)
        with reading as shared:
            for batch in _batches(reads, most_bytes):
                batch.make_detours()
                self._at_places(batch.used_paths, partial(self._read_from, batch, shared))
                batch.settle()
                deliver(batch)

    # ---- places --------------------------------------------------------------------------------------

    def _sharing_at(self, place: Location) -> Sharing | None:
        return self._sharing if place is self._places[0] else None

    def _at_places(self, files: Iterable[str], do: Callable[[Location, set[str]], Again]) -> None:
        """Call ``do`` with each place and those of ``files`` that are read from it. It returns those that it must be
        called with again, with an error if from their next copies; or raises such an error, of all of them.
        """
        left = set(files)
        while left:
            at: dict[int, set[str]] = {}
            for file in left:
                at.setdefault(self._used.get(file, 0), set()).add(file)
            left = set()
            for index, group in sorted(at.items()):
                try:
                    again = do(self._places[index], group)
                except (StorageError, CheckpointNotFoundError) as error:
                    again = dict.fromkeys(group, error)
                for file, failure in again.items():
                    if failure is not None:
                        self._leave(file, failure)
                left |= again.keys()

    def _leave(self, file: str, error: DataStatesError) -> None:
        """Read ``file`` from its next copy from now on, because of ``error``: in the same place, if its store has
        several, else in the next place. If it has no other, raises the error of its nearest copy.
        """
        used = self._used.get(file, 0)
        if leave_copy(self._places[used] / file, error):
            return
        first = self._first_errors.setdefault(file, error)
        if used + 1 == len(self._places):
            raise first
        self._used[file] = used + 1
        logger.warning("%s; reading the copy in %s", error, self._places[used + 1])

    def _check_files(self, reads: Reads) -> None:
        """Check the sizes of files with objects: the metadata determine how much memory an object gets. If the engine
        does not open the files, because they lie in a store or are shared, check the sizes of all: it cannot.
        """
        with_objects = {reads.paths[file] for file in reads.files[reads.objects].tolist()}

        def check(place: Location, files: set[str]) -> Again:
            if self._sharing_at(place) is None and not isinstance(place, ObjectPath):
                files &= with_objects
            wrong: dict[str, DataStatesError | None] = {}
            for file, nbytes in _sizes(place, files).items():
                if nbytes != (said := self._files[file].nbytes):
                    needed = tuple(dict.fromkeys(reads.of_files([file]).names))
                    wrong[file] = CheckpointCorruptError(
                        f"{place / file} has {nbytes} bytes and the metadata say {said} (needed for {some_of(needed)})"
                    )
            return wrong

        self._at_places(reads.used_paths, check)

    # ---- reading from one place ------------------------------------------------------------------------

    def _read_from(
        self, reads: Reads, shared: ReadRange | None, place: Location, files: set[str]
    ) -> Again:
        """Read ``files``. ``shared`` reads those in the nearest place of all."""
        sharing, group = self._sharing_at(place), reads.of_files(files)
        fault = self._run(group, place, None if sharing is None else shared)
        if fault is None:
            return {}
        failure = self._error(fault, group, place)
        if fault.kind not in ("corrupt", "io"):
            raise failure
        failed = {fault.path.removeprefix(f"{place}/")} & files or files
        # Bytes from another rank may have been damaged on the way, or in its memory.
        if sharing is not None and fault.kind == "corrupt" and sharing.leave(failed):
            return dict.fromkeys(files)
        return {file: failure if file in failed else None for file in files}

    def _run(self, reads: Reads, place: Location, read_range: ReadRange | None) -> Fault | None:
        plan, memories = self._native_plan(reads, place), reads.made
        # Before and after: a save may begin, or look, at any moment, and the engine's writes bypass torch.
        torch.autograd.graph.increment_version(memories)
        # Kernels that write to the target tensors may still be running.
        after = fences(self._engine, set(reads.devices))
        if read_range is None and isinstance(place, ObjectPath):
            read_range = committed.range_reader(place / path for path in reads.used_paths)
        engine = self._engine
        begin = engine.restore if read_range is None else engine.restore_streamed
        job = begin(plan, memories, after)
        try:
            if read_range is not None:
                fetch(job, read_range)
            _await(job, place, self._count)
        except BaseException:
            job.cancel()
            while not job.wait(_POLL_SECONDS):  # until it writes to no memory any more
                pass
            raise
        torch.autograd.graph.increment_version(memories)
        return job.fault

    def _native_plan(self, reads: Reads, place: Location) -> RestorePlan:
        """What the engine is to read, and where to."""
        plan = RestorePlan()
        for relative_path, content in reads.contents().items():
            if content.nbytes:
                record = self._files[relative_path]
                path = str(place / relative_path)
                plan.add_file(path, record.nbytes, record.table_offset, content)
        return plan

    def _error(self, fault: Fault, asked: Reads, place: Location) -> DataStatesError:
        """The error for ``fault`` in a restore of what was ``asked`` for, from ``place``."""
        if fault.kind == "corrupt":
            return CheckpointCorruptError(f"{fault.message} {self._affected(fault, asked, place)}")
        if fault.kind == "io" and fault.errno == errno.ENOENT:
            return CheckpointNotFoundError(fault.errno, fault.message, fault.path)
        if fault.kind == "io":
            return StorageError(fault.errno or None, fault.message, fault.path)
        return (DeviceError if fault.kind == "device" else DataStatesError)(fault.message)

    def _affected(self, fault: Fault, asked: Reads, place: Location) -> str:
        relative_path = fault.path.removeprefix(f"{place}/")
        record = self._files.get(relative_path)
        begin, end = fault.offset, fault.offset + BLOCK_BYTES
        # A wrong size, or damage in the checksums, is that of the whole file.
        is_whole = fault.operation == "fstat" or (
            record is not None and begin >= record.table_offset
        )
        hit = asked.of_files([relative_path])
        ends = hit.begins + hit.stored
        rows = hit.stored > 0
        if not is_whole:
            rows &= (hit.begins < end) & (ends > begin)
        names = [hit.names[row] for row in np.argsort(hit.begins, kind="stable") if rows[row]]
        if is_whole:
            needed = some_of(tuple(dict.fromkeys(names)))
            return f"(the file's checksums or size; {needed} cannot be verified)"
        names += Contents(self._table).names(relative_path, begin, end)
        return (
            f"(bytes of {some_of(tuple(dict.fromkeys(names)))})" if names else "(the file's header)"
        )


def _sizes(place: Location, files: Collection[str]) -> dict[str, int]:
    found = {}
    for file, nbytes in committed.sizes(place, files).items():
        if isinstance(nbytes, int):
            found[file] = nbytes
            continue
        kind = CheckpointNotFoundError if isinstance(nbytes, FileNotFoundError) else StorageError
        path = place / file
        raise kind(nbytes.errno, f"open {path}: {nbytes.strerror}", str(path)) from nbytes
    return found


def _batches(reads: Reads, most_bytes: float) -> Iterator[Reads]:
    """Batches of at most about ``most_bytes``, whose detours have bounded memory. At least a file each, if its detours
    have room.
    """
    detours = [memory is None for memory in reads.memories]
    if math.isinf(most_bytes) and not any(detours):
        yield reads
        return
    begin, last = 0, None
    room, left = _DETOUR_BYTES, most_bytes
    rows = zip(reads.nbytes.tolist(), detours, reads.files.tolist(), strict=True)
    for row, (nbytes, is_detour, file) in enumerate(rows):
        detour = nbytes if is_detour else 0
        if row > begin and (detour > room or (left <= 0 and last != file)):
            yield reads.take(np.arange(begin, row))
            begin, room, left = row, _DETOUR_BYTES, most_bytes
        room -= detour
        left -= nbytes
        last = file
    if begin < len(reads):
        yield reads.take(np.arange(begin, len(reads)))


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
