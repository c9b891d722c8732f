"""Two nodes and the network between them: a cut, a link that comes back, the death of a node."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import cut_job
from support.jobs.scripts import environment_of_python
from support.waiting import await_that

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
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, "-m", *module],
                env=environment_of_python(GLOO_SOCKET_IFNAME=self.device, PYTHONUNBUFFERED="1"),
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


_WHY_NOT = why_not()

pytestmark = [
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
    pytest.mark.timeout(420),
]

PORT = 29_411
TOLD_SECONDS = cut_job.COMMIT_TIMEOUT + 55
"""``commit_timeout``, and what it takes to see that a network does not answer; on a busy machine."""


class Job:
    """:mod:`distributed.cut_job` with one rank on each node."""

    def __init__(self, nodes: TwoNodes, root: Path, saves: int) -> None:
        self._root = root
        for number, node in enumerate(nodes.nodes):
            node.run(
                [
                    "torch.distributed.run",
                    "--nnodes=2",
                    "--nproc-per-node=1",
                    f"--node-rank={number}",
                    f"--master-addr={nodes.nodes[0].address}",
                    f"--master-port={PORT}",
                    cut_job.__file__,
                    str(root),
                    str(saves),
                ],
                root / f"node-{number}.log",
            )

    def notes(self, rank: int, event: str) -> list[dict]:
        path = self._root / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [each for each in found if each["event"] == event]

    def told(self, rank: int, committed: bool, after: float) -> list[dict]:
        return [
            each
            for each in self.notes(rank, "told")
            if each["at"] > after and (each["outcome"] == "committed") == committed
        ]

    def until(self, rank: int, outcome: str, seconds: float, after: float = 0.0) -> dict:
        def told() -> list[dict]:
            return self.told(rank, outcome == "committed", after)

        try:
            await_that(told, seconds)
        except AssertionError as error:
            raise AssertionError(
                f"rank {rank} was told of no save that is {outcome} in {seconds:.0f} s: "
                f"{self.notes(rank, 'told')[-3:]}\n{self.logs()}"
            ) from error
        return told()[0]

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self._root.glob("node-*.log"))
        )


def test_a_cut_is_told_to_both_sides_saves_go_on_after_it_and_a_node_that_dies_is_named(tmp_path):
    with two_nodes() as nodes:
        job = Job(nodes, tmp_path, 10_000)
        for rank in (0, 1):
            job.until(rank, "committed", 150)
        nodes.cut()
        cut = time.monotonic()
        for rank in (0, 1):
            job.until(rank, "failed", TOLD_SECONDS + 10, after=cut)
        nodes.mend()
        mended = time.monotonic()
        for rank in (0, 1):
            job.until(rank, "committed", 90, after=mended)
        nodes.nodes[1].kill()  # not that with the store
        killed = time.monotonic()
        found = job.until(0, "failed", TOLD_SECONDS + 10, after=killed)
        assert found["outcome"] == "RankLostError"
        assert "rank 1" in found["why"]
        waits = [
            max(each["took"], each["step"]) for rank in (0, 1) for each in job.notes(rank, "called")
        ]
        assert max(waits) < TOLD_SECONDS, "a training thread waited for the network"
