"""A gloo group of the commit group's own, made anew whenever it breaks, whose waits can be left.

A gloo group in which one operation failed or timed out fails for good, and whoever waits in it waits until
gloo's timeout. So every wait here polls, and calls a ``check`` that may raise; :meth:`Lane.leave` then unblocks what
is still waiting, and the next :meth:`Lane.join` makes a group for another generation.

One thread uses a lane.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from dcp_datastates.commit.peers import Connection, Peers
from dcp_datastates.forks import ProcessLock, after_fork

__all__ = ["Lane", "LaneBroken", "abandoned", "let_go", "meet", "poll"]

logger = logging.getLogger(__name__)

_RENDEZVOUS_SECONDS: Final = 20.0
"""For connecting to all ranks once all have said that they are there."""

_OPERATION_TIMEOUT: Final = timedelta(days=1)
"""Nothing is timed out by gloo: a late rank is not a lost one, and ``check`` knows the difference."""

_FIRST_PAUSE: Final = 0.0002
_OPERATION_PAUSE: Final = 0.02
"""Longest pause between two looks at an operation of gloo's, in seconds."""

_STORE_PAUSE: Final = 0.1
"""The same for a key in the store: every rank asks one server."""

_LOOK_SECONDS: Final = 0.5
"""Between two looks whether others have given the group up."""

_LETTING_GO_SECONDS: Final = 5.0
"""How long an operation may take to end once its connections have failed."""

_UNUSED_TAG: Final = 0x7FFF
"""No collective uses it."""

_abandoned_lock = ProcessLock()  # guards _abandoned
_abandoned: list[tuple[Any, Any]] = []

Check = Callable[[], None]


class LaneBroken(Exception):
    """A connection of the group failed; says nothing about who is to blame."""


