"""Carries out one rank's load plan: locates each item's bytes; the engine reads, verifies and scatters them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_datastates._native import Engine, Fault, RestorePlan, Transfer
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    IncompatibleStateError,
    StorageError,
)
from dcp_datastates.format.contents import some_of
from dcp_datastates.io import devices, stored_files
from dcp_datastates.io.devices import HOST, THROUGH_TORCH, fences
from dcp_datastates.io.download import ReadRange, fetch
from dcp_datastates.io.nearest_copy import NearestCopies
from dcp_datastates.io.stored_checkpoint import StoredCheckpoint, read_error
from dcp_datastates.io.tensor_memory import (
    add_region,
    dense_strides,
    is_unusual,
    is_wrapper,
    local_tensor,
    without_bytes,
)
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.storage.object_path import Location, ObjectPath

__all__ = ["restore"]

_POLL_SECONDS: Final = 0.1

_DETOUR_BYTES: Final = 256 << 20
"""Host memory for tensors that the engine cannot scatter into directly (they need a cast, or it cannot access them)."""

_SHARED_BYTES: Final = 512 << 20
"""What is read at once of files that ranks share: two of them keep half of it each (``sharing/shared_reads.py``)."""

_SHORTEST_RUN_BYTES: Final = 4 << 10
"""Shortest run that a device copies directly: enqueueing copies of shorter runs takes longer than a detour."""


@dataclass
class _Request:
    """One read item, with the place of its bytes and its destination."""

    item: ReadItem
    info: _StorageInfo
    target: torch.Tensor | None = None
    """The planner's destination of a tensor; None for an object."""
    memory: torch.Tensor | None = None
    """The tensor that the engine scatters into: ``target`` itself, or a detour of the saved dtype on the host."""
    device: int = HOST
    """The device number of ``memory``."""
    chunk_sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    data: bytearray = field(default_factory=bytearray)

    @property
    def detour(self) -> bool:
        return self.target is not None and self.memory is None

    @property
    def nbytes(self) -> int:
        return 0 if self.target is None else self.target.numel() * self.dtype.itemsize


def restore(
    plan: LoadPlan,
    planner: LoadPlanner,
    source: StoredCheckpoint,
    engine: Engine,
    cast: bool,
    release: Callable[[set[torch.UntypedStorage]], None] | None = None,
) -> None:
    """Load every item of ``plan``. Checks all destinations before it reads the first byte, and then passes their
    storages to ``release``, which returns when they may be written to.

    Raises :class:`IncompatibleStateError`, :class:`CheckpointCorruptError` (tensors may be partly overwritten by then),
    :class:`CheckpointNotFoundError` if a data file is missing, or :class:`StorageError`.
    """
    with collection_paused():
        requests = [_request(item, planner, source.metadata, cast) for item in plan.items]
        _place(requests, engine)
    copies = NearestCopies(source.places)
    _check_files(requests, source, copies)
    if release is not None:
        release({s for request in requests if (s := _storage(request)) is not None})
    sharing = source.sharing
    batches = _batches(requests) if sharing is None else _batches_by_file(requests)
    reading: AbstractContextManager[ReadRange | None] = (
        nullcontext() if sharing is None else sharing.reading(plan.items)
    )
    with reading as shared:
        for batch in batches:
            left = batch
            while left:
                left = _read_nearest(left, source, engine, copies, shared)
            for request in batch:
                _deliver(request, planner)


def _storage(request: _Request) -> torch.UntypedStorage | None:
    """That of the destination; None for an object, and for tensors that torch writes to in its own way (sparse)."""
    try:
        return None if request.target is None else local_tensor(request.target).untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def _request(item: ReadItem, planner: LoadPlanner, metadata: Metadata, cast: bool) -> _Request:
    name = item.storage_index.fqn
    info = metadata.storage_data.get(item.storage_index)
    if not isinstance(info, _StorageInfo):
        raise CheckpointCorruptError(
            f"the metadata do not say where {item.storage_index} is stored"
        )
    if item.type == LoadItemType.BYTE_IO:
        return _Request(item, info)
    saved = metadata.state_dict_metadata[name]
    if not isinstance(saved, TensorStorageMetadata):
        raise IncompatibleStateError(f"{name!r} was saved as a Python object, not as a tensor")
    dtype = saved.properties.dtype
    chunk = _chunk(saved, item.storage_index)
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise IncompatibleStateError(
            f"{name!r}: the state has room for {tuple(target.shape)} where {tuple(item.lengths)} was saved"
        )
    if target.dtype != dtype and not cast:
        raise IncompatibleStateError(
            f"{name!r} was saved as {dtype} and the state has {target.dtype}; load into a tensor of the "
            f"saved dtype, or pass cast=True to convert"
        )
    request = _Request(item, info, target, chunk_sizes=tuple(chunk.sizes), dtype=dtype)
    memory = local_tensor(target)
    _check_loadable(memory, name)
    if memory.dtype == dtype and not (
        is_unusual(memory) and (is_wrapper(memory) or memory.is_conj() or memory.is_neg())
    ):
        request.memory = memory
    return request


