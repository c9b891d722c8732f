"""What a load reads: regions of stored chunks, and objects; and the memory that they go to."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_datastates._native import Engine, Transfer
from dcp_datastates.errors import CheckpointCorruptError, IncompatibleStateError
from dcp_datastates.io import devices
from dcp_datastates.io.devices import HOST, THROUGH_TORCH
from dcp_datastates.io.tensor_memory import (
    are_unusual,
    dense_strides,
    is_wrapper,
    local_tensor,
    local_tensors,
    without_bytes,
)

_SHORTEST_RUN_BYTES: Final = 4 << 10
"""Shortest run that a device copies directly: enqueueing copies of shorter runs takes longer than a detour."""

_ADDRESS: Final = torch.Tensor.data_ptr
_IS_DENSE: Final = torch.Tensor.is_contiguous
_DTYPE, _SHAPE = map(operator.attrgetter, ("dtype", "shape"))

Sizes = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Request:
    """A region of one stored chunk, or a whole object, and its destination."""

    name: str
    """The name under which it is stored."""
    file: str
    """The relative path of the data file."""
    begin: int
    """Where the chunk, or the object, begins in the file, in bytes."""
    stored: int
    """How many bytes of the file it has."""
    key: Any = None
    """What the caller delivers it by."""
    dtype: torch.dtype | None = None
    """Of the stored tensor; None for an object."""
    chunk_sizes: Sizes = ()
    offsets: Sizes = ()
    """Where the region begins in the chunk, in elements."""
    lengths: Sizes = ()
    """The sizes of the region, in elements."""

    target: torch.Tensor | None = None
    """The destination of a tensor."""
    memory: torch.Tensor | None = None
    """The tensor that the engine scatters into: that of ``target``, or a detour of the saved dtype on the host."""
    device: int = HOST
    """The device number of ``memory``."""
    data: bytes | bytearray = b""
    """Of an object, once it has been read."""
    value: Any = None
    """Of an object, what the reader has made of its data."""

    @property
    def detour(self) -> bool:
        return self.target is not None and self.memory is None

    @property
    def nbytes(self) -> int:
        """The bytes that go to memory; 0 for an object."""
        return 0 if self.dtype is None else math.prod(self.lengths) * self.dtype.itemsize


def aim(requests: Sequence[Request], targets: Sequence[torch.Tensor], cast: bool) -> None:
    """Give each request of a tensor its destination.

    Raises :class:`IncompatibleStateError` if one cannot receive what was saved.
    """
    memories = local_tensors(targets)
    columns = requests, targets, memories, map(_SHAPE, targets), map(_DTYPE, targets)
    asked = are_unusual(memories), map(_IS_DENSE, memories)
    rows = zip(*columns, *asked, strict=True)
    for request, target, memory, shape, dtype, is_unusual, is_dense in rows:
        if shape != request.lengths:
            raise IncompatibleStateError(
                f"{request.name!r}: the state has room for {tuple(shape)} where {tuple(request.lengths)} was "
                f"saved"
            )
        if dtype != request.dtype and not cast:
            raise IncompatibleStateError(
                f"{request.name!r} was saved as {request.dtype} and the state has {dtype}; load into a tensor "
                f"of the saved dtype, or pass cast=True to convert"
            )
        if is_unusual or not is_dense:
            _check_loadable(memory, is_unusual, request.name)
        request.target = target
        if memory.dtype == request.dtype and not (
            is_unusual and (is_wrapper(memory) or memory.is_conj() or memory.is_neg())
        ):
            request.memory = memory


def choose_devices(requests: list[Request], engine: Engine) -> None:
    """Set the devices of requests with memory. Those that the engine had better not write to take a detour."""
    direct = [(each, each.memory) for each in requests if each.memory is not None]
    numbers = devices.numbers(engine, [memory for _, memory in direct])
    for (request, memory), device in zip(direct, numbers, strict=True):
        if device == HOST:
            continue
        if device == THROUGH_TORCH or not _has_long_runs(memory, request.chunk_sizes):
            request.memory = None
        else:
            request.device = device


def storage_of(request: Request) -> torch.UntypedStorage | None:
    """That of the destination; None for an object, and for tensors that torch writes to in its own way (sparse)."""
    try:
        if request.target is None:
            return None
        memory = request.memory
        return (local_tensor(request.target) if memory is None else memory).untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def contents(requests: Iterable[Request]) -> dict[str, Transfer]:
    """What goes from each file to memory, by the file's relative path. Makes the memory of objects.

    Raises :class:`CheckpointCorruptError` if the metadata contradict themselves.
    """
    found: dict[str, Transfer] = {}
    whole: dict[str, list[tuple[int, int, torch.Tensor, int]]] = {}
    """By file: the whole chunks that go to dense memory, which the engine takes in one call."""
    for request in requests:
        file, memory = request.file, request.memory
        content = found.get(file) or found.setdefault(file, Transfer())
        if request.dtype is None:
            if request.stored:
                request.data = bytearray(request.stored)
                content.add_buffer(request.begin, request.data)
            continue
        assert memory is not None
        if not memory.numel():
            continue
        nbytes = math.prod(request.chunk_sizes) * request.dtype.itemsize
        if nbytes != request.stored:
            raise CheckpointCorruptError(
                f"the metadata give {request.name!r} {request.stored} bytes; its chunk of {request.chunk_sizes} "
                f"{request.dtype} has {nbytes}"
            )
        is_whole = request.lengths == request.chunk_sizes and not any(request.offsets)
        if is_whole and memory.is_contiguous():
            column = whole.get(file) or whole.setdefault(file, [])
            column.append((request.begin, nbytes, memory, request.device))
        else:
            _add_region(content, request, memory, request.dtype.itemsize)
    for file, rows in whole.items():
        begins, sizes, memories, numbers = zip(*rows, strict=True)
        addresses = list(map(_ADDRESS, memories))
        found[file].add_many(begins, sizes, addresses, [0] * len(rows), numbers)
    return found


def _add_region(content: Transfer, request: Request, memory: torch.Tensor, itemsize: int) -> None:
    start = request.begin
    strides = dense_strides(request.chunk_sizes, itemsize)
    region = zip(request.offsets, request.lengths, request.chunk_sizes, strides, strict=True)
    for offset, length, size, stride in region:
        if offset < 0 or offset + length > size:
            raise CheckpointCorruptError(
                f"the load plan reads [{offset}, {offset + length}) of {size} in {request.name!r}"
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


def _has_long_runs(memory: torch.Tensor, chunk_sizes: Sizes) -> bool:
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
