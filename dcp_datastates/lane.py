"""A gloo group of the commit group's own, made anew whenever it breaks, whose waits can be left.

A gloo group in which one operation failed or timed out fails for good, and whoever waits in it waits until
gloo's timeout. So every wait here polls, and calls a ``check`` that may raise; :meth:`Lane.leave` then unblocks what
is still waiting, and the next :meth:`Lane.join` makes a group for another generation.

One thread uses a lane.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from dcp_datastates.peers import Peers

__all__ = ["Lane", "LaneBroken", "unblock"]

_RENDEZVOUS_SECONDS: Final = 20.0
"""For connecting to all ranks once all have said that they are there."""

_OPERATION_TIMEOUT: Final = timedelta(days=1)
"""Nothing is timed out by gloo: a late rank is not a lost one, and ``check`` knows the difference."""

_POLL_SECONDS: Final = (0.0002, 0.02)
"""First and longest pause between two looks at an operation."""

Check = Callable[[], None]


class LaneBroken(Exception):
    """A connection of the group failed; says nothing about who is to blame."""


class Lane:
    """A gloo group among ``peers``, by generation.

    Args:
        peers: its ranks.
        name: prefix of its keys in the store.
    """

    def __init__(self, peers: Peers, name: str) -> None:
        self._peers = peers
        self._name = name
        self._store: Any = None
        self._group: Any = None
        self._pending: Any = None
        self.generation = -1

    def join(self, generation: int, check: Check) -> None:
        """Meet the others in ``generation``, unless this lane is in it. Raises :class:`LaneBroken`."""
        if self.generation == generation and self._group is not None:
            return
        self.leave()
        self.generation = generation
        try:
            self._meet(generation, check)
            self._group = self._connect(generation)
        except (RuntimeError, dist.DistError) as error:
            raise LaneBroken(f"the ranks could not connect: {error}") from error

    def _meet(self, generation: int, check: Check) -> None:
        if self._store is None:
            self._store = self._peers.store(self._name)
        prefix = f"{self._name}/{generation}"
        self._store.set(f"{prefix}/ready/{self._peers.rank}", "")
        if self._peers.rank == 0:
            ready = [f"{prefix}/ready/{rank}" for rank in range(self._peers.world)]
            self._poll(lambda: bool(self._store.check(ready)), check)
            self._store.set(f"{prefix}/go", "")
        else:
            self._poll(lambda: bool(self._store.check([f"{prefix}/go"])), check)

    def _connect(self, generation: int) -> Any:
        # Not dist.new_group: that is a collective of the default group, and this is nobody's business
        # but this package's. The constructor waits without the GIL.
        store = self._peers.store(f"{self._name}/{generation}/gloo")
        patience = timedelta(seconds=_RENDEZVOUS_SECONDS)
        group = dist.ProcessGroupGloo(store, self._peers.rank, self._peers.world, patience)
        group.set_timeout(_OPERATION_TIMEOUT)
        return group

    def leave(self) -> None:
        """Give the group up. Returns soon, whatever the other ranks do. Idempotent."""
        group, self._group = self._group, None
        pending, self._pending = self._pending, None
        self.generation = -1
        if group is None:
            return
        if pending is not None and not pending.is_completed():
            unblock(group, self._peers.rank, self._peers.world)
            deadline = time.monotonic() + 5
            while not pending.is_completed() and time.monotonic() < deadline:
                time.sleep(0.005)

    def max(self, values: Sequence[int], check: Check) -> list[int]:
        """Elementwise maximum of 64-bit integers over all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._do(lambda group: group.allreduce([tensor], options), check)
        return [int(value) for value in tensor.tolist()]

    def gather(self, data: bytes, nbytes: int, check: Check) -> list[bytes]:
        """Every rank's ``data``, on every rank, cut or padded with zeros to ``nbytes``."""
        mine = torch.frombuffer(bytearray(data[:nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self._peers.world)]
        self._do(lambda group: group.allgather([gathered], [mine]), check)
        return [bytes(tensor.tolist()) for tensor in gathered]

    def _do(self, start: Callable[[Any], Any], check: Check) -> None:
        try:
            self._pending = work = start(self._group)
            self._poll(work.is_completed, check)
            self._pending = None
            work.wait()  # raises what it failed with; returns at once
        except RuntimeError as error:
            raise LaneBroken(str(error)) from error

    @staticmethod
    def _poll(done: Callable[[], bool], check: Check) -> None:
        pause, longest = _POLL_SECONDS
        while not done():
            check()
            time.sleep(pause)
            pause = min(longest, pause * 1.5)


def unblock(backend: Any, rank: int, world: int) -> None:
    """Make every operation that waits in a gloo ``backend`` fail now; the backend is of no use afterwards.

    ``abort`` of torch 2.13 leaves them waiting. A receive that times out does not: gloo then fails all
    pairs of the context, and with them whatever waits ("Application timeout caused pair closure").
    """
    with contextlib.suppress(RuntimeError):
        work = backend.recv([torch.zeros(1)], (rank + 1) % world, 0x7FFF)
        work.wait(timedelta(milliseconds=1))