def _place(requests: list[_Request], engine: Engine) -> None:
    """Set the devices of requests with memory. Those that the engine had better not write to take a detour."""
    direct = [(each, each.memory) for each in requests if each.memory is not None]
    numbers = devices.numbers(engine, [memory for _, memory in direct])
    for (request, memory), device in zip(direct, numbers, strict=True):
        request.device = device
        if device == THROUGH_TORCH or not (
            device == HOST or _has_long_runs(memory, request.chunk_sizes)
        ):
            request.memory, request.device = None, HOST


def _check_loadable(memory: torch.Tensor, name: str) -> None:
    """Raise :class:`IncompatibleStateError` if no value can be written to this (local) tensor of the state."""
    unusual = is_unusual(memory)
    reason, way_out = None, ""
    if unusual and not memory.is_quantized:  # torch quantizes what it casts
        reason, way_out = without_bytes(memory) or (None, "")
    if reason is None and not (unusual and is_wrapper(memory)):
        strides = memory.stride()
        if 0 in strides and any(
            stride == 0 and size > 1 for stride, size in zip(strides, memory.shape, strict=True)
        ):
            reason, way_out = "expanded: elements share memory", "load into a clone() of it"
    if reason is not None:
        raise IncompatibleStateError(f"{name!r} cannot be loaded: it is {reason}; {way_out}")


def _has_long_runs(memory: torch.Tensor, chunk_sizes: tuple[int, ...]) -> bool:
    """Whether a device should copy directly to ``memory``: it needs one copy per run that is contiguous on
    both sides.
    """
    run = memory.element_size()
    for size, stride, stored in zip(
        reversed(memory.shape), reversed(memory.stride()), reversed(chunk_sizes), strict=True
    ):
        if size > 1 and stride * memory.element_size() != run:
            break
        run *= size
        if size != stored:
            break
    return run >= min(_SHORTEST_RUN_BYTES, memory.nbytes)


def _file_of(request: _Request) -> str:
    return request.info.relative_path


def _check_files(requests: list[_Request], source: StoredCheckpoint, copies: NearestCopies) -> None:
    """Check the sizes of files with objects: the metadata determine how much memory an object gets. If the engine does
    not open the files, because they lie in a store or are shared, check the sizes of all: it cannot.
    """
    left = requests
    while left:
        again: list[_Request] = []
        for place, group in copies.by_place(left, _file_of):
            try:
                found = _sizes(place, group, source)
            except (StorageError, CheckpointNotFoundError) as error:
                copies.leave({*map(_file_of, group)}, error)
                again += group
                continue
            for file, nbytes in found.items():
                if nbytes != source.note.files[file].nbytes:
                    copies.leave([file], _wrong_size(place, file, nbytes, requests, source))
                    again += [request for request in group if _file_of(request) == file]
        left = again


def _sizes(place: Location, requests: list[_Request], source: StoredCheckpoint) -> dict[str, int]:
    described = source.note.files.keys()
    if isinstance(place, ObjectPath):
        return stored_files.sizes(place, sorted({*map(_file_of, requests)} & described))
    found = {}
    is_shared = source.sharing is not None and place is source.places[0]
    opened = requests if is_shared else [each for each in requests if each.target is None]
    for file in {*map(_file_of, opened)} & described:
        path = place / file
        try:
            found[file] = path.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                error.errno, f"open {path}: {error.strerror}", str(path)
            ) from error
        except OSError as error:
            raise StorageError(error.errno, f"open {path}: {error.strerror}", str(path)) from error
    return found


def _wrong_size(
    place: Location, file: str, nbytes: int, requests: list[_Request], source: StoredCheckpoint
) -> CheckpointCorruptError:
    names = [r.item.storage_index.fqn for r in requests if _file_of(r) == file]
    needed = some_of(tuple(dict.fromkeys(names)))
    return CheckpointCorruptError(
        f"{place / file} has {nbytes} bytes and the metadata say {source.note.files[file].nbytes} (needed for "
        f"{needed})"
    )


