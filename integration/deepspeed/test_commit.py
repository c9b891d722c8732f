"""When a tag counts: ``latest`` names it only when it is committed on all ranks, whatever fails or is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from deepspeed_jobs import SECONDS, run, started


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A job that has looked at ``latest`` all along: see ``orders`` in the worker."""
    root = tmp_path_factory.mktemp("ordered")
    return root, run("orders", root)


def test_training_goes_on_while_latest_waits_for_the_commit(
    ordered: tuple[Path, list[Any]],
) -> None:
    """Two saves and three steps came before the first commit; then ``latest`` named the newer one."""
    for rank in ordered[1]:
        assert rank["named"][:4] == [None, None, None, "global_step2"]


def test_latest_stays_if_the_job_does_not_want_it(ordered: tuple[Path, list[Any]]) -> None:
    root, ranks = ordered
    assert {rank["named"][4] for rank in ranks} == {"global_step2"}
    assert (root / "unnamed" / "mp_rank_00_model_states.pt").exists()


def test_failed_saves_are_counted_on_all_ranks_and_training_goes_on(
    ordered: tuple[Path, list[Any]],
) -> None:
    root, ranks = ordered
    for rank in ranks:
        assert rank["failed"] == [1, 2]
        assert rank["named"][5] == "global_step2"
    log = (root / "orders-0.log").read_text()
    assert "the save of tag 'in-the-way'" in log
    assert "the save of tag 'not-picklable'" in log
    assert not (root / "not-picklable" / ".metadata").exists()


def test_a_load_waits_for_the_saves_before_it(ordered: tuple[Path, list[Any]]) -> None:
    for rank in ordered[1]:
        assert rank["named"][6] == "good"
        assert rank["state"] is True
        assert rank["same"], "the step behind the load has the loss of the step behind the save"


def test_a_single_file_of_weights_is_torchs(ordered: tuple[Path, list[Any]]) -> None:
    for rank in ordered[1]:
        assert "first.weight" in rank["model"]


def test_a_tag_that_was_not_committed_is_not_loaded(ordered: tuple[Path, list[Any]]) -> None:
    assert all(rank["not committed"] for rank in ordered[1])


def test_the_end_of_the_process_finishes_the_last_save(ordered: tuple[Path, list[Any]]) -> None:
    root, _ = ordered
    assert (root / "latest").read_text() == "last"
    assert "Traceback" not in (root / "orders-1.log").read_text()


@pytest.mark.parametrize("place", ["publish.rename.before@2", "latest.rename.before@2"])
def test_after_a_kill_the_previous_tag_loads(tmp_path: Path, place: str) -> None:
    """Rank 0 is killed before the commit of the second save, or between its commit and ``latest``."""
    environment = {"DCP_DATASTATES_FAILPOINTS": f"{place}=kill"}
    with started("killed", tmp_path, environment=environment) as (first, _):
        assert first.wait(SECONDS) == -signal.SIGKILL
    assert (tmp_path / "tag-1" / ".metadata").exists() == place.startswith("latest")
    for rank in run("goes_on", tmp_path):
        assert rank["named"] == "tag-0"
        assert rank["step"] == 0
    assert (tmp_path / "latest").read_text() == "tag-1"
