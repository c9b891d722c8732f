"""Two nodes on one machine: network namespaces with a link between them that can be cut."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Node", "TwoNodes", "two_nodes", "why_not"]

_names = itertools.count(1)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if shutil.which("ip") is None:
        return "there is no ip command (package iproute2)"
    name = f"ds-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed: {error.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class Node:
    """One node: a namespace with the address ``10.77.0.<number>``, and the processes started there."""

    def __init__(self, prefix: str, number: int) -> None:
        self.name = f"{prefix}-{number}"
        self.device = f"{prefix}v{number}"
        self.address = f"10.77.0.{number}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, module: list[str], log: Path) -> subprocess.Popen[bytes]:
        """``python -m …`` there, in a process group of its own; what it prints goes to ``log``."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "GLOO_SOCKET_IFNAME": self.device,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, "-m", *module],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """The node dies: all that was started there, and what that has started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for pid in subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        ).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for process in self._processes:
            process.wait()


class TwoNodes:
    """The nodes, and the link between them."""

    def __init__(self) -> None:
        prefix = f"ds{os.getpid()}x{next(_names)}"[-11:]
        self.nodes = (Node(prefix, 1), Node(prefix, 2))

    def set_up(self) -> None:
        first, second = self.nodes
        for node in self.nodes:
            _ip("netns", "add", node.name)
        _ip("link", "add", first.device, "netns", first.name, "type", "veth", "peer", "name",
            second.device, "netns", second.name)  # fmt: skip
        for node in self.nodes:
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.device)
            _ip("-n", node.name, "link", "set", "lo", "up")
            _ip("-n", node.name, "link", "set", node.device, "up")

    def cut(self) -> None:
        """Nothing goes through any more, and neither side is told."""
        # Frames go to an address that no device has. With a device down, its side would fail at once.
        for node, other in (self.nodes, self.nodes[::-1]):
            _ip("-n", node.name, "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:99",
                "dev", node.device, "nud", "permanent")  # fmt: skip

    def mend(self) -> None:
        """It does again."""
        for node, other in (self.nodes, self.nodes[::-1]):
            _ip("-n", node.name, "neigh", "del", other.address, "dev", node.device)

    def tear_down(self) -> None:
        for node in self.nodes:
            node.kill()
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)


@contextlib.contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Both nodes, connected; gone afterwards, with all that runs there."""
    nodes = TwoNodes()
    try:
        nodes.set_up()
        yield nodes
    finally:
        nodes.tear_down()
