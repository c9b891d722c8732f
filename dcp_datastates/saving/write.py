"""Carries out one rank's part of a plan: resolve it, lay it out, hand it to the engine, and wait until it is read.

Where it is known where the tensors are in the state, only their addresses are looked up; else the planning resolves
each item.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates._native import Engine, SaveFile, SaveJob, Transfer, Window
from dcp_datastates.errors import (
    ConfigurationError,
    DataStatesError,
    UnsupportedStateError,
)
from dcp_datastates.format.layout import LayoutItem, TensorEntry
from dcp_datastates.io.devices import HOST, THROUGH_TORCH, accelerator, fences, numbers
from dcp_datastates.io.engine import engine, fit_cache
from dcp_datastates.io.tensor_memory import add_region, check_storable, local_tensor
from dcp_datastates.planning.messages import Report
from dcp_datastates.planning.part_files import KnownFiles, PartFiles
from dcp_datastates.planning.save_planning import SavePlanning, Told, Written
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.memory_limit import largest_host_cache_bytes
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.output import LocalPart, StorePart, WrittenPart, check_fits
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.object_path import Location, ObjectPath

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
        self._folder, self._rank, self._step = folder, rank, step
        self.files: list[SaveFile] = []
        self.sizes: dict[str, int] = {}
        """The bytes of each file that is written, by name, in the order of :attr:`files`; they come first."""
        self.compared: dict[int, range] = {}
        """For each set of ranks, the numbers of those that are summed, to be compared with the others'."""
        self.keep: list[Any] = []
        """Objects that must stay alive until they have been read."""
        self._devices: set[int] = set()
        """Devices of tensors that are not deferred: the kernels that compute these tensors may still be running."""
        known = planning.known_files()
        self.is_known = known is not None
        """Whether it was known where the tensors are in the state."""
        self.report = self._add(planning.items if known is None else known, is_written=True)
        for number, each in planning.compared().items():
            begin = len(self.files)
            self._add(each, is_written=False)
            self.compared[number] = range(begin, len(self.files))
        self.readers = fences(native, self._devices)
        """Events of the kernels that this thread has launched to resolve tensors."""

    def _add(self, what: KnownFiles | Sequence[WriteItem], is_written: bool) -> Report:
        """Add the files of these items. Returns where the items are in them."""
        part: PartFiles
        item_of: Callable[[int], WriteItem]
        if isinstance(what, KnownFiles):
            part, item_of = what, what.objects.__getitem__
            add_tensors = functools.partial(what.add_tensors, *self._reads.staged.bases())
        else:
            rank = self._rank if is_written else 0  # replicas must be laid out alike
            part, item_of = PartFiles(list(map(LayoutItem.of, what)), rank), what.__getitem__
            add_tensors = functools.partial(self._add_tensors, what, part)
        objects = [
            [self._object(item_of(entry.item)) for entry in layout.objects]
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
        if isinstance(self._folder, ObjectPath):
            check_fits(self.sizes.values(), native)
            job = native.save_streamed(files, *further)
            return StorePart(job, stats, self._folder, self.sizes)
        job = native.save(files, synced if self.sizes else [], *further)
        return LocalPart(job, stats, self._folder, self.sizes)

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
    def _add_tensors(
        self, items: Sequence[WriteItem], part: PartFiles, transfer: Transfer, file: int
    ) -> None:
        """Add to ``transfer`` the tensors of a file of ``part``, whose items are ``items``."""
        for entry in part.layouts[file].tensors:
            self._step()
            tensor, device = self._resolved(items[entry.item], entry)
            group = self._reads.group_of(tensor.data_ptr(), entry.nbytes)
            if device != HOST and group == STABLE:
                self._devices.add(device)
                tensor = accelerator.dense(tensor)
            self.keep.append(tensor)
            if entry.nbytes:
                add_region(transfer, entry.offset, tensor, entry.nbytes, group, device)

    def _resolved(self, item: WriteItem, entry: TensorEntry) -> tuple[torch.Tensor, int]:
        """The tensor with the bytes that ``entry`` describes, in memory that the engine can read, and its device."""
        data = self._planning.resolve_data(item)
        name = item.index.fqn
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
        if tensor.is_conj() or tensor.is_neg():
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
        _fit_cache(save, content)
        stats.steady = planning.is_cached and content.is_known
        window = reads.prepare(content.readers)
        planning.sample(attempt)  # while the gate still holds
        part = content.begin(stats, save.order, window, synced)
        save.job = part.job
        reads.hand_over(part.job)
        stats.timeline.begin("window")
        checksums = functools.partial(_checksums, part.job, content.compared)
        told = planning.report(content.report, Written(str(save.path), save.metrics, checksums))
        return functools.partial(_finish, save, part, content.keep, told)
    finally:
        planning.release()


def _fit_cache(save: SaveOperation, content: Content) -> None:
    """Let the host cache grow to what this rank writes, if devices hold the state."""
    staged, config = save.reads.kept, save.config
    if content.readers or (staged is not None and staged.fences):
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        grows = config.cache_grows
        most = largest_host_cache_bytes(ranks) if grows else config.host_cache_bytes
        fit_cache(sum(content.sizes.values()), most)


def _finish(
    save: SaveOperation,
    part: WrittenPart,
    keep: list[Any],
    told: Told,
) -> None:
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


def directories_to_sync(folder: Path, rank: int) -> list[str]:
    """The directories to sync for files in ``folder``. Raises :class:`ConfigurationError` if this rank has it not."""
    # Create it again, which must fail because it exists. Creating asks the server of a network file system; a lookup
    # may use a cached "missing" for half a minute.
    made = local.make_directories(folder, "share")
    if not made:
        return [str(parent) for parent in local.sync_directories(folder)]
    for path in made:
        with contextlib.suppress(OSError):
            operations.remove_directory(path, "share")
    raise ConfigurationError(
        f"rank {rank} on {socket.gethostname()} does not see {str(folder)!r}, which the coordinator has just created: "
        f"the checkpoint's path must be one directory for all ranks, on a shared file system"
    )
