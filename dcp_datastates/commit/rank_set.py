"""The set of ranks that commit together, and their connections to the job's store.

Nothing here runs a collective or makes a process group. The ranks are those of the group that the user named (or all).
The store is the default group's, under a prefix.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.forks import ProcessLock, after_fork

__all__ = [
    "ALONE",
    "Connection",
    "RankSet",
    "end_requests",
    "is_current",
    "of_store",
    "rank_set_of",
]

logger = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = timedelta(seconds=5)
"""How long to try to reach the store's server before it counts as gone."""

_GLOO_SECONDS: Final = timedelta(seconds=30)
"""How long gloo waits for another rank's key when it uses a c10d store itself."""

_ANSWER_SECONDS: Final = 10.0
"""How long a request may take, connecting included. If the network is cut, torch's client waits for the answer without
a limit.
"""

_END_SECONDS: Final = 6.0
"""How long the end of the process waits for requests: longer than a connection that cannot be made takes to fail."""

_Asked = tuple[Callable[[Any], Any], "Future[Any]"]


class _Client:
    """One connection to the store's server. Any threads may use it; requests run one at a time.

    A separate thread makes the requests, because the server may never answer one. The thread starts with the first
    request and ends when the client is dropped. After a request has timed out, its thread ends as soon as it can, and
    the next request starts a new connection and a new thread. The thread is a daemon, so it does not keep the process
    alive. In a forked child the client starts anew.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._lock = ProcessLock()  # guards what follows
        self._line: queue.SimpleQueue[_Asked | None] | None = None
        self._process = os.getpid()

    def ask(self, request: Callable[[Any], Any]) -> Any:
        """Call ``request`` with the store and return its result. Repeats it once if the connection breaks; then raises
        RuntimeError.
        """
        try:
            return self._once(request)
        except _Overdue:  # asking again would take as long
            raise
        except RuntimeError as error:
            logger.info("the connection to the ranks' store broke, connecting again: %s", error)
            return self._once(request)

    def _once(self, request: Callable[[Any], Any]) -> Any:
        asked: Future[Any] = Future()
        with self._lock:
            if self._line is None or self._process != os.getpid():
                self._line, self._process = self._start(), os.getpid()
            line = self._line
            line.put((request, asked))
        if not wait([asked], _ANSWER_SECONDS).done:
            asked.cancel()
            self._drop(line)
            raise _Overdue(f"the ranks' store has not answered for {_ANSWER_SECONDS:g} s")
        return asked.result()

    def _start(self) -> queue.SimpleQueue[_Asked | None]:
        line: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_serve, args=(line, self._connect), name="dcp_datastates-store", daemon=True
        )
        thread.start()
        _lines[thread] = line
        self._end = weakref.finalize(self, line.put, None)
        self._end.atexit = False
        return line

    def _drop(self, line: queue.SimpleQueue[_Asked | None]) -> None:
        with self._lock:
            if self._line is line:
                self._line = None
                self._end()


class _Overdue(RuntimeError):
    """The store did not answer in time."""


_lines: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[_Asked | None]] = (
    weakref.WeakKeyDictionary()
)
"""The lines of the threads that make requests."""


def end_requests() -> None:
    """At the end of the process: end the threads that make requests, and wait for them, within a bound. Python before
    3.14 aborts if it ends when a request returns.
    """
    lines = list(_lines.items())
    for _, line in lines:
        line.put(None)
    deadline = time.monotonic() + _END_SECONDS
    for thread, _ in lines:
        thread.join(max(0.0, deadline - time.monotonic()))


@after_fork
def _forget_in_child() -> None:
    _lines.clear()


def _serve(line: queue.SimpleQueue[_Asked | None], connect: Callable[[], Any]) -> None:
    """The thread of a :class:`_Client`. It must hold no reference to the client: dropping the client ends the
    thread.
    """
    store: Any = None
    while (item := line.get()) is not None:
        request, asked = item
        if asked.set_running_or_notify_cancel():
            try:
                if store is None:
                    store = connect()
                asked.set_result(request(store))
            except BaseException as error:
                store = None  # an answer may still be on its way
                asked.set_exception(error)
        del item, request, asked  # release what they hold while waiting for the next request


class Connection:
    """This package's access to the store, under a prefix. Any thread may use it.

    Connections share a client, so a request waits for earlier requests. No request waits for a key, so none delays the
    others for long. If a connection breaks (networks drop idle connections after hours, and c10d's client does not
    reconnect), the client reconnects once per request; then the request raises RuntimeError. It also does so if the
    store does not answer within ten seconds. The client may send any request twice: never get a key that may be
    missing, and do not rely on exact counts from :meth:`add`.
    """

    def __init__(self, client: _Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda store: store.set(self._key(key), value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(lambda store: store.get(self._key(key))))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._ask(lambda store: store.multi_get(list(map(self._key, keys)))))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda store: store.check(list(map(self._key, keys)))))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._ask(lambda store: store.compare_set(self._key(key), expected, desired)))

    def add(self, key: str, n: int) -> int:
        return int(self._ask(lambda store: store.add(self._key(key), n)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(lambda store: store.delete_key(self._key(key))))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        return self._client.ask(request)


@dataclass(frozen=True)
class RankSet:
    """The ranks that commit together.

    Attributes:
        rank: this process's rank in the set; the coordinator is 0.
        ranks: the ranks in the default group, in order.
        base: its ``clone()`` connects to the default group's store; None for a process alone. A c10d store works too,
            if connections need not be shared.
    """

    rank: int
    ranks: tuple[int, ...]
    base: Any

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def store(self) -> Any:
        """The default group's store, for a caller that must keep it alive during a save; None if it is gone."""
        return self.base.address.store() if isinstance(self.base, _Base) else None

    @property
    def host(self) -> str:
        """The host of the store's server, by the name that this process uses; empty if it has none."""
        store = self.base.address.store() if isinstance(self.base, _Base) else self.base
        while (inner := getattr(store, "underlying_store", None)) is not None:
            store = inner
        return str(getattr(store, "host", ""))

    @property
    def digest(self) -> str:
        """A short digest that differs between rank sets."""
        return hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:16]

    def connect(self, purpose: str) -> Connection:
        """The process's connection to the store, under a prefix for these ranks and ``purpose``."""
        if not isinstance(self.base, _Base):
            return self.connect_alone(purpose)
        return Connection(self.base.shared, self._prefix(purpose))

    def connect_alone(self, purpose: str) -> Connection:
        """Like :meth:`connect`, with an unshared connection, for a thread that must not wait for other threads'
        requests.
        """
        base = self.base
        connect = base.address.clone if isinstance(base, _Base) else base.clone
        return Connection(_Client(connect), self._prefix(purpose))

    def raw_store(self, purpose: str) -> Any:
        """Like :meth:`connect`, as a c10d store with one more connection, which does not reconnect."""
        store = self.base.clone()
        store.set_timeout(_GLOO_SECONDS)
        return dist.PrefixStore(self._prefix(purpose), store)  # type: ignore[attr-defined]

    def _prefix(self, purpose: str) -> str:
        return f"dcp_datastates/{self.digest}/{purpose}"


