"""A rank is killed at every named place: the old checkpoint or the new one is there, whole, and life goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crashes.cells import CELLS, NEVER, OLD, Cell, Directory, kill, passes
from support.jobs.processes import run_ranks
from support.state.saving import DEFERRED
from support.tiers import sampled

SAMPLE = (
    *("stage.before-other", "plan.mkdir.after-coordinator", "sync.data.before-other"),
    *("vote.before-other", "vote.after-coordinator"),
    *("publish.link.before-coordinator", "publish.link.after-coordinator"),
    *("outcome.before-other", "cleanup.unlink.after-coordinator"),
)
"""In each phase of a save one cell or two: both kinds of rank, and both sides of what matters most."""


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoint 1 by world size, saved once by processes of its own; cells work on copies."""
    scratch = tmp_path_factory.mktemp("committed")
    for world in (2, 3):
        for rank in run_ranks(
            "support.state.saving:commit_checkpoint",
            world,
            scratch,
            path=str(scratch / f"world{world}"),
            number=OLD,
            elements=DEFERRED,
        ):
            rank.result()
    return {world: scratch / f"world{world}" for world in (2, 3)}


@pytest.mark.parametrize("cell", sampled(CELLS, SAMPLE), ids=str)
def test_a_rank_is_killed(cell: Cell, committed, tmp_path):
    kill(cell, Directory(committed[cell.world], tmp_path), tmp_path)


@pytest.mark.parametrize("kind", sorted(NEVER))
def test_what_is_declared_never_to_be_passed_is_not(kind, committed, tmp_path):
    assert passes(kind, NEVER[kind], Directory(committed[2], tmp_path), tmp_path) == []
    # And the way to see it works:
    again = tmp_path / "seen"
    seen = passes(kind, ["plan.before", "vote.before"], Directory(committed[2], again), again)
    assert seen == ["plan.before", "vote.before"]
