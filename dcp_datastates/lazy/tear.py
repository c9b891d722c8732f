"""Deferred tensors by group, and how a change to one before its read is noticed.

Behind the step gate, which holds optimizers back, this looks for writes that slip past it: the version
counter of each tensor where it moves, and a few words of its memory. A write that moves no counter and
misses every sampled word goes unseen; so sampling is a second line, not the guarantee.
"""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left
from dataclasses import dataclass, field

import torch

from dcp_datastates._native import sample_words
from dcp_datastates.errors import SnapshotTornError
from dcp_datastates.lazy.capture import DeferredTensors
from dcp_datastates.lazy.devices import HOST
from dcp_datastates.lazy.ownership import STABLE, local_tensor

__all__ = ["Portion", "Regions", "check_memory", "portions"]


@dataclass
class Portion:
    """The deferred tensors of one group: read, checked and let go together."""

    group: int
    deferred: DeferredTensors
    """Of this group only."""
    seed: int
    settled: bool = False
    """Was whole when all was read; or (on a device) when the first gate let go, behind whose streams all is read."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards ``settled``: the first to need the group's reads (DCP's thread or a gate) checks them."""

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
        self._samples = self._sample()

    def check(self) -> None:
        """Raise :class:`SnapshotTornError` if a tensor is not what it was when this was made."""
        samples = self._sample()
        versions = list(map(_version, self.deferred.columns.locals))
        if samples == self._samples and versions == self._versions:
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

    def _sample(self) -> list[int]:
        return sample_words(self.deferred.addresses, self._sizes, self.seed)


def portions(deferred: DeferredTensors, seed: int) -> list[Portion]:
    """One portion per group."""
    groups = set(deferred.groups)
    if len(groups) <= 1:
        return [Portion(group, deferred, seed) for group in groups]
    return [
        Portion(group, deferred.where([other == group for other in deferred.groups]), seed)
        for group in groups
    ]


def check_memory(deferred: DeferredTensors) -> list[torch.UntypedStorage]:
    """The storages of the deferred tensors, to be kept until they have been read.

    Raises :class:`SnapshotTornError` if a tensor has other memory now than at the capture, so that the
    planner may have resolved the wrong bytes.
    """
    columns = deferred.columns
    # First: from here on, none can go.
    keep = list(map(torch.Tensor.untyped_storage, columns.locals))
    moved = list(map(operator.ne, map(torch.Tensor.data_ptr, columns.locals), deferred.addresses))
    for position, tensor in enumerate(columns.tensors):
        local = columns.locals[position]
        if tensor is not local and local_tensor(tensor) is not local:
            moved[position] = True
    if True in moved:
        raise SnapshotTornError(
            f"the memory of deferred tensor {columns.name(moved.index(True))!r} was replaced "
            f"(tensor.data = …) before it was read; wait for writer.captured before that, or use "
            f'defer="none"'
        )
    return keep


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
