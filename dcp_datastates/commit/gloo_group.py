"""One small gloo group of this package's own, whose waits can be left.

A gloo group in which one operation failed or timed out fails for good, and a rank that waits in it waits until
gloo's timeout. So every wait here calls a ``check`` that may raise, and :meth:`GlooGroup.leave` then unblocks what is
still waiting. Groups are never mended: a new one is made under a name that was never used (``gloo_tree.py``).

It is made without torch's rendezvous, in which each of N ranks asks the store twice for each other: a rank publishes
all that gloo wants published under one key, and reads what the others have published by one request.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from dcp_datastates.commit.rank_set import Connection
from dcp_datastates.process.forks import ProcessLock, after_fork

__all__ = ["GlooGroup", "GroupBroken", "Meeting", "abandoned", "let_go", "said_as_broken"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT: Final = timedelta(seconds=20)
"""For connecting to all ranks once all have said that they are there."""

_OPERATION_TIMEOUT: Final = timedelta(days=1)
"""Nothing is timed out by gloo: a late rank is not a lost one, and ``check`` knows the difference."""

_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.1
"""Between two calls of ``check``, in seconds. What is waited for ends a pause."""

_LETTING_GO_SECONDS: Final = 5.0
"""How long an operation may take to end once its connections have failed."""

_UNUSED_TAG: Final = 0x7FFF
"""No collective uses it."""

_abandoned_lock = ProcessLock()  # guards _abandoned
_abandoned: list[tuple[Any, Any]] = []

Check = Callable[[], None]


class GroupBroken(Exception):
    """A connection of the group failed; says nothing about who is to blame."""


@contextlib.contextmanager
def said_as_broken(what: str) -> Iterator[None]:
    """Torch's errors as :class:`GroupBroken`. Not for calls of ``check``, whose errors may be of any type."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's own are such
        raise GroupBroken(f"{what}: {error}") from error


class Meeting:
    """Where the ranks of one group find each other: the store that its gloo group is made with.

    Args:
        store: the ranks' store.
        name: of the group; never used before.
        rank: this process's rank in it.
        world: how many ranks it has.
        pause: longest time between two looks for the others, in seconds.
        check: called while it waits for them; raises the way out.
    """

    def __init__(
        self, store: Connection, name: str, rank: int, world: int, pause: float, check: Check
    ) -> None:
        self.rank: Final = rank
        self.world: Final = world
        self._store = store
        self._name = name
        self._pause = pause
        self._check = check
        self._mine: dict[str, str] | None = {}
        self._found: dict[str, str] = {}
        self.error: BaseException | None = None  # gloo may say it in other words

    def set(self, key: str, value: bytes) -> None:
        if self._mine is None:
            raise NotImplementedError("gloo publishes in two steps")
        self._mine[key] = value.hex()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes.fromhex(self._found[key])

    def wait(self, keys: Sequence[str]) -> None:
        """Return when ``keys`` are there: the first time, when all ranks are."""
        try:
            self._check()
            if self._mine is not None:
                self._exchange()
        except BaseException as error:
            self.error = error
            raise
        if missing := [key for key in keys if key not in self._found]:
            raise NotImplementedError(f"gloo asks for {missing}")

    def _exchange(self) -> None:
        keys = [self.key(rank) for rank in range(self.world)]
        mine, self._mine = json.dumps(self._mine), None
        with said_as_broken("the store fails"):
            self._store.set(self.key(self.rank), mine)
        pause = min(_FIRST_PAUSE, self._pause)
        while not self._are_there(keys):
            self._check()
            time.sleep(pause)
            pause = min(self._pause, 2 * pause)
        with said_as_broken("the store fails"):
            for value in self._store.multi_get(keys):
                self._found.update(json.loads(value))

    def _are_there(self, keys: list[str]) -> bool:
        with said_as_broken("the store fails"):
            return self._store.check(keys)

    def key(self, rank: int) -> str:
        """What this ``rank`` of the group publishes under. Not needed once all are connected."""
        return f"{self._name}/{rank}"


