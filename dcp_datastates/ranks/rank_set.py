"""The set of ranks that commit together, and their connections to the job's store.

Nothing here runs a collective or makes a process group. The ranks are those of the group that the user named (or all).
The store is the default group's, under a prefix.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.forks import enter
from dcp_datastates.ranks.connection import Client, Connection
from dcp_datastates.ranks.incarnation import Incarnation

_CONNECT_SECONDS: Final = timedelta(seconds=5)
"""How long to try to reach the store's server before it counts as gone."""

_GLOO_SECONDS: Final = timedelta(seconds=30)
"""How long gloo waits for another rank's key when it uses a c10d store itself."""

_DESTROYED: Final = "the default process group was destroyed"


@dataclass(frozen=True)
class RankSet:
    """The ranks that commit together.

    Attributes:
        rank: this process's rank in the set; the coordinator is 0.
        ranks: the ranks in the default group, in order.
        base: the store that the ranks meet at; None for a process alone.
    """

    rank: int
    ranks: tuple[int, ...]
    base: _Base | None

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def store(self) -> Any:
        """The default group's store, for a caller that must keep it alive during a save; None if it is gone."""
        return None if self.base is None else self.base.address.store()

    @property
    def address(self) -> str:
        """This machine's address for the other ranks. Raises OSError if it has none."""
        return own_address(str(getattr(_innermost(self.store), "host", "")))

    @property
    def meets_at_file(self) -> bool:
        """Whether the store is a file, of which this process has no client but the group's own."""
        return _is_file(self.store)

    @property
    def digest(self) -> str:
        """A short digest that differs between rank sets."""
        return hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:16]

    @property
    def incarnation(self) -> Incarnation:
        """The incarnation of the job that these ranks belong to. All their keys in the store contain it."""
        return self._base.incarnation(self)

    def connect(self, purpose: str) -> Connection:
        """The process's connection to the store, under a prefix for these ranks, their incarnation and ``purpose``.

        A request waits up to ten seconds until this rank has met rank 0; then it raises RuntimeError.
        """
        incarnation = self.incarnation
        return Connection(self._base.client, lambda: f"{incarnation.prefix()}/{purpose}")

    def raw_store(self, purpose: str) -> Any:
        """Like :meth:`connect`, as a c10d store with one more connection, which does not reconnect; if the job's store
        is a file, it is that store.
        """
        store = self._base.address.client()
        if not _is_file(store):
            store.set_timeout(_GLOO_SECONDS)
        return dist.PrefixStore(f"{self.incarnation.prefix()}/{purpose}", store)  # type: ignore[attr-defined]

    @property
    def _base(self) -> _Base:
        assert self.base is not None, "a process alone has no store"
        return self.base


ALONE: Final = RankSet(0, (0,), None)


class _Address:
    """The store's address. Connecting to it waits for the network.

    The store itself may be a server that must end with the group, so this keeps only a weak reference, and uses clones.
    A store that is a file gets none (:class:`_LentFile`).
    """

    def __init__(self, store: Any) -> None:
        self.store: Final = weakref.ref(store)
        self._newest: Any = None  # a clone in use: it keeps the address when the store is gone

    def is_gone(self) -> bool:
        """Whether the store is gone, and with it the default group."""
        return self.store() is None

    def connect(self) -> Any:
        """A new connection, to keep for many requests. Raises RuntimeError as :meth:`client` does."""
        store = self.client()
        return _LentFile(self.store) if _is_file(store) else store

    def client(self) -> Any:
        """A new client; if the store is a file, the store itself. Raises RuntimeError if the store cannot be reached,
        or the group is gone.
        """
        store = self._newest if self._newest is not None else self.store()
        if store is None:
            raise RuntimeError(_DESTROYED)
        if _is_file(store):
            return store
        connection = store.clone()
        connection.set_timeout(_CONNECT_SECONDS)  # its clones must connect within that time
        self._newest = connection
        return connection


