"""Which nodes a job has, and where on them an object of a ``ram://`` store lies.

Each process that names such a store starts a server. The ranks meet at the job's c10d store, and tell each other how to
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch.distributed as dist

from dcp_datastates.config import check_count, parse_rate, parse_size
from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.forks import refuse_in_child
from dcp_datastates.ranks.meetings import GivenUp, Meetings
from dcp_datastates.ranks.own_address import own_address
from dcp_datastates.ranks.rank_set import RankSet, is_current, rank_set_of
from dcp_datastates.storage.attempts import rank_of
from dcp_datastates.tiers.pace import Pace
from dcp_datastates.tiers.ram_node import Node, OtherNode, RamFiles, serve
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import Server

logger = logging.getLogger(__name__)

_MOST_PEERS: Final = 16

_MEETING_SECONDS: Final = 60.0
"""How long the first operation waits until all ranks have named the store."""

_LINGER_SECONDS: Final = 5.0
"""How long a process waits at its end for others that are connected to it: they may still be tidying up."""


@dataclass(frozen=True)
class RamConfig:
    """Options of ``ram://`` stores: see :func:`configure_ram`."""

    peers: int = 1
    nbytes: int | None = None
    """None: half of the file system."""
    rate: int = 0
    """0: no limit."""
    directory: Path = field(default_factory=lambda: Path(f"/dev/shm/dcp_datastates-{os.getuid()}"))
    node: str = field(default_factory=socket.gethostname)


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
    """What a process tells the others of itself."""

    node: str
    directory: str
    host: str
    port: int
    token: str


class RamJob:
    """The part of this process in the nodes of a job. Construction does not wait.

    Raises :class:`StorageError` if the directory cannot be made, or no server be started.
    """

    def __init__(self, config: RamConfig, rank_set: RankSet) -> None:
        self.config: Final = config
        self._rank_set = rank_set
        self._server: Server | None = None
        self._nodes: RamNodes | None = None
        self._problem = ""
        self._known = threading.Event()  # _nodes or _problem is set for good
        self._gives_up_at: float | None = None
        try:
            self._own = files = RamFiles(config.directory, config.nbytes)
            if rank_set.world == 1:
                self._nodes = RamNodes(files, [files], config.peers)
                return
            self._server = serve(files, own_address(rank_set.host))
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO,
                f"this process cannot take part in ram:// stores: {error.strerror or error}",
                error.filename or str(config.directory),
            ) from error
        host, port, token = self._server.address
        self._process = _Process(config.node, files.identity, host, port, token.hex())
        self._meetings = Meetings(rank_set, "ram")
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

    def close(self, seconds: float = 0.0) -> None:
        """Use the other nodes no more; and serve them no more, once they are gone, or after ``seconds``."""
        for node in [] if self._nodes is None else self._nodes.others:
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
            met = self._meetings.meet(0, json.dumps(vars(self._process)).encode(), answer, check)
            self._set_nodes([_Process(**each) for each in json.loads(met.answer)])
        except (GivenUp, RuntimeError) as error:
            self._problem = f"the ranks have not met: {error}"
        self._known.set()

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
            if missing := list(map(str, self._meetings.absent())):
                return (
                    f"rank {', '.join(missing[:8])}{', …' if len(missing) > 8 else ''} of {self._rank_set.world} has "
                    f"named no ram:// path within {_MEETING_SECONDS:g} s: every rank of the job takes part in such a "
                    f"store"
                )
        return "rank 0 has not told which nodes there are: has every rank named a ram:// path? Rank 0 says which not"


_lock = threading.RLock()  # guards what follows
_config = RamConfig()
_job: RamJob | None = None


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
        node: The name of what is lost together: two copies lie in nodes of different names. None: the host's name.

    Raises:
        ConfigurationError: an option has a value that cannot work, or the job has named a ``ram://`` store already.
    """
    refuse_in_child("configure_ram()")
    global _config
    check_count("peers", peers, _MOST_PEERS, least=0)
    nbytes = None if size == "auto" else parse_size(size, name="size")
    if nbytes == 0:
        raise ConfigurationError(f"size={size!r} has room for nothing")
    if node is not None and not (isinstance(node, str) and node.strip()):
        raise ConfigurationError(f"node={node!r} must be a name, or None for the host's name")
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise ConfigurationError(f"directory={directory!r} must be a path, or None")
    place = RamConfig().directory if directory is None else Path(os.path.realpath(directory))
    chosen = RamConfig(peers, nbytes, parse_rate(rate), place, node or socket.gethostname())
    with _lock:
        if _job is not None and _job.is_of(rank_set_of(None)) and chosen != _job.config:
            raise ConfigurationError(
                "configure_ram() comes too late: this job has a ram:// store already; call it before the first path "
                "that begins so is named"
            )
        _config = chosen


def current() -> RamJob:
    """This process's part in the nodes of its job; begins it if there is none yet. Any thread. Does not wait; raises
    :class:`StorageError`.
    """
    global _job
    rank_set = rank_set_of(None)
    with _lock:
        if _job is None or not _job.is_of(rank_set):
            former, _job = _job, None
            if former is not None:
                former.close()
            _job = RamJob(_config, rank_set)
        return _job


def _leave() -> None:
    if _job is not None:
        _job.close(_LINGER_SECONDS)


at_end(_leave, Phase.LEAVE)
