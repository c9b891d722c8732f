"""Several nodes of a store in one process: each has a directory and a server."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dcp_datastates.tiers.node import Node, OtherNode, serve
from dcp_datastates.tiers.node_files import NodeFiles
from dcp_datastates.tiers.node_store import NodeStore
from dcp_datastates.tiers.nodes import Nodes
from dcp_datastates.tiers.pace import Pace
from dcp_datastates.wire.secret import Address


def rests_below(folder: Path) -> list[Path]:
    """What was begun below ``folder``, and not published."""
    found = os.walk(folder)  # folders may go meanwhile
    return [Path(within, name) for within, _, names in found for name in names if name[-1] == "~"]


class Cluster:
    """Nodes ``a``, ``b``, ``c``, …, each with a directory below ``root``."""

    def __init__(self, root: Path, count: int, *, most_bytes: int | None = None, peers: int = 1):
        self.names = [chr(97 + number) for number in range(count)]
        self.folders = {name: root / name for name in self.names}
        self.files = {name: NodeFiles(name, self.folders[name], most_bytes) for name in self.names}
        self.servers = {name: serve(self.files[name], "127.0.0.1") for name in self.names}
        self.peers = peers

    def address(self, name: str) -> Address:
        return self.servers[name].address

    def other(self, name: str, at: Sequence[Address] = ()) -> OtherNode:
        return OtherNode(name, at or [self.address(name)], Pace())

    def store(
        self,
        own: str,
        bucket: str = "run",
        addresses: Mapping[str, Sequence[Address]] = MappingProxyType({}),
    ) -> NodeStore:
        """The store as a process of node ``own`` has it; it reaches others at other ``addresses``."""
        ring: list[Node] = [
            self.files[name] if name == own else self.other(name, addresses.get(name, ()))
            for name in self.names
        ]
        nodes = Nodes(ring[self.names.index(own)], ring, self.peers)
        return NodeStore(f"ram://{bucket}", lambda: nodes)

    def has(self, key: str, bucket: str = "run") -> list[str]:
        """The nodes that have the object."""
        return [name for name in self.names if (self.folders[name] / bucket / key).is_file()]

    def rests(self) -> list[Path]:
        """What was not published, on all nodes."""
        return [path for folder in self.folders.values() for path in rests_below(folder)]

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def temporary_store(bucket: str) -> NodeStore:
    """Of a process on the second of three nodes, so that another decides. Its directories go with it."""
    root = tempfile.mkdtemp(prefix="ram-")
    cluster = Cluster(Path(root), 3)
    store = cluster.store("b", bucket)

    def remove() -> None:
        cluster.close()
        shutil.rmtree(root, ignore_errors=True)

    weakref.finalize(store, remove)
    return store