class Lane:
    """A gloo group among ``peers``, made when first needed and anew after :meth:`leave`.

    Each such group is a *generation*, counted in the store; whoever leaves one makes all others leave
    it too, with :class:`LaneBroken`, and meet in the next. No generation is met in twice.

    Args:
        peers: its ranks.
        name: prefix of its keys in the store.
    """

    def __init__(self, peers: Peers, name: str) -> None:
        self._peers = peers
        self._name = name
        self._store: Connection | None = None
        self._group: Any = None
        self._pending: Any = None
        self._generation = 0
        self._looked = 0.0

    def join(self, check: Check) -> bool:
        """Meet the others, unless that is done. Returns whether they met now. Raises :class:`LaneBroken`."""
        if self._group is not None:
            return False
        try:
            if self._store is None:
                self._store = self._peers.connect(self._name)
            self._generation = max(self._generation, self._newest())
            meet(self._store, str(self._generation), self._peers, lambda: self._check(check))
            self._group = self._connect()
        except (RuntimeError, dist.DistError) as error:
            self.leave()
            raise LaneBroken(f"the ranks could not connect: {error}") from error
        return True

    def leave(self) -> None:
        """Give this generation up, for all. Returns soon, whatever the other ranks do."""
        group, self._group = self._group, None
        pending, self._pending = self._pending, None
        if group is not None and pending is not None:
            let_go(group, pending, self._peers)
        if self._store is not None:
            was, self._generation = self._generation, self._generation + 1
            with contextlib.suppress(Exception):  # without a store, there is no next generation
                self._store.compare_set("generation", str(was) if was else "", str(was + 1))

    def close(self) -> None:
        """Let go of the group at the end of this process's part in it, when the store may be gone already."""
        self._store = None
        self.leave()

    def max(self, values: Sequence[int], check: Check) -> list[int]:
        """Elementwise maximum of 64-bit integers over all ranks. :meth:`join` comes first.

        Raises :class:`LaneBroken`, or what ``check`` raises: then :meth:`leave` comes next.
        """
        tensor = torch.tensor(values, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._do(lambda group: group.allreduce([tensor], options), check)
        return [int(value) for value in tensor.tolist()]

    def gather(self, data: bytes, nbytes: int, check: Check) -> list[bytes]:
        """Every rank's ``data``, on every rank, cut or padded with zeros to ``nbytes``. As :meth:`max`."""
        mine = torch.frombuffer(bytearray(data[:nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self._peers.world)]
        self._do(lambda group: group.allgather([gathered], [mine]), check)
        return [bytes(tensor.tolist()) for tensor in gathered]

    def _do(self, start: Callable[[Any], Any], check: Check) -> None:
        try:
            self._pending = work = start(self._group)
            poll(work.is_completed, lambda: self._check(check), _OPERATION_PAUSE)
            self._pending = None
            work.wait()  # raises what it failed with; returns at once
        except RuntimeError as error:
            raise LaneBroken(str(error)) from error

    def _check(self, check: Check) -> None:
        check()
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            if self._newest() > self._generation:
                raise LaneBroken("another rank has given this group up")

    def _newest(self) -> int:
        assert self._store is not None, "join() comes first"
        try:
            found = self._store.get("generation") if self._store.check(["generation"]) else b"0"
        except RuntimeError as error:
            raise LaneBroken(f"the store fails: {error}") from error
        return int(found)

    def _connect(self) -> Any:
        # Not dist.new_group: that is a collective of the default group, and this is nobody's business
        # but this package's. The constructor waits without the GIL.
        store = self._peers.raw_store(f"{self._name}/{self._generation}/gloo")
        patience = timedelta(seconds=_RENDEZVOUS_SECONDS)
        group = dist.ProcessGroupGloo(store, self._peers.rank, self._peers.world, patience)
        group.set_timeout(_OPERATION_TIMEOUT)
        return group


def poll(done: Callable[[], bool], check: Check, longest: float) -> None:
    """Return when ``done()``; calls ``check()`` between two looks, which grow to ``longest`` seconds apart."""
    pause = _FIRST_PAUSE
    while not done():
        check()
        time.sleep(pause)
        pause = min(longest, pause * 1.5)


def meet(store: Connection, place: str, peers: Peers, check: Check) -> None:
    """Return when every rank has come to ``place``; the first looks for all, the others for its word."""
    store.set(f"{place}/ready/{peers.rank}", "")
    if peers.rank == 0:
        ready = [f"{place}/ready/{rank}" for rank in range(peers.world)]
        poll(lambda: bool(store.check(ready)), check, _STORE_PAUSE)
        store.set(f"{place}/go", "")
    else:
        poll(lambda: bool(store.check([f"{place}/go"])), check, _STORE_PAUSE)


def let_go(backend: Any, pending: Any, peers: Peers) -> None:
    """End the operation ``pending`` in a gloo ``backend`` that is of no use any more, within seconds.

    If it does not end, the backend is kept until it does: its destructor would wait. See :func:`abandoned`.
    """
    abandoned()
    if pending.is_completed():
        return
    _unblock(backend, peers.rank, peers.world)
    deadline = time.monotonic() + _LETTING_GO_SECONDS
    while not pending.is_completed():
        if time.monotonic() > deadline:
            logger.warning("an operation of gloo's does not end; its group stays until it does")
            with _abandoned_lock:
                _abandoned.append((backend, pending))
            return
        time.sleep(0.005)


def abandoned() -> int:
    """How many gloo backends are kept because an operation of theirs does not end.

    Gloo of torch 2.13 forgets a send that it starts on hearing that the other side is ready, if it finds the
    connection closed just then: seen where a rank was stopped for a while. It ends by its timeout alone.
    """
    with _abandoned_lock:
        _abandoned[:] = [kept for kept in _abandoned if not kept[1].is_completed()]
        return len(_abandoned)


def _keep_abandoned() -> None:
    for backend, pending in _abandoned:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pending))


@after_fork
def _forget_in_child() -> None:
    _keep_abandoned()  # their destructors would wait for threads of the parent's
    _abandoned.clear()


atexit.register(_keep_abandoned)  # at the end of the interpreter, nobody may wait for them


def _unblock(backend: Any, rank: int, world: int) -> None:
    """Make every operation that waits in a gloo ``backend`` fail now; the backend is of no use afterwards.

    ``abort`` of torch 2.13 leaves them waiting. A receive that times out does not: gloo then fails all
    pairs of the context, and with them whatever waits ("Application timeout caused pair closure"). It
    takes a pair that is whole; one that is not fails the receive at once, for another reason.
    """
    for offset in range(1, world):
        try:
            work = backend.recv([torch.zeros(1)], (rank + offset) % world, _UNUSED_TAG)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return
