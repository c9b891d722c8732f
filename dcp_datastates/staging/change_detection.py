"""Change detection: groups of deferred tensors, and checks that none changed before it was read.

The step gate holds optimizers back. This module detects writes that bypass the gate:

* A write that torch knows of moves a version counter. Each tensor has a counter, and what is an in-place write to a
  DTensor moves only the DTensor's, not that of its local tensor. So the counters of all tensors over the memory count:
  those of the state, those of the optimizer, and all their layers.
* Torch increments the counter after the write. So the counters are compared again when no operation that was running at
  the end of the reads can still be running (:mod:`dcp_datastates.io.running_calls`).
* A write that torch does not know of (through ``.data``, by numpy, another process) shows only in the bytes: the engine
  compares what it has copied with words of the call (:mod:`dcp_datastates.staging.stage`).

Memory that was moved, resized or freed is always detected: the address and size of each storage are compared before and
after the reads. (A reference to a storage keeps the object alive, not its memory.) C++ code that moves a storage's
memory (``tensor.resize_()`` to a larger size, an ``out=`` that grows) only ever enlarges it, so a move cannot be undone
unseen; all other moves go through methods that the step gate holds back.
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Final

import torch

from dcp_datastates._native import SaveJob
from dcp_datastates.errors import SnapshotTornError
from dcp_datastates.io.devices import HOST
from dcp_datastates.io.running_calls import Places, RunningCalls
from dcp_datastates.io.tensor_memory import inner_tensors, layers, local_tensor
from dcp_datastates.process.waiting import Wait
from dcp_datastates.staging.ownership import STABLE, Ownership
from dcp_datastates.staging.staged_state import DeferredTensors, StagedState

_LOOK_SECONDS: Final = 0.001
"""How often a thread that waits for other threads' calls looks at them."""

_VERSION: Final = operator.attrgetter("_version")

_WAYS_OUT: Final = (
    'Wait for writer.captured before such writes, or use reads="blocking". Usual causes: clipping or averaging of '
    "weights outside of optimizer.step() (p.data.clamp_(), weights of an average that are swapped in), an optimizer "
    "around another one (SAM), load_state_dict(). audit=True finds every such write"
)


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # one of them is an inference tensor
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass
class Portion:
    """The deferred tensors of one group, which are read, checked and released together."""

    group: int
    deferred: DeferredTensors
    """The tensors of this group only."""
    ownership: Ownership
    wrappers: Sequence[torch.Tensor] = ()
    """The wrappers of the state, whose parts are among all deferred tensors."""
    settled: bool = False
    """The tensors were unchanged when all reads were done; or, on a device, when the first gate let an optimizer pass,
    whose stream waits for the reads. From then on the tensors may change.
    """
    read: bool = False
    """The host has seen all reads end, from unmoved memory. From then on the memory may move."""

    def __post_init__(self) -> None:
        self.on_device = set(self.deferred.devices) != {HOST}
        """Whether the gate must hold streams, and not only the host."""
        self.storages = dict.fromkeys(self.deferred.storages)
        """The tensors' storages. They compare by identity: torch keeps one object per storage."""
        columns = self.deferred.columns
        watched = columns.locals + self.ownership.tensors_over(self.storages)
        if set(map(type, columns.tensors)) != {torch.Tensor}:
            watched += [tensor for tensor in columns.tensors if type(tensor) is not torch.Tensor]
        for wrapper in self.wrappers:
            if any(inner.untyped_storage() in self.storages for inner in inner_tensors(wrapper)):
                watched += layers(wrapper)
        self._watched = watched
        """The tensors through which torch may write to the memory."""
        self._versions = _versions(self._watched)
        self._memory: list[tuple[int, int]] = []  # address and size of each storage, set by pin()

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
            raise self._moved(columns.name(moved.index(True)))

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
        of = self.deferred.storages
        raise self._moved(columns.name(next((i for i, one in enumerate(of) if one in moved), 0)))

    def _look(self) -> list[tuple[int, int]]:
        storages = self.storages
        kind = torch.UntypedStorage
        return list(zip(map(kind.data_ptr, storages), map(kind.nbytes, storages), strict=True))

    def check(self) -> None:
        """Raise :class:`SnapshotTornError` if torch has written to a tensor since construction and the portion is not
        ``settled``.
        """
        versions = _versions(self._watched)
        if versions == self._versions or self.settled:
            return
        moved = compress(self._watched, map(operator.ne, versions, self._versions))
        names = list(dict.fromkeys(map(self._name_over, moved)))
        raise self._torn(
            f"{len(names)} deferred tensor(s) changed before they were read, {names[0]!r} first: something other than "
            f"a known optimizer's step() writes to them. {_WAYS_OUT}"
        )

    def check_when_quiet(self, idle: Places, waiting: Wait) -> None:
        """:meth:`check` now, and again once all calls of other threads have returned that run now: torch increments the
        counter of a tensor after it has written to it. Threads that sleep where they were (``idle``) do not count.

        Raises what ``waiting`` raises if such a call does not return.
        """
        self.check()
        running = RunningCalls(idle)
        while not (running.ended() or self.settled):
            time.sleep(_LOOK_SECONDS)
            waiting.look("calls of other threads to return, which may write to what was read")
        self.check()

    def _name_over(self, tensor: torch.Tensor) -> str:
        """The name of a deferred tensor that had its memory in common with ``tensor`` at the call."""
        columns = self.deferred.columns
        for number, (given, local) in enumerate(zip(columns.tensors, columns.locals, strict=True)):
            if tensor is given or tensor is local:
                return columns.name(number)
        over = self.ownership.storages_under(tensor)
        over = over or {inner.untyped_storage() for inner in inner_tensors(tensor)}
        numbers = (n for n, storage in enumerate(self.deferred.storages) if storage in over)
        return columns.name(next(numbers, 0))

    def _moved(self, name: str) -> SnapshotTornError:
        return self._torn(
            f"the memory of deferred tensor {name!r} was replaced, resized or freed before it was read "
            f'(tensor.data = …, resize_()); wait for writer.captured before that, or use reads="blocking"'
        )

    def _torn(self, message: str) -> SnapshotTornError:
        self.ownership.stop_deferring(self.group)
        return SnapshotTornError(message)


