"""The items of one rank's load plan: where the bytes of each lie, and which memory they go to."""

from __future__ import annotations

import math
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_datastates._native import Engine, Transfer
from dcp_datastates.errors import CheckpointCorruptError, IncompatibleStateError
from dcp_datastates.io import devices
from dcp_datastates.io.devices import HOST, THROUGH_TORCH
from dcp_datastates.io.tensor_memory import (
    add_region,
    dense_strides,
    is_unusual,
    is_wrapper,
    local_tensor,
    without_bytes,
)

__all__ = ["Request", "add_to", "choose_devices", "request_of", "storage_of"]

_SHORTEST_RUN_BYTES: Final = 4 << 10
"""Shortest run that a device copies directly: enqueueing copies of shorter runs takes longer than a detour."""


@dataclass
class Request:
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


def request_of(item: ReadItem, planner: LoadPlanner, metadata: Metadata, cast: bool) -> Request:
    """Locate the item's bytes, and find its destination.

    Raises :class:`IncompatibleStateError` if it cannot receive what was saved, :class:`CheckpointCorruptError` if the
    metadata do not say where that is.
    """
    name = item.storage_index.fqn
    info = metadata.storage_data.get(item.storage_index)
    if not isinstance(info, _StorageInfo):
        raise CheckpointCorruptError(
            f"the metadata do not say where {item.storage_index} is stored"
        )
    if item.type == LoadItemType.BYTE_IO:
        return Request(item, info)
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
    request = Request(item, info, target, chunk_sizes=tuple(chunk.sizes), dtype=dtype)
    memory = local_tensor(target)
    unusual = is_unusual(memory)
    _check_loadable(memory, unusual, name)
    if memory.dtype == dtype and not (
        unusual and (is_wrapper(memory) or memory.is_conj() or memory.is_neg())
    ):
        request.memory = memory
    return request


def choose_devices(requests: list[Request], engine: Engine) -> None:
    """Set the devices of requests with memory. Those that the engine had better not write to take a detour."""
    direct = [(each, each.memory) for each in requests if each.memory is not None]
    numbers = devices.numbers(engine, [memory for _, memory in direct])
    for (request, memory), device in zip(direct, numbers, strict=True):
        request.device = device
        if device == THROUGH_TORCH or not (
            device == HOST or _has_long_runs(memory, request.chunk_sizes)
        ):
            request.memory, request.device = None, HOST


def storage_of(request: Request) -> torch.UntypedStorage | None:
    """That of the destination; None for an object, and for tensors that torch writes to in its own way (sparse)."""
    try:
        return None if request.target is None else local_tensor(request.target).untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def add_to(content: Transfer, request: Request) -> None:
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


def _check_loadable(memory: torch.Tensor, unusual: bool, name: str) -> None:
    """Raise :class:`IncompatibleStateError` if no value can be written to this (local) tensor of the state."""
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


def _chunk(saved: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    hint = index.index
    if hint is not None and hint < len(saved.chunks) and saved.chunks[hint].offsets == index.offset:
        return saved.chunks[hint]
    for chunk in saved.chunks:
        if chunk.offsets == index.offset:
            return chunk
    raise CheckpointCorruptError(f"the metadata have no chunk of {index.fqn!r} at {index.offset}")
