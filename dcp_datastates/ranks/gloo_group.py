"""One small gloo group, private to this package, whose waits can be interrupted.

Once one operation of a gloo group has failed or timed out, the group is unusable, and a rank that waits in it waits
until gloo's timeout. So every wait here calls a ``check`` that may raise; :meth:`GlooGroup.leave` then makes the
pending operations fail. Groups are never repaired: ``gloo_tree.py`` makes a new one under a name that was never used.

In gloo's constructor a rank waits for connections from all others, up to a timeout. So the ranks meet
(``meetings.py``) before they enter it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from dcp_datastates.ranks.connection import Connection, pauses
from dcp_datastates.ranks.meetings import Check, poll

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT: Final = timedelta(seconds=20)
"""Limit for connecting. The ranks have met before."""

_OPERATION_TIMEOUT: Final = timedelta(days=1)
"""gloo must not time out: a late rank is not a lost rank, and ``check`` knows the difference."""

_LETTING_GO_SECONDS: Final = 5.0
"""How long an operation may take to end once its connections have failed."""

_UNUSED_TAG: Final = 0x7FFF
"""A message tag that no collective uses."""

abandoned: Final[list[Any]] = []
"""The backends that are kept, because one of their operations does not end, until the process ends.

When the other side reports that it is ready, gloo starts a send. If the connection is closed at that moment, gloo of
torch 2.13 loses the send, which then ends only by its timeout. This was seen after a rank had been stopped for a while.
"""

_alive: weakref.WeakSet[GlooGroup] = weakref.WeakSet()


@dataclass(frozen=True)
class Place:
    """A rank's place in one group of the tree, which has this ``name`` in it. The group's leader has the ``rank`` 0."""

    name: str
    rank: int
    size: int


class GroupBroken(Exception):
    """A connection of the group failed; this does not say which rank is at fault."""


@contextlib.contextmanager
def _said_as_broken(what: str) -> Iterator[None]:
    """Turn torch's errors into :class:`GroupBroken`. Never wrap a call of ``check``: it may raise RuntimeError, too."""
    try:
        yield
    except RuntimeError as error:  # includes the errors of torch.distributed
        raise GroupBroken(f"{what}: {error}") from error


