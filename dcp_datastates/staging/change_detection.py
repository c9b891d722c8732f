"""Deferred tensors by group, and how a change to one before its read is noticed.

Behind the step gate, which holds optimizers back, this looks for writes that slip past it: the version
counter of each tensor where it moves, and a few words of its memory. A write that moves no counter and
misses every sampled word goes unseen; so sampling is a second line, not the guarantee.

Memory that was moved, resized or freed is noticed for certain: the address and the size of each storage are
compared from before the reads to after them. Holding a storage keeps the object, and not its memory. What moves
memory under a storage from C++ (``tensor.resize_()`` to more, an ``out=`` that grows) only ever makes it larger, so
it cannot come back to where it was unseen; the rest goes through methods that the step gate holds back.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from dataclasses import dataclass

import torch

from dcp_datastates._native import sample_words
from dcp_datastates.errors import SnapshotTornError
from dcp_datastates.io.devices import HOST
from dcp_datastates.io.tensor_memory import local_tensor
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.staging.stage import DeferredTensors

__all__ = ["Portion", "Regions", "portions"]


@dataclass
class Portion:
    """The deferred tensors of one group: read, checked and let go together."""

    group: int
    deferred: DeferredTensors
    """Of this group only."""
    seed: int
    settled: bool = False
    """Was whole when all was read; or (on a device) when the first gate let go, behind whose streams all is read.
    What it holds may change from then on.
    """
    read: bool = False
    """All was read, as the host has seen, from the memory that was there before. That may move from then on."""

    def __post_init__(self) -> None:
        locals_ = self.deferred.columns.locals
        self.on_device = set(self.deferred.devices) != {HOST}
        """Whether the gate holds streams, and not only the host."""
        # A word of a device's memory cannot be had without waiting for it.
        self._sizes = self.deferred.sizes
        if self.on_device:
            self._sizes = [
                size if device == HOST else 0
                for size, device in zip(self.deferred.sizes, self.deferred.devices, strict=True)
            ]
        try:
            self._versions = [tensor._version for tensor in locals_]
        except RuntimeError:  # an inference tensor among them
            self._versions = list(map(_version, locals_))
        self._samples = sample_words(self.deferred.addresses, self._sizes, self.seed)
        self._storages: dict[torch.UntypedStorage, None] | None = None
        self._memory: list[tuple[int, int]] = []  # of each storage, once pin() was called

    @property
    def storages(self) -> dict[torch.UntypedStorage, None]:
        """Of its tensors, kept from the first look on. They compare by identity: torch keeps one object for each."""
        if self._storages is None:
            locals_ = self.deferred.columns.locals
            self._storages = dict.fromkeys(map(torch.Tensor.untyped_storage, locals_))
        return self._storages

    def pin(self) -> None:
        """Before the reads: note where the memory is.

        Raises :class:`SnapshotTornError` if a tensor has other memory now than at the call, so that the planner
        may have resolved the wrong bytes.
        """
        self._memory = self._look()  # first: from here on, no storage can go
        columns = self.deferred.columns
        moved = list(
            map(operator.ne, map(torch.Tensor.data_ptr, columns.locals), self.deferred.addresses)
        )
        for position, tensor in enumerate(columns.tensors):
            local = columns.locals[position]
            if tensor is not local and local_tensor(tensor) is not local:
                moved[position] = True
        if True in moved:
            raise _moved(columns.name(moved.index(True)))

    def check_memory(self) -> None:
        """After the reads: raise :class:`SnapshotTornError` if the memory was not there all the time.

        Another thread may find that it was, and let it move, meanwhile: hence ``read`` is looked at last. (So is
        ``settled`` by :meth:`check`.)
        """
        memory = self._look()
        if memory == self._memory or self.read:
            return
        pairs = zip(self.storages, memory, self._memory, strict=True)
        moved = {storage for storage, now, before in pairs if now != before}
        columns = self.deferred.columns
        of = list(map(torch.Tensor.untyped_storage, columns.locals))
        raise _moved(columns.name(next((i for i, one in enumerate(of) if one in moved), 0)))

    def _look(self) -> list[tuple[int, int]]:
        storages = self.storages
        kind = torch.UntypedStorage
        return list(zip(map(kind.data_ptr, storages), map(kind.nbytes, storages), strict=True))

    def check(self) -> None:
        """Raise :class:`SnapshotTornError` if a tensor does not hold what it held when this was made, unless it may."""
        # The memory may go at any moment, by the hand of a thread that holds no lock of Python's.
        samples = sample_words(self.deferred.addresses, self._sizes, self.seed, guarded=True)
        versions = list(map(_version, self.deferred.columns.locals))
        if (samples == self._samples and versions == self._versions) or self.settled:
            return
        torn = [
            position
            for position, (then, now) in enumerate(
                zip(
                    zip(self._samples, self._versions, strict=True),
                    zip(samples, versions, strict=True),
                    strict=True,
                )
            )
            if then != now
        ]
        raise SnapshotTornError(
            f"{len(torn)} deferred tensor(s) changed before they were read, "
            f"{self.deferred.columns.name(torn[0])!r} first: something other than a known optimizer's "
            f"step() writes to them. Wait for writer.captured before such writes, or use "
            f'defer="none"'
        )


def portions(deferred: DeferredTensors, seed: int) -> list[Portion]:
    """One portion per group."""
    groups = set(deferred.groups)
    if len(groups) <= 1:
        return [Portion(group, deferred, seed) for group in groups]
    return [
        Portion(group, deferred.where([other == group for other in deferred.groups]), seed)
        for group in groups
    ]


def _moved(name: str) -> SnapshotTornError:
    return SnapshotTornError(
        f"the memory of deferred tensor {name!r} was replaced, resized or freed before it was read (tensor.data = …, "
        f'resize_()); wait for writer.captured before that, or use defer="none"'
    )


class Regions:
    """Looks up which deferred memory, if any, a resolved tensor's bytes lie in."""

    def __init__(self, deferred: DeferredTensors) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._groups: list[int] = []
        spans = sorted(
            (address, address + _span(tensor), group)
            for address, tensor, group in zip(
                deferred.addresses, deferred.columns.locals, deferred.groups, strict=True
            )
        )
        for start, end, group in spans:
            if self._ends and start < self._ends[-1]:  # one storage, hence one group
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
                self._groups.append(group)

    def group_of(self, address: int, nbytes: int) -> int:
        """The group whose gate covers these bytes; ``STABLE`` if none is needed."""
        position = bisect_left(self._starts, address + max(nbytes, 1)) - 1
        if position >= 0 and address < self._ends[position]:
            return self._groups[position]
        return STABLE


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    extent = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (extent + 1) * tensor.element_size()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
