"""A rank is killed while a checkpoint is carried to the archive: nothing is lost, and the next start goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crashes.failing import variables
from support.jobs.processes import run_ranks
from support.state.archiving import number_in
from support.stores.server import endpoint, use
from support.tiers import sampled

from dcp_datastates import verify

_BODY = "support.state.archiving:"

CELLS = [
    f"{point}.{when}-{kind}-{slow}"
    for slow in ("directory", "store")
    for point, kinds in (
        ("archive.write", ("coordinator", "other")),
        ("archive.commit", ("coordinator",)),
        *([("publish.register", ("coordinator",))] if slow == "store" else []),
    )
    for kind in kinds
    for when in ("before", "after")
]
SAMPLE = ("archive.write.before-coordinator-directory", "archive.commit.after-coordinator-store")


@pytest.mark.parametrize("cell", sampled(CELLS, SAMPLE))
def test_a_rank_is_killed_while_it_archives(cell, tmp_path: Path):
    point, kind, where = cell.split("-")
    url = endpoint() if where == "store" else ""
    fast = str(tmp_path / "fast")
    slow = str(tmp_path / "slow")
    if url:
        use(url)
        slow = f"s3://test-bucket/{tmp_path.parent.name}/{tmp_path.name}"
    arguments = {"fast": fast, "slow": slow, "url": url}

    def run(world: int, body: str, number: int, failpoints: str = "", victim: int = -1):
        fired = tmp_path / f"fired{number}"
        environments = [
            variables(failpoints, fired) if rank == victim else {} for rank in range(world)
        ]
        return run_ranks(
            _BODY + body, world, tmp_path, environments=environments, number=number, **arguments
        ), fired

    for rank in run(2, "save_and_archive", 1)[0]:
        rank.result()
    victim = 0 if kind == "coordinator" else 1
    ended, fired = run(2, "try_to_archive", 2, f"{point}=kill", victim)
    assert point in fired.read_text()
    assert ended[victim].killed
    _, archived = ended[1 - victim].value
    assert "Lost" in archived or not archived, archived

    assert number_in([fast, slow], 2) == 2, "it was committed on the fast tier"
    assert number_in([slow], 2) in (1, 2)
    # Another number of ranks goes on.
    for rank in run(3, "save_and_archive", 3)[0]:
        rank.result()
    assert number_in([slow], 3) == 3
    for number in (1, 2, 3):
        assert verify(f"{slow}/step-{number}").whole