class Rendezvous(dist.Store):  # type: ignore[name-defined,misc]
    """The job's store as gloo sees it, for one group. It has the methods that ``ProcessGroupGloo`` of torch 2.11 to
    2.15 calls.

    Args:
        name: the group's name, never used before.
        world: how many ranks it has.
        check: called while waiting for the other ranks' addresses; it raises to end the wait.
    """

    def __init__(self, store: Connection, name: str, world: int, check: Check) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._world = world
        self._check = check
        self._found: dict[str, bytes] = {}
        self.keys: list[str] = []
        """The keys that this rank has written. They are not needed once all ranks are connected."""
        self.error: BaseException | None = None  # gloo may raise it as another type

    def set(self, key: str, value: Any) -> None:
        self.keys.append(self._key(key))
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._noting_errors():
            self._store.set(self._key(key), data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._found[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._noting_errors():
            return self._store.check(list(map(self._key, keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            if key in self._found:
                continue
            before = key.rpartition("/")[0]
            alike = [f"{before}/{rank}" for rank in range(self._world)]
            wanted = alike if key in alike else [key]  # gloo wants each rank's: one request for all
            with self._noting_errors():
                poll(lambda wanted=wanted: self.check(wanted), self._check, self._world)  # type: ignore[misc]
                values = self._store.multi_get(list(map(self._key, wanted)))
            self._found.update(zip(wanted, values, strict=True))

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            raise


class GlooGroup:
    """A gloo group. Construction is collective: every rank of the group takes part. Only one thread uses it.

    The operations raise :class:`GroupBroken`, or what their ``check`` raises. The caller must then call :meth:`leave`.

    Args:
        place: this rank's.
        rendezvous: the store at which the ranks find each other.
        plain_store: makes a c10d store under the group's own prefix, in case a release of torch asks for more than
            ``rendezvous`` offers.
        address: returns this machine's address for the other ranks. Raises OSError if it is not known: then it is
            gloo's default, that of the machine's name.

    Raises :class:`GroupBroken`, and what the rendezvous' ``check`` raises.
    """

    def __init__(
        self,
        place: Place,
        rendezvous: Rendezvous,
        plain_store: Callable[[], Any],
        address: Callable[[], str],
    ) -> None:
        self._place = place
        self._pending: Any = None
        _alive.add(self)

        def connected(store: Any) -> Any:
            # Not dist.new_group, which is a collective of the job's default group. This waits without the GIL.
            gloo = dist.ProcessGroupGloo(store, place.rank, place.size, _options_at(address))
            gloo.set_timeout(_OPERATION_TIMEOUT)
            return gloo

        # The caller holds the rendezvous until this returns: C++ does not keep the Python object alive.
        try:
            self._gloo = connected(rendezvous)
        except Exception as error:
            if isinstance(rendezvous.error, RuntimeError):
                raise GroupBroken(f"the store fails: {rendezvous.error}") from error
            if rendezvous.error is not None:
                raise rendezvous.error from None
            # Has gloo called a method that the rendezvous lacks? Then it did on every rank.
            if not ("pure virtual" in str(error) or "NotImplementedError" in str(error)):
                raise GroupBroken(f"the ranks could not connect: {error}") from error
            logger.info("gloo meets by torch's own rendezvous: %s", error)
            with _said_as_broken("the ranks could not connect"):
                self._gloo = connected(plain_store())

    def leave(self) -> None:
        """Close the connections, so that the other ranks' operations fail. Returns soon. No other call may follow."""
        gloo, self._gloo = self._gloo, None
        pending, self._pending = self._pending, None
        if gloo is not None:
            # Not left to the destructor: a traceback's frames may keep the group alive.
            _unblock(gloo, self._place)
            if pending is not None:
                let_go(gloo, pending)

    def broadcast(self, data: bytes, check: Check) -> bytes:
        """Rank 0's bytes."""
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        self._do(lambda gloo: gloo.broadcast([size], dist.BroadcastOptions()), check)
        content = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if len(content):
            content.numpy()[: len(data)] = bytearray(data)
            self._do(lambda gloo: gloo.broadcast([content], dist.BroadcastOptions()), check)
        return content.numpy().tobytes()

    def gather(self, data: bytes, check: Check) -> bytes:
        """All ranks' bytes on rank 0, one after another; elsewhere nothing."""
        leads, size = self._place.rank == 0, self._place.size
        mine = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        sizes = [torch.empty_like(mine) for _ in range(size)] if leads else []
        # Each rank sends one message; gloo's all-reduce is a ring.
        everyone = [sizes] if leads else []
        self._do(lambda gloo: gloo.gather(everyone, [mine], dist.GatherOptions()), check)
        # Rank 0 does not send its own bytes.
        coming = [0, *map(int, sizes[1:])] if leads else [0] * size
        going = [0 if leads else len(data)] + [0] * (size - 1)
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if going[0] else _EMPTY
        got = torch.empty(sum(coming), dtype=torch.uint8, device="cpu")
        self._do(lambda gloo: gloo.alltoall_base(got, sent, coming, going), check)
        return data + got.numpy().tobytes() if leads else b""

    def _do(self, start: Callable[[Any], Any], check: Check) -> None:
        gloo = self._gloo
        if gloo is None:
            raise GroupBroken("these connections were given up")
        with _said_as_broken("gloo"):
            self._pending = work = start(gloo)
        del gloo  # a traceback may retain this frame
        try:
            pause = pauses(1)
            while not _ended(work, next(pause)):
                check()
            self._pending = None
            with _said_as_broken("gloo"):
                work.wait()  # returns immediately; raises the operation's error
        finally:
            del work  # it holds the group, and a traceback may retain this frame


def _options_at(address: Callable[[], str]) -> Any:
    """Options of a gloo group that listens at ``address``; of one with gloo's defaults, its timeout alone.

    The user's choice counts: with ``GLOO_SOCKET_IFNAME``, gloo takes the address of that interface.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return _CONNECT_TIMEOUT
    gloo: Any = dist.ProcessGroupGloo
    try:
        options = gloo._Options()
        options._timeout = _CONNECT_TIMEOUT
        options._devices = [gloo.create_device(hostname=address())]
    except Exception as error:  # an unknown address, or another release of torch
        logger.info("gloo chooses its address: %s", error)
        return _CONNECT_TIMEOUT
    return options


_EMPTY: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


def _ended(work: Any, seconds: float) -> bool:
    """Wait up to ``seconds`` for ``work`` to end, without the GIL. Does not raise the operation's error."""
    if not work.is_completed():
        with contextlib.suppress(RuntimeError):  # not yet
            work.wait(timedelta(seconds=seconds))
    return bool(work.is_completed())


def let_go(backend: Any, pending: Any) -> None:
    """Return when the operation ``pending`` has ended in a gloo ``backend`` whose connections are closed.

    If the operation does not end in time, keep the backend for good: the destructor would wait (:data:`abandoned`).
    """
    deadline = time.monotonic() + _LETTING_GO_SECONDS
    while not pending.is_completed():
        if time.monotonic() > deadline:
            logger.warning("an operation of gloo's does not end; its group stays")
            abandoned.append(backend)
            _keep([backend, pending])
            return
        time.sleep(0.005)


def _keep(objects: Iterable[Any]) -> None:
    """Never call the destructors of ``objects``, not even at the end of the process."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


# In a child, the destructors would wait for the parent's threads.
os.register_at_fork(after_in_child=lambda: _keep(_alive))


def _unblock(backend: Any, place: Place) -> None:
    """Make every pending operation of a gloo ``backend`` fail now; the backend is unusable afterwards.

    ``abort`` of torch 2.13 leaves operations waiting. A receive that times out does not: gloo then closes all pairs of
    the context, and every pending operation fails ("Application timeout caused pair closure"). This needs an intact
    pair; on a broken pair the receive fails immediately, for another reason.
    """
    unused = torch.zeros(1, dtype=torch.uint8, device="cpu")
    for other in {*range(place.size)} - {place.rank}:
        try:
            work = backend.recv([unused], other, _UNUSED_TAG)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return
