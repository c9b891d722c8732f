"""Which nodes a job has, and where on them an object of a ``ram://`` or a ``node://`` store lies.

Both are one tier: below a directory in memory, or at a path on each node's disk. Each process that names such a store
starts a server. The ranks meet at the job's c10d store, and tell each other how to
reach it: its node, and the server's address (:class:`~dcp_datastates.wire.secret.Address`).
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
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from dcp_datastates.config import check_count, parse_rate, parse_size
from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.forks import refuse_in_child
from dcp_datastates.ranks.meetings import GivenUp, Meetings
from dcp_datastates.ranks.rank_set import RankSet, is_current, rank_set_of
from dcp_datastates.storage.attempts import rank_of
from dcp_datastates.tiers.node import Node, OtherNode, serve
from dcp_datastates.tiers.node_files import NodeFiles
from dcp_datastates.tiers.pace import Pace
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import Server

logger = logging.getLogger(__name__)

_MOST_PEERS: Final = 16

_MEETING_SECONDS: Final = 60.0
"""How long the first operation waits until all ranks have named the store."""

_LINGER_SECONDS: Final = 5.0
"""How long a process waits at its end for others that are connected to it: they may still be tidying up."""


MEMORY: Path = Path(f"/dev/shm/dcp_datastates-{os.getuid()}")
"""Where the objects of ``ram://`` lie."""