def _chunk(saved: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    hint = index.index
    if hint is not None and hint < len(saved.chunks) and saved.chunks[hint].offsets == index.offset:
        return saved.chunks[hint]
    for chunk in saved.chunks:
        if chunk.offsets == index.offset:
            return chunk
    raise CheckpointCorruptError(f"the metadata have no chunk of {index.fqn!r} at {index.offset}")


def _batches(requests: list[_Request]) -> Iterator[list[_Request]]:
    """All direct requests at once; detours in batches of bounded memory."""
    batch = [request for request in requests if not request.detour]
    room = _DETOUR_BYTES
    for request in requests:
        if request.detour:
            if request.nbytes > room and batch:
                yield batch
                batch, room = [], _DETOUR_BYTES
            batch.append(request)
            room -= request.nbytes
    if batch:
        yield batch


def _batches_by_file(requests: list[_Request]) -> Iterator[list[_Request]]:
    """Batches in the order of the files, whose bytes all ranks want at about the same time: within a job, the order of
    files is that in which their tables come. At least a file each, if its detours have room.
    """
    batch: list[_Request] = []
    room, left = _DETOUR_BYTES, _SHARED_BYTES
    for request in sorted(requests, key=lambda each: (_file_of(each), each.info.offset)):
        detour = request.nbytes if request.detour else 0
        if batch and (detour > room or (left <= 0 and _file_of(batch[-1]) != _file_of(request))):
            yield batch
            batch, room, left = [], _DETOUR_BYTES, _SHARED_BYTES
        batch.append(request)
        room -= detour
        left -= request.nbytes
    if batch:
        yield batch


def _read_nearest(
    requests: list[_Request],
    source: StoredCheckpoint,
    engine: Engine,
    copies: NearestCopies,
    shared: ReadRange | None,
) -> list[_Request]:
    """Read each file from its nearest place; returns the requests that are to be read again, from another one.

    ``shared`` reads those in the nearest place of all.
    """
    again: list[_Request] = []
    for place, group in copies.by_place(requests, _file_of):
        files = {*map(_file_of, group)}
        sharing = source.sharing if place is source.places[0] else None
        try:
            fault = _read(group, source, place, engine, shared if sharing is not None else None)
        except (StorageError, CheckpointNotFoundError) as error:
            copies.leave(files, error)
            again += group
            continue
        if fault is not None:
            asked = ((request.item.storage_index, request.info) for request in group)
            failure = read_error(fault, asked, source, place)
            if fault.kind not in ("corrupt", "io"):
                raise failure
            failed = {fault.path.removeprefix(f"{place}/")} & files or files
            # Bytes from another rank may have been damaged on the way, or in its memory.
            if sharing is None or fault.kind != "corrupt" or not sharing.leave(failed):
                copies.leave(failed, failure)
            again += group
    return again


def _read(
    requests: list[_Request],
    source: StoredCheckpoint,
    place: Location,
    engine: Engine,
    read_range: ReadRange | None,
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
        while not job.wait(_POLL_SECONDS):
            pass
    except BaseException:
        job.cancel()
        while not job.wait(_POLL_SECONDS):
            pass
        raise
    _say_written(requests)
    return job.fault


@collection_paused()
def _native_plan(
    requests: list[_Request], source: StoredCheckpoint, place: Location
) -> RestorePlan:
    """What the engine is to read, and where to; makes the memory of detours."""
    contents: dict[str, Transfer] = {}
    for request in requests:
        if request.detour:
            assert request.target is not None
            request.memory = torch.empty(request.target.shape, dtype=request.dtype, device="cpu")
        _add(contents.setdefault(request.info.relative_path, Transfer()), request)
    plan = RestorePlan()
    for relative_path, content in contents.items():
        record = source.note.files.get(relative_path)
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


def _say_written(requests: list[_Request]) -> None:
    """Move the version counters: the engine's writes bypass torch."""
    written = [request.memory for request in requests if request.memory is not None]
    torch.autograd.graph.increment_version(written)


def _add(content: Transfer, request: _Request) -> None:
    """Describe the item's strided region in the stored (row-major) chunk, and in memory."""
    if request.target is None:
        if request.info.length:
            request.data = bytearray(request.info.length)
            content.add_buffer(request.info.offset, request.data)
        return
    memory = request.memory
    assert memory is not None
    if not memory.numel():
        return
    itemsize = request.dtype.itemsize
    nbytes = math.prod(request.chunk_sizes) * itemsize
    if nbytes != request.info.length:
        raise CheckpointCorruptError(
            f"the metadata give {request.item.storage_index.fqn!r} {request.info.length} bytes; its chunk "
            f"of {request.chunk_sizes} {request.dtype} has {nbytes}"
        )
    start = request.info.offset
    is_whole = request.item.lengths == memory.shape == request.chunk_sizes
    if is_whole and not any(request.item.storage_offsets):
        add_region(content, start, memory, nbytes, device=request.device)
        return
    strides = dense_strides(request.chunk_sizes, itemsize)
    for offset, length, size, stride in zip(
        request.item.storage_offsets,
        request.item.lengths,
        request.chunk_sizes,
        strides,
        strict=True,
    ):
        if offset < 0 or offset + length > size:
            raise CheckpointCorruptError(
                f"the load plan reads [{offset}, {offset + length}) of {size} in {request.item.storage_index}"
            )
        start += offset * stride
    content.add_strided(
        start,
        itemsize,
        list(memory.shape),
        strides,
        memory.data_ptr(),
        [stride * itemsize for stride in memory.stride()],
        device=request.device,
    )


def _deliver(request: _Request, planner: LoadPlanner) -> None:
    if request.target is None:
        planner.load_bytes(request.item, io.BytesIO(request.data))
        request.data = bytearray()
        return
    if request.memory is not None and request.memory is not local_tensor(request.target):
        request.target.copy_(request.memory)
        request.memory = None
    planner.commit_tensor(request.item, request.target)
