"""What a load reads, in columns: regions of stored chunks, and objects; and the memory that they go to."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dcp_datastates._native import Engine, Transfer
from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.ragged import Ints, distinct, groups, positions, starts_of, sums, volumes
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
_DTYPE, _NDIM, _SHAPE = map(operator.attrgetter, ("dtype", "ndim", "shape"))

Sizes = tuple[int, ...]


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[Ints, Ints]:
    """The numbers of dimensions, and ragged: the sizes of tensors."""
    ndims = np.fromiter(map(_NDIM, tensors), np.int64, len(tensors))
    return ndims, np.fromiter(chain.from_iterable(map(_SHAPE, tensors)), np.int64, ndims.sum())


_LISTS: Final = ("names", "dtypes", "targets", "memories", "devices")
_COLUMNS: Final = ("files", "begins", "stored", "ndims")
_RAGGED: Final = ("chunk_sizes", "offsets", "lengths")


@dataclass(eq=False)
class Reads:
    """Regions of stored chunks, and whole objects: a row for each. An object is a chunk of bytes.

    Sizes and offsets are in elements, and ragged: a value for each dimension of a row.
    """

    paths: Sequence[str]
    """The relative paths of the data files."""
    names: list[str]
    """The names under which they are stored."""
    dtypes: list[torch.dtype | None]
    """Of the stored tensors; None for an object."""
    files: Ints
    """(N,): index into ``paths``."""
    begins: Ints
    """(N,): where the chunk, or the object, begins in its file, in bytes."""
    stored: Ints
    """(N,): how many bytes of the file it has."""
    ndims: Ints
    chunk_sizes: Ints
    offsets: Ints
    """Where each region begins in its chunk."""
    lengths: Ints
    """The sizes of each region."""
    targets: list[torch.Tensor | None] = field(default_factory=list)
    """The destinations of tensors; None for an object."""
    memories: list[torch.Tensor | None] = field(default_factory=list)
    """What the engine scatters into: the memory of a target, or a detour of the saved dtype on the host, where an
    object goes, too. A detour is made when its row is read; until then it is None.
    """
    devices: list[int] = field(default_factory=list)
    """The device numbers of ``memories``."""

    def __post_init__(self) -> None:
        nothing: list[torch.Tensor | None] = [None] * len(self.names)
        self.targets = self.targets or nothing
        self.memories = self.memories or nothing.copy()
        self.devices = self.devices or [HOST] * len(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: Ints) -> Reads:
        """Those rows. Memory that is made for the result is unknown here."""
        chosen = rows.tolist()
        where = positions(starts_of(self.ndims)[rows], self.ndims[rows])
        taken: dict[str, Any] = {}
        for name in _LISTS:
            column = getattr(self, name)
            taken[name] = [column[row] for row in chosen]
        taken |= {name: getattr(self, name)[rows] for name in _COLUMNS}
        taken |= {name: getattr(self, name)[where] for name in _RAGGED}
        return Reads(self.paths, **taken)

    @staticmethod
    def joined(parts: Sequence[Reads]) -> Reads:
        """The rows of ``parts``, which are of one checkpoint, and at least one."""
        joined: dict[str, Any] = {}
        for name in _LISTS:
            joined[name] = list(chain.from_iterable(getattr(part, name) for part in parts))
        for name in _COLUMNS + _RAGGED:
            joined[name] = np.concatenate([getattr(part, name) for part in parts])
        return Reads(parts[0].paths, **joined)

    # ---- what each row is ----------------------------------------------------------------------------

    @property
    def itemsizes(self) -> Ints:
        """(N,): of the stored tensors, in bytes; 1 for an object."""
        known = {dtype: 1 if dtype is None else dtype.itemsize for dtype in set(self.dtypes)}
        return np.array([known[dtype] for dtype in self.dtypes], np.int64)

    @property
    def nbytes(self) -> Ints:
        """(N,): the bytes that go to memory."""
        return volumes(self.ndims, self.lengths) * self.itemsizes

    @property
    def are_whole(self) -> npt.NDArray[np.bool_]:
        """(N,): whether the region is the whole chunk."""
        differs = (self.lengths != self.chunk_sizes) | (self.offsets != 0)
        whole: npt.NDArray[np.bool_] = sums(self.ndims, differs.astype(np.int64)) == 0
        return whole

    @property
    def objects(self) -> list[int]:
        """The rows of objects."""
        if None not in self.dtypes:  # most often
            return []
        return [row for row, dtype in enumerate(self.dtypes) if dtype is None]

    @property
    def used_paths(self) -> list[str]:
        """The paths of the files that have a row."""
        return [self.paths[file] for file in distinct(self.files)]

    def of_files(self, paths: Collection[str]) -> Reads:
        """The rows of these files."""
        used = distinct(self.files)
        chosen = [file for file in used if self.paths[file] in paths]
        if len(chosen) == len(used):
            return self
        return self.take(np.flatnonzero(np.isin(self.files, chosen)))

    def sizes(self, column: Ints) -> list[Sizes]:
        """The rows of a ragged column."""
        values, ends = column.tolist(), np.cumsum(self.ndims).tolist()
        return [
            tuple(values[end - ndim : end])
            for end, ndim in zip(ends, self.ndims.tolist(), strict=True)
        ]

    # ---- where it goes -------------------------------------------------------------------------------

    def aim(self, targets: Sequence[torch.Tensor], cast: bool) -> None:
        """Give each row, all of tensors, its destination, which has the row's sizes.

        Raises :class:`IncompatibleStateError` if one cannot receive what was saved.
        """
        memories = local_tensors(targets)
        unusual = are_unusual(memories)
        self.targets, self.memories = list(targets), list(memories)
        is_usual = not any(unusual) and all(map(_IS_DENSE, memories))
        if not is_usual or list(map(_DTYPE, memories)) != self.dtypes:
            rows = zip(self.names, self.dtypes, targets, memories, unusual, strict=True)
            self.memories = [_memory_of(*row, cast=cast) for row in rows]

    def choose_devices(self, engine: Engine) -> None:
        """Set the devices. What the engine had better not write to takes a detour."""
        rows = [row for row, memory in enumerate(self.memories) if memory is not None]
        direct = self.made
        numbers = devices.numbers(engine, direct)
        if set(numbers) <= {HOST}:
            return
        chunk_sizes = self.sizes(self.chunk_sizes)
        for row, memory, device in zip(rows, direct, numbers, strict=True):
            if device == HOST:
                continue
            if device == THROUGH_TORCH or not _has_long_runs(memory, chunk_sizes[row]):
                self.memories[row] = None
            else:
                self.devices[row] = device

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Those of the destinations, but for tensors that torch writes to in its own way (sparse)."""
        for target, memory in zip(self.targets, self.memories, strict=True):
            if target is None:
                continue
            try:
                yield (local_tensor(target) if memory is None else memory).untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue

    def make_detours(self) -> None:
        """Make the memory of the rows that have none."""
        if type(None) not in set(map(type, self.memories)):
            return
        sizes = self.sizes(self.lengths)
        for row, memory in enumerate(self.memories):
            if memory is None:
                dtype = self.dtypes[row] or torch.uint8
                self.memories[row] = torch.empty(sizes[row], dtype=dtype, device="cpu")

    def settle(self) -> None:
        """All was read: copy what took a detour to its destination."""
        if all(map(operator.is_, self.memories, self.targets)):  # most often
            return
        for target, memory in zip(self.targets, self.memories, strict=True):
            if target is None or memory is None or memory is target:
                continue
            if memory is not local_tensor(target):
                target.detach().copy_(memory)

    @property
    def made(self) -> list[torch.Tensor]:
        """The memory that there is."""
        return [memory for memory in self.memories if memory is not None]

    def data(self, row: int) -> bytes:
        """The bytes of an object that was read."""
        memory = self.memories[row]
        return b"" if memory is None else memory.numpy().tobytes()

    def contents(self) -> dict[str, Transfer]:
        """What goes from each file to memory, by the file's relative path."""
        nelements = volumes(self.ndims, self.lengths)
        memories = self.made  # all
        addresses = list(map(_ADDRESS, memories))
        dense = np.fromiter(map(_IS_DENSE, memories), np.bool_, len(memories))
        direct = self.are_whole & dense
        found: dict[str, Transfer] = {}
        for rows in groups(self.files):
            content = found[self.paths[self.files[rows[0]]]] = Transfer()
            rows = rows[nelements[rows] > 0]
            whole = rows[direct[rows]]
            chosen = whole.tolist()
            content.add_many(
                self.begins[whole].tolist(),
                self.stored[whole].tolist(),
                [addresses[row] for row in chosen],
                [0] * len(chosen),
                [self.devices[row] for row in chosen],
            )
            self._add_regions(content, rows[~direct[rows]])
        return found

    def _add_regions(self, content: Transfer, rows: Ints) -> None:
        """Add parts of chunks, and what goes to memory that is not dense."""
        if not len(rows):
            return
        part = self.take(rows)
        ragged = part.sizes(part.chunk_sizes), part.sizes(part.offsets), part.sizes(part.lengths)
        columns = part.begins.tolist(), part.itemsizes.tolist(), part.made, part.devices
        for sizes, offsets, lengths, start, itemsize, memory, device in zip(
            *ragged, *columns, strict=True
        ):
            strides = dense_strides(sizes, itemsize)
            start += sum(map(operator.mul, offsets, strides))
            content.add_strided(
                start,
                itemsize,
                list(lengths),
                strides,
                memory.data_ptr(),
                [stride * itemsize for stride in memory.stride()],
                device=device,
            )