@dataclass(frozen=True)
class NodesConfig:
    """Options of ``ram://`` and ``node://`` stores: see :func:`configure_nodes`."""

    peers: int = 1
    rate: int = 0
    """0: no limit."""
    node: str = field(default_factory=socket.gethostname)
    memory: int | None = None
    """None: half of the file system."""
    directory: Path = Path("/")
    sync: bool = True

    def files(self, scheme: str) -> NodeFiles:
        """This process's node of the stores of ``scheme``. Raises OSError."""
        if scheme == "node":
            return NodeFiles(self.node, self.directory, sync=self.sync)
        system = os.statvfs(MEMORY.parent)
        return NodeFiles(self.node, MEMORY, self.memory or system.f_blocks * system.f_frsize // 2)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job.

    Attributes:
        own: this process's node.
        ring: all of them, by name.
        peers: on how many other nodes a data file lies.
        of_ranks: the node of each rank.
        is_first: whether this process is the first of its node.
    """

    own: Node
    ring: Sequence[Node]
    peers: int = 1
    of_ranks: Sequence[Node] = ()
    is_first: bool = True

    @property
    def others(self) -> list[Node]:
        """The other nodes, the next in the ring first."""
        at = self.ring.index(self.own)
        return [*self.ring[at + 1 :], *self.ring[:at]]

    def places(self, key: str) -> Sequence[Node]:
        """The nodes on which this process stores the object: of a data file the own one and its peers, else all."""
        if rank_of(key) is None:
            return self.ring
        return [self.own, *self.others[: self.peers]]

    def homes(self, key: str) -> list[Node]:
        """As :meth:`places`, on any node: those of the rank whose data file it is; all nodes, the nearest first."""
        rank = rank_of(key) or 0
        at = self.ring.index(self.of_ranks[rank % len(self.of_ranks)]) if self.of_ranks else 0
        return [*self.ring[at:], *self.ring[:at]]


class _Process(NamedTuple):
    """What a process tells the others of itself."""

    node: str
    directory: str
    """Its identity."""
    host: str
    port: int
    token: str


class NodesJob:
    """The part of this process in the nodes of a job. Construction does not wait.

    Raises :class:`StorageError` if the directory cannot be made, or no server be started.
    """

    def __init__(self, scheme: str, config: NodesConfig, rank_set: RankSet) -> None:
        self.config: Final = config
        self._scheme, self._rank_set = scheme, rank_set
        self._server: Server | None = None
        self._met: Future[Nodes] = Future()
        self._gives_up_at: float | None = None
        self.copies: Final[dict[str, Any]] = {}
        """By the roots of the job's stores, what makes their copies again (:mod:`copies`); it ends with the job."""
        try:
            self.own = config.files(scheme)
            if rank_set.world == 1:
                self._met.set_result(Nodes(self.own, [self.own], config.peers))
                return
            self._server = serve(self.own, rank_set.address)
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO,
                f"this process cannot take part in {scheme}:// stores: {error.strerror or error}",
                error.filename or None,
            ) from error
        host, port, token = self._server.address
        self._process = _Process(config.node, self.own.identity, host, port, token.hex())
        self._meetings = Meetings(rank_set, scheme)
        threading.Thread(target=self._meet, name="dcp_datastates-node", daemon=True).start()

    def is_of(self, rank_set: RankSet) -> bool:
        """Whether this is the job of ``rank_set``, or there is no job since."""
        return not dist.is_initialized() or self._rank_set.base is rank_set.base

    def is_over(self) -> bool:
        """Whether the ranks of the job have left each other."""
        return self._rank_set.world > 1 and not is_current(self._rank_set)

    @property
    def has_met(self) -> bool:
        """Whether :meth:`nodes` does not wait."""
        return self._met.done()

    def nodes(self) -> Nodes:
        """The job's nodes. Waits until all ranks have named the store, up to 60 s since the first call; then raises
        :class:`StorageError`.
        """
        if self._gives_up_at is None:
            self._gives_up_at = time.monotonic() + _MEETING_SECONDS
        if not wait([self._met], max(0.0, self._gives_up_at - time.monotonic())).done:
            raise StorageError(errno.ETIMEDOUT, self._missing())
        return self._met.result()

    def close(self, seconds: float = 0.0) -> None:
        """Use the other nodes no more; and serve them no more, once they are gone, or after ``seconds``."""
        for each in self.copies.values():
            each.close()
        if self.has_met and self._met.exception() is None:
            for node in self._met.result().others:
                if isinstance(node, OtherNode):
                    node.client.close()
        if self._server is not None:
            self._server.await_unused(seconds)
            self._server.close()

    # ---- the thread --------------------------------------------------------------------------------

    def _meet(self) -> None:
        def answer(messages: Sequence[bytes]) -> Sequence[bytes]:
            return [b"[%s]" % b",".join(messages)] * len(messages)

        def check() -> None:
            if not is_current(self._rank_set):
                raise RuntimeError("the process group was destroyed")

        try:
            met = self._meetings.meet(0, json.dumps(self._process).encode(), answer, check)
            self._met.set_result(
                self._nodes_of([_Process(*each) for each in json.loads(met.answer)])
            )
        except StorageError as error:
            self._met.set_exception(error)
        except (GivenUp, RuntimeError) as error:
            why = f"the ranks have not met: {error}"
            self._met.set_exception(StorageError(errno.ETIMEDOUT, why))

    def _nodes_of(self, found: Sequence[_Process]) -> Nodes:
        by_node = defaultdict[str, list[_Process]](list)
        for process in found:
            by_node[process.node].append(process)
        for name, processes in by_node.items():
            if len({process.directory for process in processes}) > 1:
                raise StorageError(
                    errno.EEXIST,
                    f"several hosts, or directories, are called node {name!r}: give each host a name of its own, by "
                    f"configure_nodes(node=...)",
                )
        mine, peers, pace = self._process.node, self.config.peers, Pace(self.config.rate)

        def node(name: str, processes: list[_Process]) -> Node:
            if name == mine:
                return self.own
            first = self._rank_set.rank % len(processes)  # so that their servers share the work
            addresses = [
                Address(each.host, each.port, bytes.fromhex(each.token))
                for each in [*processes[first:], *processes[:first]]
            ]
            return OtherNode(name, addresses, pace)

        by_name = {name: node(name, by_node[name]) for name in sorted(by_node)}
        if self._rank_set.rank == 0 and len(by_name) <= peers:
            logger.warning(
                "configure_nodes(peers=%d), and the job has %d nodes: each data file lies on all of them",
                *(peers, len(by_name)),
            )
        of_ranks = [by_name[process.node] for process in found]
        is_first = by_node[mine][0] == self._process
        return Nodes(self.own, list(by_name.values()), peers, of_ranks, is_first)

    def _missing(self) -> str:
        with contextlib.suppress(RuntimeError):
            if missing := list(map(str, self._meetings.absent())):
                return (
                    f"rank {', '.join(missing[:8])}{', …' if len(missing) > 8 else ''} of {self._rank_set.world} has "
                    f"named no {self._scheme}:// path within {_MEETING_SECONDS:g} s: every rank of the job takes part "
                    f"in such a store"
                )
        return (
            f"rank 0 has not told which nodes there are: has every rank named a {self._scheme}:// path? Rank 0 says "
            f"which not"
        )


