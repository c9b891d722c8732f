"""Carries out one rank's part of a plan: resolve it, lay it out, hand it to the engine, and wait until it is read.

Where it is known where the tensors are in the state, only their addresses are looked up; else the planning resolves
each item.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import operator
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress, count
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates._native import Engine, SaveFile, Transfer
from dcp_datastates.errors import (
    ConfigurationError,
    DataStatesError,
    SaveFailedError,
    UnsupportedStateError,
)
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.layout import LayoutItem, TensorEntry
from dcp_datastates.io.devices import HOST, THROUGH_TORCH, accelerator, fences, numbers
from dcp_datastates.io.engine import engine, fit_cache
from dcp_datastates.io.tensor_memory import add_region, check_storable, local_tensor
from dcp_datastates.planning.messages import Report
from dcp_datastates.planning.part_files import PartFiles
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.memory_limit import largest_host_cache_bytes
from dcp_datastates.saving import output
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.output import WriteJob, WrittenPart
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.staging.stage import StagedState
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

_CANCEL_SECONDS: Final = 3.0
"""How long a failed save waits for its reads and writes to end, before it reports the failure."""


@dataclass(eq=False)
class Sources:
    """The data that a plan's items resolve to."""

    engine: Engine
    planning: SavePlanning
    reads: DeferredReads
    step: Callable[[], None]
    keep: list[Any] = field(default_factory=list)
    """Objects that must stay alive until they have been read."""
    devices: set[int] = field(default_factory=set)
    """Devices of tensors that are not deferred: the kernels that compute these tensors may still be running."""

    def object(self, item: WriteItem) -> memoryview:
        """The bytes of a BYTE_IO item. Raises :class:`UnsupportedStateError` if it does not pickle."""
        self.step()
        try:
            data = self.planning.resolve_data(item)
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
    def add_tensors(
        self, items: Sequence[WriteItem], part: PartFiles, content: Transfer, file: int
    ) -> None:
        """Add to ``content`` the tensors of a file of ``part``, whose items are ``items``.

        Raises :class:`UnsupportedTensorError`, and what ``resolve_data`` raises.
        """
        for entry in part.layouts[file].tensors:
            self.step()
            tensor, device = _resolve_tensor(self, items[entry.item], entry)
            group = self.reads.group_of(tensor.data_ptr(), entry.nbytes)
            if device != HOST and group == STABLE:
                self.devices.add(device)
                tensor = accelerator.dense(tensor)
            self.keep.append(tensor)
            if entry.nbytes:
                add_region(content, entry.offset, tensor, entry.nbytes, group, device)


def write_job(sources: Sources, folder: Location, rank: int, synced: list[str]) -> WriteJob:
    """The files that ``rank`` writes below ``folder``, with the directories to sync.

    Raises :class:`UnsupportedStateError`, :class:`UnsupportedTensorError`, and what ``resolve_data`` raises.
    """
    reads, planning = sources.reads, sources.planning
    known = planning.known_files()
    part: PartFiles
    item_of: Callable[[int], WriteItem]
    if known is not None:
        part, item_of = known, known.objects.__getitem__
        add_tensors = functools.partial(known.add_tensors, *reads.staged.bases())
    else:
        items = planning.items
        part, item_of = PartFiles(list(map(LayoutItem.of, items)), rank), lambda at: items[at]
        add_tensors = functools.partial(sources.add_tensors, items, part)
    objects = [
        [sources.object(item_of(entry.item)) for entry in layout.objects] for layout in part.layouts
    ]
    sealed, report = part.seal(tuple([tuple(map(len, of_file)) for of_file in objects]))
    files = []
    for number, (layout, file) in enumerate(zip(part.layouts, sealed, strict=True)):
        content = Transfer()
        content.add_buffer(0, file.header, STABLE)
        add_tensors(content, number)
        for offset, data in zip(file.object_offsets, objects[number], strict=True):
            if len(data):
                content.add_buffer(offset, data, STABLE)
        sources.keep.append((file.header, objects[number]))
        files.append(SaveFile(str(folder / layout.name), file.table_offset, content))
    readers = fences(sources.engine, sources.devices)
    staged = reads.kept
    after = readers if staged is None else [*staged.fences, *readers]
    return WriteJob(
        sources.engine,
        folder,
        synced,
        files,
        part.layouts,
        sealed,
        report,
        after,
        readers,
        sources.keep,
        known is not None,
    )


def _resolve_tensor(
    sources: Sources, item: WriteItem, entry: TensorEntry
) -> tuple[torch.Tensor, int]:
    """The tensor with the bytes that ``entry`` describes, in memory that the engine can read, and its device."""
    data = sources.planning.resolve_data(item)
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
    (device,) = numbers(sources.engine, (tensor,))
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
        content = _content(save, planning, save.resolved_path() / attempt.name)
        reads, stats = save.reads, save.stats
        window = reads.prepare(content.readers)
        planning.sample(attempt)  # while the gate still holds
        expected = None if (staged := reads.kept) is None else staged.expected
        part = output.begin(content, stats, save.order, window, expected)
        save.job = part.job
        reads.hand_over(part.job)
        stats.timeline.begin("window")
        return functools.partial(_finish, save, planning, part, content.keep, content.report)
    finally:
        planning.release()