def portions(staged: StagedState) -> list[Portion]:
    """One portion per group."""
    deferred, ownership, wrappers = staged.deferred, staged.ownership, staged.traversal.wrappers
    made = []
    for group in (groups := set(deferred.groups)):
        of_group = deferred
        if len(groups) > 1:  # most often there is one: no copies of the columns
            of_group = deferred.where([each == group for each in deferred.groups])
        made.append(Portion(group, of_group, ownership, wrappers))
    return made


def raise_change(job: SaveJob, portion: Portion, staged: StagedState) -> None:
    """Raise :class:`SnapshotTornError` with the tensor's name if that is what ``job`` has failed for."""
    assert job.fault is not None
    if job.fault.kind == "lost":
        portion.check_memory()
    if job.fault.kind != "torn" or job.difference is None:
        return
    portion.check()  # it knows which write torch has seen
    number, begin, end = job.difference
    staged.ownership.stop_deferring(staged.deferred.groups[number])
    raise SnapshotTornError(
        f"deferred tensor {staged.deferred.columns.name(number)!r} changed before it was read: of its "
        f"{staged.deferred.sizes[number]} bytes, some in [{begin}, {end}) are not those at the call, and no version "
        f"counter of torch has moved (p.data, numpy, another process). {_WAYS_OUT}"
    )


class Regions:
    """Looks up which deferred memory, if any, a resolved tensor's bytes lie in."""

    def __init__(self, deferred: DeferredTensors) -> None:
        # Deferred tensors are contiguous. Those that overlap are views of one storage, hence of one group.
        spans = sorted(zip(deferred.addresses, deferred.sizes, deferred.groups, strict=True))
        self._starts = [start for start, _, _ in spans]
        self._ends = list(accumulate([start + nbytes for start, nbytes, _ in spans], max))
        self._groups = [group for _, _, group in spans]

    def group_of(self, address: int, nbytes: int) -> int:
        """The group whose gate covers these bytes; ``STABLE`` if none is needed."""
        position = bisect_left(self._starts, address + max(nbytes, 1)) - 1
        if position >= 0 and address < self._ends[position]:
            return self._groups[position]
        return STABLE
