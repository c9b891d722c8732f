"""Change detection: groups of deferred tensors, and checks that none changed before it was read.

The step gate holds optimizers back. This module detects writes that bypass the gate: it compares each tensor's version
counter, and a few sampled words of its memory. A write that changes neither the counter nor a sampled word goes
undetected, so sampling is a second line of defence, not the guarantee.

Memory that was moved, resized or freed is always detected: the address and size of each storage are compared before and
after the reads. (A reference to a storage keeps the object alive, not its memory.) C++ code that moves a storage's
memory (``tensor.resize_()`` to a larger size, an ``out=`` that grows) only ever enlarges it, so a move cannot be undone
unseen; all other moves go through methods that the step gate holds back.
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
    """The deferred tensors of one group, which are read, checked and released together."""

    group: int
    deferred: DeferredTensors
    """The tensors of this group only."""
    seed: int
    settled: bool = False
    """The tensors were unchanged when all reads were done; or, on a device, when the first gate let an optimizer pass,
    whose stream waits for the reads. From then on the tensors may change.
    """
    read: bool = False
    """The host has seen all reads end, from unmoved memory. From then on the memory may move."""

    def __post_init__(self) -> None:
        locals_ = self.deferred.columns.locals
        self.on_device = set(self.deferred.devices) != {HOST}
        """Whether the gate must hold streams, and not only the host."""
        # Sampling a word of a device's memory would wait for the device.
        self._sizes = self.deferred.sizes
        if self.on_device:
            self._sizes = [
                size if device == HOST else 0
                for size, device in zip(self.deferred.sizes, self.deferred.devices, strict=True)
            ]
        try:
            self._versions = [tensor._version for tensor in locals_]
        except RuntimeError:  # one of them is an inference tensor
            self._versions = list(map(_version, locals_))
        self._samples = sample_words(self.deferred.addresses, self._sizes, self.seed)
        self._storages: dict[torch.UntypedStorage, None] | None = None
        self._memory: list[tuple[int, int]] = []  # address and size of each storage, set by pin()

    @property
    def storages(self) -> dict[torch.UntypedStorage, None]:
        """The tensors' storages, cached. They compare by identity: torch keeps one object per storage."""
        if self._storages is None:
            locals_ = self.deferred.columns.locals
            self._storages = dict.fromkeys(map(torch.Tensor.untyped_storage, locals_))
        return self._storages

    def pin(self) -> None:
        """Before the reads: note the address and size of each storage.

        Raises :class:`SnapshotTornError` if a tensor's memory is not that of the call: the planner may have resolved
        the wrong bytes.
        """
        self._memory = self._look()  # first: this keeps the storages alive
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
        """After the reads: raise :class:`SnapshotTornError` if the memory has moved since :meth:`pin`.

        Read the flag ``read`` last: another thread may complete this check meanwhile, and let the memory move. (For the
        same reason :meth:`check` reads ``settled`` last.)
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
        """Raise :class:`SnapshotTornError` if a tensor has changed since construction and is not ``settled``."""
        # A thread without the GIL may free the memory at any moment.
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
            if self._ends and start < self._ends[-1]:  # views of one storage, hence of one group
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