_lock = threading.RLock()  # guards what follows
_config = NodesConfig()
_jobs: dict[str, NodesJob] = {}


def configure_nodes(
    *,
    peers: int = 1,
    rate: int | str | None = None,
    node: str | None = None,
    memory: int | str = "auto",
    directory: str | os.PathLike[str] | None = None,
    sync: bool = True,
) -> None:
    """Set the options of this process's ``ram://`` and ``node://`` stores. Call it on every rank, before the job names
    such a store.

    Args:
        peers: On how many other nodes each data file also lies, so that many nodes may be lost. 0: on none. If there
            are fewer other nodes, on all of them.
        rate: The most bytes per second that this process sends to other nodes, such as ``"500MB/s"``. None: no limit.
        node: The name of what is lost together: two copies lie in nodes of different names. None: the host's name.
        memory: The most bytes of ``ram://`` on a node, such as ``"200GiB"``; beyond it a save fails. All processes of
            the node share it. ``"auto"``: half of ``/dev/shm``.
        directory: On each node, what the paths of ``node://`` are below. All processes of the node see it, no other
            node does, and this user alone may write to it. It is made if it is missing. None: the root, so that
            ``node:///nvme/run`` is ``/nvme/run``.
        sync: Whether ``node://`` syncs each file, and its name, before it counts as stored: a checkpoint then outlives
            that all nodes lose power.

    Raises:
        ConfigurationError: an option has a value that cannot work, or the job has named such a store already.
    """
    refuse_in_child("configure_nodes()")
    global _config
    check_count("peers", peers, _MOST_PEERS, least=0)
    nbytes = None if memory == "auto" else parse_size(memory, name="memory")
    if nbytes == 0:
        raise ConfigurationError(f"memory={memory!r} has room for nothing")
    if node is not None and not (isinstance(node, str) and node.strip()):
        raise ConfigurationError(f"node={node!r} must be a name, or None for the host's name")
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise ConfigurationError(f"directory={directory!r} must be a path, or None")
    if not isinstance(sync, bool):
        raise ConfigurationError(f"sync={sync!r} must be True or False")
    place = Path(os.path.realpath(directory or "/"))
    name = node or socket.gethostname()
    chosen = NodesConfig(peers, parse_rate(rate), name, nbytes, place, sync)
    with _lock:
        if any(each.is_of(rank_set_of(None)) and chosen != each.config for each in _jobs.values()):
            raise ConfigurationError(
                "configure_nodes() comes too late: this job has a ram:// or node:// store already; call it before the "
                "first path that begins so is named"
            )
        _config = chosen


def current(scheme: str) -> NodesJob:
    """This process's part in the nodes of its job, for the stores of ``scheme``; begins it if there is none yet. Any
    thread. Does not wait; raises :class:`StorageError`.
    """
    rank_set = rank_set_of(None)
    with _lock:
        job = _jobs.get(scheme)
        if job is None or not job.is_of(rank_set):
            if job is not None:
                del _jobs[scheme]
                job.close()
            job = _jobs[scheme] = NodesJob(scheme, _config, rank_set)
        return job


def _leave() -> None:
    for job in _jobs.values():
        job.close(_LINGER_SECONDS)


at_end(_leave, Phase.LEAVE)