def _content(save: SaveOperation, planning: SavePlanning, folder: Location) -> WriteJob:
    reads, config, rank = save.reads, save.config, save.group.rank_set.rank
    native = engine(config.host_cache_bytes)
    look_for_nan(save)
    synced: list[str] = []
    if isinstance(folder, Path):
        look = functools.partial(directories_to_sync, folder, rank)
        synced = save.on_storage("looking for the attempt", look)
    try:
        content = write_job(Sources(native, planning, reads, save.step), folder, rank, synced)
    except RuntimeError:  # the planner met a tensor that is not as planned
        reads.check_unchanged()
        raise
    if content.fences:  # from devices
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        grows = config.cache_grows
        most = largest_host_cache_bytes(ranks) if grows else config.host_cache_bytes
        fit_cache(content.nbytes, most)
    save.stats.steady = planning.is_cached and content.is_known
    return content


def _finish(
    save: SaveOperation,
    planning: SavePlanning,
    part: WrittenPart,
    keep: list[Any],
    places: Report,
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
    save.submit(part, *planning.report(places, save.metrics))


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


def fail_write(save: SaveOperation, error: BaseException) -> None:
    """Free the save's memory, and vote against it: the vote decides the outcome on all ranks."""
    save.reads.fail(error)
    save.submit_failure(error)


# ---- NaN in what is saved: a line of the log by name, or a failed save (``on_nan``) --------------------
# A few elements are looked at, in the background: of each tensor that was copied at the call (those below 64 KiB, also
# from devices: biases, norms, statistics) and, in turn, of some that are read later from the host. One bad step of an
# optimizer makes all of a model NaN, so it shows there. Metrics that are given are looked at, too.


_DTYPE: Final = operator.attrgetter("dtype")
_KINDS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLACES: Final = torch.tensor([0.0, 0.4, 0.7, 1.0], dtype=torch.float64, device="cpu")
_LATER: Final = 64
"""How many tensors that are read later are looked at in one save."""


def look_for_nan(save: SaveOperation) -> None:
    """Look at the elements, which are as at the call. Raises :class:`SaveFailedError` with ``on_nan="refuse"``."""
    found = []
    if save.group.rank_set.rank == 0:  # whose metrics are stored
        numbers = save.metrics.items()
        found += [f"metrics.{name}" for name, number in numbers if math.isnan(number)]
    if (staged := save.reads.kept) is not None:
        found += [*_copied(staged), *_read_later(staged, save.number)]
    if not found:
        return
    if save.config.on_nan == "refuse":
        raise SaveFailedError(
            f'there is NaN in {some_of(found)}, and on_nan="refuse" fails such saves; older checkpoints stay'
        )
    _warn(some_of(found))


@lru_cache(maxsize=256)
def _warn(names: str) -> None:
    """Once per process for the same names: a run that has gone wrong saves on."""
    logger.warning(
        'there is NaN in %s, which is saved, and perhaps elsewhere; on_nan="refuse" fails such saves',
        names,
    )


def _copied(staged: StagedState) -> Iterator[str]:
    """The names of tensors among the eager copies that have NaN. Not of a state with sparse or complex tensors, say."""
    if not staged.is_cacheable:
        return  # the copies are not in the order of the traversal
    columns = staged.traversal.columns
    eager = list(compress(count(), map(operator.not_, staged.is_deferred)))
    tensors = [columns.locals[at] for at in eager]
    dtypes, sizes = list(map(_DTYPE, tensors)), list(map(torch.Tensor.numel, tensors))
    staged.copying.wait()
    for kind in _KINDS:
        rows = [
            (at, offset // kind.itemsize, size - 1)
            for at, offset, dtype, size in zip(eager, staged.offsets, dtypes, sizes, strict=True)
            if dtype is kind and size
        ]
        if not rows:
            continue
        numbers, starts, lasts = torch.tensor(rows, dtype=torch.int64, device="cpu").unbind(1)
        elements = staged.buffer[: staged.buffer.nbytes // kind.itemsize * kind.itemsize].view(kind)
        places = starts[:, None] + (lasts[:, None] * _PLACES).long()
        bad = elements[places.clamp_(max=len(elements) - 1)].isnan().any(1)
        yield from map(columns.name, numbers[bad].tolist())


def _read_later(staged: StagedState, turn: int) -> Iterator[str]:
    """The names of tensors on the host that have NaN, of those whose turn it is.

    The program may have given their memory back by now, which is a torn save, or none. So the bytes come from the
    process's memory as a file, where an address that is not mapped is an error and no fault.
    """
    deferred = staged.deferred
    columns = deferred.columns
    every = -(-len(columns.locals) // _LATER) or 1
    with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
        for at in range(turn % every, len(columns.locals), every):
            tensor = columns.locals[at]
            nbytes = tensor.itemsize
            elements = deferred.sizes[at] // nbytes
            if not (
                tensor.is_cpu and tensor.dtype in _KINDS and tensor.is_contiguous() and elements
            ):
                continue
            places = (0, elements // 2, elements - 1)
            words = bytearray().join(
                os.pread(memory.fileno(), nbytes, deferred.addresses[at] + place * nbytes)
                for place in places
            )
            if torch.frombuffer(words, dtype=tensor.dtype).isnan().any():
                yield columns.name(at)