ALONE: Final = RankSet(0, (0,), None)


class _Address:
    """The store's address. Connecting to it waits for the network.

    The store itself may be a server that must end with the group, so this keeps only a weak reference, and uses clones.
    """

    def __init__(self, store: Any) -> None:
        self.store: Final = weakref.ref(store)
        self._newest: Any = None  # a clone in use: it keeps the address when the store is gone

    def clone(self) -> Any:
        """A new connection. Raises RuntimeError if the store cannot be reached, or the group is gone."""
        store = self._newest if self._newest is not None else self.store()
        if store is None:
            raise RuntimeError("the default process group was destroyed")
        connection = store.clone()
        connection.set_timeout(_CONNECT_SECONDS)  # its clones must connect within that time
        self._newest = connection
        return connection


class _Base:
    """The default group's store, as of this package's first use of it. Construction does not wait."""

    def __init__(self, store: Any) -> None:
        self.address: Final = _Address(store)
        self.shared: Final = _Client(self.address.clone)  # must not hold this: see _serve()

    def clone(self) -> Any:
        return self.address.clone()


def of_store(rank: int, ranks: tuple[int, ...], store: Any) -> RankSet:
    """A set of ``ranks`` over a c10d ``store`` that the caller keeps alive as long as the ranks are connected."""
    return RankSet(rank, ranks, _Base(store))


_lock = ProcessLock()  # guards _base
_base: _Base | None = None


def rank_set_of(process_group: Any) -> RankSet:
    """The rank set of ``process_group`` (None: all ranks), or :data:`ALONE` without ``torch.distributed``.

    Raises :class:`ConfigurationError` if the group does not contain this process.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    me = dist.get_rank()
    if process_group is None:
        ranks = tuple(range(dist.get_world_size()))
    elif process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            f"process_group does not contain this process (rank {me}): only its members save to it"
        )
    else:
        ranks = tuple(dist.get_process_group_ranks(process_group))
    if me not in ranks:
        raise ConfigurationError(
            f"process_group has ranks {list(ranks)}, and not this process's rank {me}"
        )
    if len(ranks) == 1:
        return ALONE
    return RankSet(ranks.index(me), ranks, _current(dist.distributed_c10d._get_default_store()))


def _current(store: Any) -> _Base:
    global _base
    with _lock:
        if _base is None or _base.address.store() is not store:
            _base = _Base(store)
        return _base


def is_current(rank_set: RankSet) -> bool:
    """Whether the default group of ``rank_set`` still exists."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return rank_set.base is _current(dist.distributed_c10d._get_default_store())