def _memory_of(
    name: str,
    dtype: torch.dtype | None,
    target: torch.Tensor,
    memory: torch.Tensor,
    is_unusual: bool,
    *,
    cast: bool,
) -> torch.Tensor | None:
    """``memory``, the local tensor of ``target``; None if it takes a detour.

    Raises :class:`IncompatibleStateError` if it cannot receive what was saved.
    """
    if target.dtype != dtype and not cast:
        raise IncompatibleStateError(
            f"{name!r} was saved as {dtype} and the state has {target.dtype}; load into a tensor of the saved dtype, "
            f"or pass cast=True to convert"
        )
    if is_unusual or not memory.is_contiguous():
        _check_loadable(memory, is_unusual, name)
    through_torch = is_unusual and (is_wrapper(memory) or memory.is_conj() or memory.is_neg())
    return None if memory.dtype != dtype or through_torch else memory


def _check_loadable(memory: torch.Tensor, unusual: bool, name: str) -> None:
    """Raise :class:`IncompatibleStateError` if no value can be written to this local tensor (torch quantizes it)."""
    found = without_bytes(memory) if unusual and not memory.is_quantized else None
    if found is None and not (unusual and is_wrapper(memory)):
        strides = memory.stride()
        if 0 in strides and any(
            stride == 0 and size > 1 for stride, size in zip(strides, memory.shape, strict=True)
        ):
            found = "expanded: elements share memory", "load into a clone() of it"
    if found is not None:
        raise IncompatibleStateError(f"{name!r} cannot be loaded: it is {'; '.join(found)}")


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
