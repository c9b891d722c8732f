"""torchrun restarts the workers over the store of the ones before: every save works, and all are told the same."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest
from crash.restarts import FAILPOINTS, Job, Plan
from support.jobs.scripts import free_port
from support.state.checkpoints import load_everything
from support.tiers import sampled, tries

SECONDS = 240
EVERY = 50
"""Saves between two kills of the soak."""
PASSED_ONCE = (
    *("plan.before", "plan.after", "vote.before", "vote.after", "outcome.before", "outcome.after"),
    *("cleanup.before", "publish.create.after", "publish.link.before", "publish.link.after"),
)
"""Failpoints that a rank passes once in each save."""
SEED = int(os.environ.get("SOAK_SEED", random.randrange(1 << 30)))
PHASES = ("start", "latest", "restore", *FAILPOINTS)


def _assert_all_told_the_same(lines):
    """The processes that were started together; what a rank was not told before it died, it was not told."""
    told = defaultdict(set)
    for line in lines:
        if line.what in ("latest", "restored"):
            told[line.start, line.world, line.what].add(line.value)
    assert all(len(values) == 1 for values in told.values()), told


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("phase", sampled(PHASES, keep=["latest"]))
def test_a_rank_that_is_killed_in_any_phase_leaves_nothing_that_the_restarted_job_believes(
    phase, tmp_path
):
    # The first start makes a checkpoint, so that there is something to find.
    kills = [(1, "cleanup.before@2"), (0, phase), *([] if "publish" in phase else [(1, phase)])]
    (tmp_path / "root").mkdir()
    with Job(Plan(str(tmp_path / "root"), 6, kills), tmp_path) as job:
        agent = job.start(
            *("--standalone", "--nproc-per-node", "2", "--max-restarts", str(len(kills))),
            *("--run-path", "--start-method", "forkserver"),
        )
        code = agent.wait(SECONDS)
        lines = job.lines()
        assert code == 0, f"{lines}\n{job.log}"
    assert {line.start for line in lines} == set(range(len(kills) + 1)), "each rank was killed once"
    _assert_all_told_the_same(lines)
    last = [line for line in lines if line.start == len(kills)]
    assert [line for line in last if line.what == "failed"] == []
    told = max(line.value for line in lines if line.what == "saved" and line not in last)
    for rank in (0, 1):
        (found,) = (line.value for line in last if line.what == "restored" and line.rank == rank)
        assert found >= told, f"step {told} was committed"
        saved = [line.value for line in last if line.what == "saved" and line.rank == rank]
        assert saved == list(range(found + 1, 6))
    # A save fails by the one kill of its own start, and by no process of a former start.
    for line in (line for line in lines if line.what == "failed" and "(process" in line.value):
        named = {int(word) for word in line.value.split() if word.isdigit()}
        assert named & {each.pid for each in lines if each.start == line.start}, line


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    "events", sampled(["join", "join leave join", "join orphans join"], keep=["join"])
)
def test_nodes_that_come_and_go_change_the_job_and_its_saves_work(events, tmp_path):
    """Two agents on one machine. A node that comes does not raise the count of restarts, and the store stays."""
    (root := tmp_path / "root").mkdir()
    node = (
        *("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "9"),
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{free_port()}",
            "--rdzv-id",
            "job",
        ),
        *("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"),
        *("--monitor-interval", "0.2", "--local-addr", "127.0.0.1"),
    )
    with Job(Plan(str(root), wait=True), tmp_path) as job:
        job.start(*node)
        lines = job.await_saves(2, [])
        orphaned = set()
        for event in events.split():
            if event == "join":
                job.start(*node)
            elif event == "leave":
                job.agents[-1].terminate()
            else:
                orphaned = {line.pid for line in lines if line.rank in (2, 3)} & job.workers()
                job.agents[-1].kill()
                continue  # the next node takes the place of the one that is gone
            before = {line.pid for line in lines}
            lines = job.await_saves(4 if event == "join" else 2, lines)
            _assert_all_told_the_same([line for line in lines if line.pid not in before])
        assert orphaned <= job.workers(), "they were to be alive"
        (root / "end").touch()
        assert job.agents[0].wait(SECONDS) == 0, job.log


@pytest.mark.timeout(600 + 2 * int(os.environ.get("SOAK_SAVES", "200")))
@pytest.mark.parametrize("saves", tries(0, 100, "SOAK_SAVES")[-1:])
def test_no_save_is_lost_over_many_restarts(saves, tmp_path):
    print(f"SOAK_SAVES={saves} SOAK_SEED={SEED}")
    every = min(EVERY, saves // 2)
    chance, kills = random.Random(SEED), []
    for _ in range(saves // every - 1):
        where = chance.choice(PASSED_ONCE)
        rank = 0 if where.startswith("publish") else chance.randrange(2)
        kills.append((rank, f"{where}@{every}"))
    (tmp_path / "root").mkdir()
    began = time.monotonic()
    with Job(Plan(str(tmp_path / "root"), saves, kills), tmp_path) as job:
        agent = job.start(
            *("--standalone", "--nproc-per-node", "2", "--max-restarts", str(len(kills)))
        )
        code = agent.wait(500 + 2 * saves)
        assert code == 0, f"{job.lines()[-4:]}\n{job.log}"
        lines = job.lines()
    _assert_all_told_the_same(lines)
    told = -1  # the newest step that a rank was told is committed
    for start in range(len(kills) + 1):
        of_start = [line for line in lines if line.start == start]
        assert {line.rank for line in of_start} == {0, 1}, f"start {start} was no start"
        found = [line.value for line in of_start if line.what == "restored"] or [-1]
        assert min(found) >= told, f"start {start} found step {found}, and {told} was committed"
        told = max([told, *(line.value for line in of_start if line.what == "saved")])
    assert told == saves - 1
    for step in range(saves):
        state = load_everything(Path(tmp_path, "root", f"step-{step}"))
        assert [state[f"w{rank}"].unique().tolist() for rank in (0, 1)] == [[float(step)]] * 2
    saved = [line.seconds for line in lines if line.what == "saved"]
    print(
        f"{saves} saves, {len(kills)} kills and restarts: none lost, {len(saved)} commits told, median "
        f"{statistics.median(saved) * 1000:.0f} ms, longest {max(saved):.2f} s; {time.monotonic() - began:.0f} s"
    )