class _LentFile:
    """The group's own store, which is a file, held only during a request.

    torch counts the clients of the file. A clone would keep the file after the group has gone; and when a clone is
    dropped, it reads the file once more from where it has stopped. If the file was removed and made anew meanwhile,
    that reads past the end of the new one, for ever, and with the GIL held.
    """

    def __init__(self, store: Callable[[], Any]) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        store = self._store()
        if store is None:
            raise RuntimeError(_DESTROYED)
        path = _innermost(store).path
        try:
            os.stat(path)  # a request would wait for the file, as long as the group's own may
        except FileNotFoundError:
            raise RuntimeError(f"the file at which the ranks meet was removed: {path}") from None
        return getattr(store, name)


def _innermost(store: Any) -> Any:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _is_file(store: Any) -> bool:
    return isinstance(_innermost(store), dist.FileStore)  # type: ignore[attr-defined]


class _Base:
    """The default group's store, as of this package's first use of it. Construction does not wait.

    Args:
        kept: a store that is no default group's; this keeps it alive.
    """

    def __init__(self, store: Any, kept: Any = None) -> None:
        self.address: Final = _Address(store)
        self.client: Final = Client(self.address.connect)  # must not hold this: see connection.py
        self._kept = kept
        self._lock = threading.RLock()  # guards _incarnations
        self._incarnations: dict[tuple[int, ...], Incarnation] = {}

    def incarnation(self, ranks: RankSet) -> Incarnation:
        with self._lock:
            found = self._incarnations.get(ranks.ranks)
            if found is None:
                prefix, is_gone = f"dcp_datastates/{ranks.digest}", self.address.is_gone
                found = Incarnation(self.client, prefix, ranks.rank, ranks.world, is_gone)
                self._incarnations[ranks.ranks] = found
            return found


def of_store(rank: int, ranks: tuple[int, ...], store: Any) -> RankSet:
    """A set of ``ranks`` over a c10d ``store``, which it keeps alive."""
    return RankSet(rank, ranks, _Base(store, store))


_lock = threading.RLock()  # guards _base
_base: _Base | None = None


def check_group(process_group: object) -> None:
    """Raise :class:`ConfigurationError` unless this is a process group, or None for all ranks."""
    if process_group is None or process_group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigurationError(
            f"process_group is a {type(process_group).__name__}; pass a group that torch.distributed.new_group has "
            f"made, or None for all ranks (this package makes connections of its own: the group's backend does not "
            f"matter)"
        )


def rank_set_of(process_group: Any, alone: bool = False) -> RankSet:
    """The rank set of ``process_group`` (None: all ranks); or :data:`ALONE`, if ``alone`` (the option ``no_dist``), or
    without ``torch.distributed``.

    Raises :class:`ConfigurationError` if it is no group, or does not contain this process.
    """
    enter("work with the ranks of a group")
    check_group(process_group)
    if alone or not dist.is_available() or not dist.is_initialized():
        return ALONE
    me, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    if process_group is not None:
        outside = process_group == dist.GroupMember.NON_GROUP_MEMBER
        ranks = () if outside else tuple(dist.get_process_group_ranks(process_group))
    if me not in ranks:
        named = f" of ranks {list(ranks)}" if ranks else ""
        raise ConfigurationError(
            f"process_group{named} does not contain this process (rank {me}): only its members save to it"
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


# ---- the address at which the other ranks reach this machine ----------------------------------------

_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that are no machine's (RFC 5737, RFC 3849)."""


def own_address(store_host: str) -> str:
    """This machine's address on the route to the store's host; of no known host (empty): to this machine's name.

    On the machine itself its name often stands for the loopback (127.0.1.1 on Debian), where no other machine reaches
    it. Then this is the address of the route to other networks, if there is one, unless the store's host is given as
    the loopback: then all ranks are on this machine. Sends nothing. Raises OSError if the name has no address.
    """
    host = store_host or socket.gethostname()
    family, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    own = _source(family, address)
    if _is_loopback(own) and not _is_loopback(host):
        with contextlib.suppress(OSError):  # no network
            own = _source(family, (_ELSEWHERE[family], 1))
    return own


def _source(family: socket.AddressFamily, address: Any) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
