"""Which ranks commit together, and the store that they meet at.

Nothing here runs a collective or makes a process group: the ranks are those of the group that the user
named (or all), and the store is the one that the default group was made with, behind a prefix.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.forks import ProcessLock

__all__ = ["ALONE", "Connection", "Peers", "is_current", "peers_of", "within"]

logger = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = timedelta(seconds=5)
"""How long to try to reach the store's server before it counts as gone."""

_REQUEST_SECONDS: Final = timedelta(seconds=30)
"""How long gloo waits for a key of another rank while it connects."""

_ANSWER_SECONDS: Final = 10.0
"""How long a request may take: where a network is cut, torch's client waits for the answer without a bound."""


class Connection:
    """A connection to the store for one thread: a request waits for the one before it.

    It connects with its first request. One that breaks (networks drop what is idle for hours, and c10d's client
    does not reconnect) is made anew, once per request; then RuntimeError is raised. So it is where the store has not
    answered for ten seconds. Every request may be made twice: nothing here asks for a key that may not be there.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._store: Any = None

    def set(self, key: str, value: str) -> None:
        self._do(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._do(lambda store: store.get(key)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._do(lambda store: store.multi_get(keys)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._do(lambda store: store.check(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._do(lambda store: store.compare_set(key, expected, desired)))

    def add(self, key: str, amount: int) -> int:
        """May add twice, where the connection breaks."""
        return int(self._do(lambda store: store.add(key, amount)))

    def delete_key(self, key: str) -> bool:
        return bool(self._do(lambda store: store.delete_key(key)))

    def _do(self, request: Callable[[Any], Any]) -> Any:
        try:
            try:
                return self._ask(request)
            except RuntimeError as error:
                logger.info("the connection to the ranks' store broke, connecting again: %s", error)
                return self._ask(request)
        except TimeoutError as error:  # it is not asked again: that would take as long
            raise RuntimeError(f"the ranks' store has not answered for {error} s") from None

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        store, self._store = self._store, None  # after an error, an answer may still be on its way
        if store is None:
            store = within(2 * _CONNECT_SECONDS.total_seconds(), self._connect)
        answer = within(_ANSWER_SECONDS, lambda: request(store))
        self._store = store
        return answer


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call()`` returns or raises, in a thread of its own; TimeoutError if that takes longer.

    Then the thread is left behind: it ends with the call. It is a daemon, so a process can end without it.
    """
    ended: Future[Any] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="dcp_datastates-store", daemon=True).start()
    if not wait([ended], seconds).done:
        raise TimeoutError(f"{seconds:g}")
    return ended.result()


@dataclass(frozen=True)
class Peers:
    """The ranks that commit together.

    Attributes:
        rank: this process's rank among them; the coordinator is 0.
        ranks: their ranks in the default group, in order.
        base: makes connections to the default group's store by ``clone()``; None for a process alone.
    """

    rank: int
    ranks: tuple[int, ...]
    base: Any

    @property
    def world(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @property
    def store(self) -> Any:
        """The default group's store, for who wants it to live as long as a save; None if it is gone."""
        return self.base.store() if isinstance(self.base, _Base) else None

    @property
    def digest(self) -> str:
        """Short, and other ranks have another."""
        return hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:16]

    def connect(self, purpose: str) -> Connection:
        """A connection to the store, under a prefix for these ranks and ``purpose``."""
        return Connection(lambda: self.raw_store(purpose))

    def raw_store(self, purpose: str) -> Any:
        """The same as a c10d store, which does not reconnect."""
        store = self.base.clone()
        store.set_timeout(_REQUEST_SECONDS)
        return dist.PrefixStore(  # type: ignore[attr-defined]
            f"dcp_datastates/{self.digest}/{purpose}", store
        )


ALONE: Final = Peers(0, (0,), None)


class _Base:
    """The default group's store as it was when this package first came to it: only clones of it are used.

    The store itself may be a server that must end with the group, so it is not kept. Cloning connects, so it waits
    for the network; making this does not.
    """

    def __init__(self, store: Any) -> None:
        self.store: Final = weakref.ref(store)
        self._connection: Any = None

    def clone(self) -> Any:
        """A connection of its own. Raises RuntimeError if the store cannot be reached, or the group is gone."""
        connection = self._connection
        if connection is None:
            store = self.store()
            if store is None:
                raise RuntimeError("the default process group was destroyed")
            connection = store.clone()
            connection.set_timeout(_CONNECT_SECONDS)  # its clones connect within that
            self._connection = connection
        return connection.clone()


_lock = ProcessLock()  # guards _base
_base: _Base | None = None


def peers_of(process_group: Any) -> Peers:
    """The ranks of ``process_group`` (None: all), or :data:`ALONE` without ``torch.distributed``.

    Raises :class:`ConfigurationError` if this process is not one of them.
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
    return Peers(ranks.index(me), ranks, _current(dist.distributed_c10d._get_default_store()))


def _current(store: Any) -> _Base:
    global _base
    with _lock:
        if _base is None or _base.store() is not store:
            _base = _Base(store)
        return _base


def is_current(peers: Peers) -> bool:
    """Whether the default group that ``peers`` are of is still there."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return peers.base is _current(dist.distributed_c10d._get_default_store())