class _MeetingStore(dist.Store):  # type: ignore[name-defined,misc]
    """A meeting as gloo sees it: what ``ProcessGroupGloo`` of torch 2.11 to 2.15 asks of a store."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self._meeting = meeting

    def set(self, key: str, value: Any) -> None:
        self._meeting.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._meeting.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._meeting.wait(keys)

    def check(self, keys: list[str]) -> bool:
        self._meeting.wait(keys)
        return True


class GlooGroup:
    """Collective: every rank of the group makes one. One thread uses it.

    The operations raise :class:`GroupBroken`, or what their ``check`` raises: then :meth:`leave` comes next.

    Args:
        meeting: where its ranks find each other.
        plain_store: makes a store of c10d's under a prefix of the group's own, in case that a release of torch asks
            for more than a meeting offers.

    Raises :class:`GroupBroken`, and what the meeting's ``check`` raises.
    """

    def __init__(self, meeting: Meeting, plain_store: Callable[[], Any]) -> None:
        self._rank, self._world = meeting.rank, meeting.world
        self._pending: Any = None
        # Not dist.new_group: that is a collective of the default group, and this is no business of the job's. The
        # constructor waits without the GIL.
        store = _MeetingStore(
            meeting
        )  # held until the constructor returns: C++ does not hold its Python part
        try:
            self._gloo = self._connected(store)
        except Exception as error:
            if meeting.error is not None:
                raise meeting.error from None
            if not _is_unknown(error):
                raise GroupBroken(f"the ranks could not connect: {error}") from error
            logger.info("gloo meets by torch's own rendezvous: %s", error)
            with said_as_broken("the ranks could not connect"):
                self._gloo = self._connected(plain_store())

    def _connected(self, store: Any) -> Any:
        gloo = dist.ProcessGroupGloo(store, self._rank, self._world, _CONNECT_TIMEOUT)
        gloo.set_timeout(_OPERATION_TIMEOUT)
        return gloo

    def leave(self) -> None:
        """Close its connections, so that the others' operations fail. Returns soon. Nothing else may follow."""
        gloo, self._gloo = self._gloo, None
        pending, self._pending = self._pending, None
        if gloo is not None:
            # Not left to its destructor: an error that is kept may hold it by a frame.
            _unblock(gloo, self._rank, self._world)
            if pending is not None:
                let_go(gloo, pending)

    def max(self, values: torch.Tensor, check: Check) -> None:
        """On rank 0, have ``values`` be the elementwise maximum over all ranks."""
        for each in self._collect(values, check):
            torch.maximum(values, each, out=values)

    def broadcast(self, values: torch.Tensor, check: Check) -> None:
        """Have ``values`` be what they are on rank 0."""
        self._do(lambda gloo: gloo.broadcast([values], dist.BroadcastOptions()), check)

    def gather(self, data: bytes, check: Check) -> list[bytes]:
        """All ranks' bytes on rank 0, elsewhere an empty list."""
        sizes = self._collect(torch.tensor([len(data)], dtype=torch.int64), check)
        if self._rank:
            self._exchange(data, [len(data)] + [0] * (self._world - 1), [0] * self._world, check)
            return []
        # What rank 0 has itself does not travel.
        coming = [0, *(int(size) for size in sizes[1:])]
        return [data, *_cut(self._exchange(b"", [0] * self._world, coming, check), coming)[1:]]

    def scatter(self, parts: Sequence[bytes], check: Check) -> bytes:
        """This rank's one of the ``parts`` that rank 0 gives."""
        sizes = torch.zeros(self._world, dtype=torch.int64)
        if self._rank == 0:
            sizes = torch.tensor([0, *map(len, parts[1:])], dtype=torch.int64)
        self.broadcast(sizes, check)
        if self._rank == 0:
            self._exchange(b"".join(parts[1:]), sizes.tolist(), [0] * self._world, check)
            return parts[0]
        coming = [int(sizes[self._rank])] + [0] * (self._world - 1)
        return self._exchange(b"", [0] * self._world, coming, check)

    def _collect(self, values: torch.Tensor, check: Check) -> list[torch.Tensor]:
        """All ranks' values on rank 0, elsewhere an empty list. One message each; gloo's all-reduce is a ring."""
        found = [] if self._rank else [torch.empty_like(values) for _ in range(self._world)]
        everyone = [] if self._rank else [found]
        self._do(lambda gloo: gloo.gather(everyone, [values], dist.GatherOptions()), check)
        return found

    def _exchange(self, data: bytes, going: list[int], coming: list[int], check: Check) -> bytes:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _EMPTY
        got = torch.empty(sum(coming), dtype=torch.uint8)
        self._do(lambda gloo: gloo.alltoall_base(got, sent, coming, going), check)
        return got.numpy().tobytes()

    def _do(self, start: Callable[[Any], Any], check: Check) -> None:
        gloo = self._gloo
        if gloo is None:
            raise GroupBroken("these connections were given up")
        with said_as_broken("gloo"):
            self._pending = work = start(gloo)
        del gloo  # an error that is kept holds this frame
        try:
            pause = _FIRST_PAUSE
            while not _ended(work, pause):
                check()
                pause = min(_LONGEST_PAUSE, 2 * pause)
            self._pending = None
            with said_as_broken("gloo"):
                work.wait()  # raises what it failed with; returns at once
        finally:
            del work  # it holds the group, and an error that is kept holds this frame


_EMPTY: Final = torch.empty(0, dtype=torch.uint8)


def _ended(work: Any, seconds: float) -> bool:
    """Wait so long for it, without the GIL. What it failed with is not raised here."""
    if not work.is_completed():
        with contextlib.suppress(RuntimeError):  # not yet
            work.wait(timedelta(seconds=seconds))
    return bool(work.is_completed())


def _cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    parts, at = [], 0
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return parts


def _is_unknown(error: BaseException) -> bool:
    """Whether gloo has asked for something that :class:`_MeetingStore` does not have, on every rank alike."""
    return "pure virtual" in str(error) or "NotImplementedError" in str(error)


def let_go(backend: Any, pending: Any) -> None:
    """Return when the operation ``pending`` has ended in a gloo ``backend`` whose connections are closed.

    If it does not end, the backend is kept until it does: its destructor would wait. See :func:`abandoned`.
    """
    abandoned()
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


atexit.register(_keep_abandoned)  # the end of the interpreter must not wait for them


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
