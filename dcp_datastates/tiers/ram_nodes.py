"""Which nodes a job has, and where on them an object of a ``ram://`` store lies.

Each process that names such a store starts a server, and publishes in the job's c10d store how to reach it: its node,
and the server's address (:class:`~dcp_datastates.wire.secret.Address`). Rank 0 collects what all ranks have published,
and publishes the list.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from dcp_datastates.config import RamConfig
from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.forks import refuse_in_child
from dcp_datastates.ranks.connection import Connection
from dcp_datastates.ranks.own_address import own_address
from dcp_datastates.ranks.rank_set import RankSet, is_current, rank_set_of
from dcp_datastates.storage.attempts import rank_of
from dcp_datastates.tiers.ram_files import RamFiles, default_directory
from dcp_datastates.tiers.ram_node import Node, OtherNode, Pace, serve
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import Server

logger = logging.getLogger(__name__)

_MEETING_SECONDS: Final = 60.0
"""How long the first operation waits until all ranks have named the store."""

_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.2
_LONGEST_PAUSE_PER_RANK: Final = 75e-6
"""Longest time between two looks for the other ranks, in seconds: see ``ranks/gloo_tree.py``."""

_LINGER_SECONDS: Final = 5.0
"""How long a process waits at its end for others that are connected to it: they may still be tidying up."""


@dataclass(frozen=True)
class RamNodes:
    """The nodes of a job.

    Attributes:
        own: this process's node.
        ring: all of them, by name.
        peers: on how many other nodes a data file lies.
    """

    own: Node
    ring: Sequence[Node]
    peers: int = 1

    @property
    def others(self) -> list[Node]:
        """The other nodes, the next in the ring first."""
        at = self.ring.index(self.own)
        return [*self.ring[at + 1 :], *self.ring[:at]]

    def places(self, key: str) -> Sequence[Node]:
        """The nodes on which this process stores the object: of a data file the own one and its peers, else all."""
        if rank_of(key.rpartition("/")[2]) is None:
            return self.ring
        return [self.own, *self.others[: self.peers]]


@dataclass(frozen=True)
class _Process:
    """What a process publishes of itself."""

    node: str
    directory: str
    host: str
    port: int
    token: str


class _Job:
    """The part of this process in the nodes of a job. Construction does not wait.

    Raises :class:`StorageError` if the directory cannot be made, or no server be started.
    """

    def __init__(self, config: RamConfig, rank_set: RankSet) -> None:
        directory = config.directory or default_directory()
        self.config: Final = config
        self._rank_set = rank_set
        self._server: Server | None = None
        self._nodes: RamNodes | None = None
        self._problem = ""
        self._known = threading.Event()  # _nodes or _problem is set for good
        self._gives_up_at: float | None = None
        name = config.node or socket.gethostname()
        try:
            self._own = files = RamFiles(directory, config.nbytes)
            if rank_set.world == 1:
                self._nodes = RamNodes(files, [files], config.peers)
                return
            self._server = serve(files, own_address(rank_set.host))
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO,
                f"this process cannot take part in ram:// stores: {error.strerror or error}",
                error.filename or str(directory),
            ) from error
        host, port, token = self._server.address
        self._process = _Process(name, files.identity, host, port, token.hex())
        threading.Thread(target=self._meet, name="dcp_datastates-ram", daemon=True).start()

    def is_of(self, rank_set: RankSet) -> bool:
        """Whether this is the job of ``rank_set``, or there is no job since."""
        return not dist.is_initialized() or self._rank_set.base is rank_set.base

    def nodes(self) -> RamNodes:
        """The job's nodes. Waits until all ranks have named the store, up to 60 s since the first call; then raises
        :class:`StorageError`.
        """
        if self._nodes is None:
            if self._gives_up_at is None:
                self._gives_up_at = time.monotonic() + _MEETING_SECONDS
            self._known.wait(max(0.0, self._gives_up_at - time.monotonic()))
        if self._nodes is None:
            raise StorageError(errno.ETIMEDOUT, self._problem or self._missing())
        return self._nodes

    def leave(self, seconds: float) -> None:
        """Use the other nodes no more, and wait up to ``seconds`` until they use this process no more."""
        if self._nodes is not None and self._server is not None:
            self._let_go(self._nodes)
            self._server.await_unused(seconds)

    def close(self) -> None:
        if self._nodes is not None:
            self._let_go(self._nodes)
        if self._server is not None:
            self._server.close()

    # ---- the thread --------------------------------------------------------------------------------

    def _meet(self) -> None:
        world, pause = self._rank_set.world, _FIRST_PAUSE
        published = False
        while is_current(self._rank_set):
            try:
                store = self._rank_set.connect("ram")
                if not published:
                    store.set(str(self._rank_set.rank), json.dumps(vars(self._process)))
                    published = True
                if (found := self._look(store)) is not None:
                    self._set_nodes(found)
                    return
                self._problem = ""
            except RuntimeError as error:
                self._problem = f"the ranks' store fails: {error}"
            time.sleep(pause)
            pause = min(max(_LONGEST_PAUSE, _LONGEST_PAUSE_PER_RANK * world), 2 * pause)

    def _look(self, store: Connection) -> list[_Process] | None:
        """What all ranks have published; None if one has not yet."""
        if self._rank_set.rank == 0:
            keys = [str(rank) for rank in range(self._rank_set.world)]
            if not store.check(keys):
                return None
            store.set("all", json.dumps([json.loads(each) for each in store.multi_get(keys)]))
        elif not store.check(["all"]):
            return None
        return [_Process(**each) for each in json.loads(store.get("all"))]

    def _set_nodes(self, found: Sequence[_Process]) -> None:
        by_node: dict[str, list[_Process]] = {}
        for process in found:
            by_node.setdefault(process.node, []).append(process)
        for name, processes in by_node.items():
            if len({process.directory for process in processes}) > 1:
                self._problem = (
                    f"several hosts, or directories, are called node {name!r}: give each host a name of its own, by "
                    f"configure_ram(node=...)"
                )
                self._known.set()
                return
        pace = Pace(self.config.rate)
        ring: list[Node] = [
            self._own if name == self._process.node else self._other(name, by_node[name], pace)
            for name in sorted(by_node)
        ]
        if self._rank_set.rank == 0 and len(ring) <= self.config.peers:
            logger.warning(
                "configure_ram(peers=%d), and the job has %d nodes: each data file lies on all of them",
                *(self.config.peers, len(ring)),
            )
        self._nodes = RamNodes(self._own, ring, self.config.peers)
        self._known.set()

    def _other(self, name: str, processes: Sequence[_Process], pace: Pace) -> OtherNode:
        first = self._rank_set.rank % len(processes)  # so that their servers share the work
        addresses = [
            Address(each.host, each.port, bytes.fromhex(each.token))
            for each in [*processes[first:], *processes[:first]]
        ]
        return OtherNode(name, addresses, pace)

    # ---- within ------------------------------------------------------------------------------------

    def _missing(self) -> str:
        with contextlib.suppress(RuntimeError):
            store = self._rank_set.connect("ram")
            ranks = range(self._rank_set.world)
            missing = [str(rank) for rank in ranks if not store.check([str(rank)])]
            if missing:
                return (
                    f"rank {', '.join(missing[:8])}{', …' if len(missing) > 8 else ''} of {len(ranks)} has named no "
                    f"ram:// path within {_MEETING_SECONDS:g} s: every rank of the job takes part in such a store"
                )
        return "the ranks have not met: does rank 0 run?"

    def _let_go(self, nodes: RamNodes) -> None:
        for node in nodes.others:
            if isinstance(node, OtherNode):
                node.client.close()


_lock = threading.RLock()  # guards what follows
_config = RamConfig()
_job: _Job | None = None


def configure_ram(
    *,
    peers: int = 1,
    size: int | str = "auto",
    rate: int | str | None = None,
    directory: str | os.PathLike[str] | None = None,
    node: str | None = None,
) -> None:
    """Set the options of this process's ``ram://`` stores. Call it on every rank, before the job names such a store.

    Args:
        peers: On how many other nodes each data file also lies, so that many nodes may be lost. 0: on none. If there
            are fewer other nodes, on all of them.
        size: The most bytes that the directory of a node may have, such as ``"200GiB"``; beyond it a save fails. All
            processes of the node share it. ``"auto"``: half of the file system.
        rate: The most bytes per second that this process sends to other nodes, such as ``"500MB/s"``. None: no limit.
        directory: A directory that all processes of the node see, and no other node, and to which this user alone may
            write. It is made if it is missing. None: one below ``/dev/shm``.
        node: The name of what is lost at once: two copies lie in nodes of different names. None: the host's name.

    Raises:
        ConfigurationError: an option has a value that cannot work, or the job has named a ``ram://`` store already.
    """
    refuse_in_child("configure_ram()")
    global _config
    chosen = RamConfig.checked(peers=peers, size=size, rate=rate, directory=directory, node=node)
    with _lock:
        if _job is not None and _job.is_of(rank_set_of(None)) and chosen != _job.config:
            raise ConfigurationError(
                "configure_ram() comes too late: this job has a ram:// store already; call it before the first path "
                "that begins so is named"
            )
        _config = chosen


def join() -> None:
    """Take part in the nodes of the job, if this process does not yet. Does not wait; raises :class:`StorageError`."""
    _current()


def nodes() -> RamNodes:
    """The nodes of the job. Any thread; waits until all ranks have joined. Raises :class:`StorageError`."""
    return _current().nodes()


def _current() -> _Job:
    global _job
    rank_set = rank_set_of(None)
    with _lock:
        if _job is None or not _job.is_of(rank_set):
            former, _job = _job, None
            if former is not None:
                former.close()
            _job = _Job(_config, rank_set)
        return _job


def _leave() -> None:
    if _job is not None:
        _job.leave(_LINGER_SECONDS)


at_end(_leave, Phase.LEAVE)
