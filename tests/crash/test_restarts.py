"""torchrun restarts the workers over the store of the ones before: every save works, and all are told the same."""

from __future__ import annotations

from collections import defaultdict

import pytest
from crash.restarts import FAILPOINTS, Job, Plan
from support.ranks import under_torchrun
from support.tiers import sampled

pytestmark = pytest.mark.skipif(under_torchrun(), reason="starts torchrun itself")

SECONDS = 240
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
            *("--standalone", "--nproc-per-node", "2", "--max-restarts", str(len(kills)))
        )
        code = agent.wait(SECONDS)
        lines = job.lines()
        assert code == 0, f"{lines}\n{job.log}"
    assert {line.start for line in lines} == set(range(len(kills) + 1)), "each rank was killed once"
    _assert_all_told_the_same(lines)
    last = [line for line in lines if line.start == len(kills)]
    assert [line for line in last if line.what == "failed"] == []
    for rank in (0, 1):
        (found,) = (line.value for line in last if line.what == "restored" and line.rank == rank)
        saved = [line.value for line in last if line.what == "saved" and line.rank == rank]
        assert saved == list(range(found + 1, 6))
    for line in lines:
        if (
            line.what == "failed"
        ):  # by the one kill of its own start, and by no process of a former start
            pids = {each.pid for each in lines if each.start == line.start}
            named = [int(word) for word in line.value.split() if word.isdigit()]
            assert "(process" not in line.value or pids & set(named), line
