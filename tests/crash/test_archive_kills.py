"""A rank is killed while a checkpoint is carried to the archive: nothing is lost, and the next start goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crashes.failing import run_killing
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
    for rank in run_ranks(_BODY + "save_and_archive", 2, tmp_path, number=1, **arguments):
        rank.result()
    victim, body = 0 if kind == "coordinator" else 1, _BODY + "try_to_archive"
    (other,) = run_killing(point, victim, body, 2, tmp_path, number=2, **arguments)
    _, archived = other.value
    assert "Lost" in archived or not archived, archived

    assert number_in([fast, slow], 2) == 2, "it was committed on the fast tier"
    assert number_in([slow], 2) in (1, 2)
    # Another number of ranks goes on.
    for rank in run_ranks(_BODY + "save_and_archive", 3, tmp_path, number=3, **arguments):
        rank.result()
    assert number_in([slow], 3) == 3
    for number in (1, 2, 3):
        assert verify(f"{slow}/step-{number}").whole
