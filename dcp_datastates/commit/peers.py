"""Which ranks commit together, and the store that they meet at.

Nothing here runs a collective or makes a process group: the ranks are those of the group that the user
named (or all), and the store is the one that the default group was made with, behind a prefix.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates.errors import ConfigurationError

__all__ = ["ALONE", "Connection", "Peers", "is_current", "peers_of"]

logger = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = timedelta(seconds=5)
"""How long to try to reach the store's server before it counts as gone."""

_REQUEST_SECONDS: Final = timedelta(seconds=30)
"""The same for one request on a connection."""


class Connection:
    """A connection to the store for one thread: a request waits for the one before it.

    One that breaks (networks drop what is idle for hours, and c10d's client does not reconnect) is made
    anew, once per request; then RuntimeError is raised. Every request may be made twice: nothing here asks
    for a key that may not be there.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._store = connect()

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

    def delete_key(self, key: str) -> bool:
        return bool(self._do(lambda store: store.delete_key(key)))

    def _do(self, request: Callable[[Any], Any]) -> Any:
        try:
            return request(self._store)
        except RuntimeError as error:
            logger.info("the connection to the ranks' store broke, connecting again: %s", error)
            self._store = self._connect()
            return request(self._store)


@dataclass(frozen=True)
class Peers:
    """The ranks that commit together.

    Attributes:
        rank: this process's rank among them; the coordinator is 0.
        ranks: their ranks in the default group, in order.
        base: a connection to the default group's store; None for a process alone. Not the store itself, which
            may be a server that must end with the group.
    """

    rank: int
    ranks: tuple[int, ...]
    base: Any

    @property
    def world(self) -> int:
        """How many they are."""
        return len(self.ranks)

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


@dataclass(frozen=True)
class _Base:
    """The default group's store as it was when this package first came to it."""

    of: weakref.ref[Any]
    connection: Any


_lock = threading.Lock()  # guards _base
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
    base = _current(dist.distributed_c10d._get_default_store())
    return Peers(ranks.index(me), ranks, base.connection)


def _current(store: Any) -> _Base:
    global _base
    with _lock:
        if _base is None or _base.of() is not store:
            connection = store.clone()
            connection.set_timeout(_CONNECT_SECONDS)  # its clones connect within that
            _base = _Base(weakref.ref(store), connection)
        return _base


def is_current(peers: Peers) -> bool:
    """Whether the default group that ``peers`` are of is still there."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return peers.base is _current(dist.distributed_c10d._get_default_store()).connection


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
