"""Two nodes and the network between them: a cut, a link that comes back, the death of a node."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.jobs import cut_job, network
from support.waiting import await_that

_WHY_NOT = network.why_not()

pytestmark = [
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
    pytest.mark.timeout(420),
]

PORT = 29_411
TOLD_SECONDS = cut_job.COMMIT_TIMEOUT + 25
"""``commit_timeout``, and what it takes to see that a network does not answer; on a busy machine."""


class Job:
    """:mod:`support.jobs.cut_job` with one rank on each node."""

    def __init__(self, nodes: network.TwoNodes, root: Path, saves: int) -> None:
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


def test_both_sides_of_a_cut_are_told_and_no_training_thread_hangs_and_saves_go_on_after_it(
    tmp_path,
):
    with network.two_nodes() as nodes:
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
        waits = [
            max(each["took"], each["step"]) for rank in (0, 1) for each in job.notes(rank, "called")
        ]
        assert max(waits) < TOLD_SECONDS, "a training thread waited for the network"


def test_when_a_node_dies_the_other_is_told_which_rank_is_lost(tmp_path):
    with network.two_nodes() as nodes:
        job = Job(nodes, tmp_path, 10_000)
        for rank in (0, 1):
            job.until(rank, "committed", 150)
        nodes.nodes[1].kill()  # not that with the store
        killed = time.monotonic()
        found = job.until(0, "failed", TOLD_SECONDS + 10, after=killed)
        assert found["outcome"] == "RankLostError"
        assert "rank 1" in found["why"]
