"""Training under DeepSpeed: saves do not change it, and what was saved continues as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import Trained
from dcp_datastates import verify
from deepspeed_jobs import run

SAVED_AFTER = 3

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.fixture(scope="module")
def resumed(trained: Trained) -> list[Any]:
    """Fresh processes have loaded what ``trained`` saved, and trained the rest."""
    return run("resumes", trained.root)


@stages
def test_saving_changes_no_loss(trained: Trained, stage: int) -> None:
    assert trained.of(stage, "ours") == trained.of(stage, "stock")


@stages
def test_a_resumed_job_has_the_losses_of_one_that_was_not_interrupted(
    trained: Trained, resumed: list[Any], stage: int
) -> None:
    rest = [losses[SAVED_AFTER:] for losses in trained.of(stage, "stock")]
    assert [rank[f"ours {stage}"]["losses"] for rank in resumed] == rest
    # A rank's own statistics of the batch norm are rank 0's after a load, as with DeepSpeed's own checkpoints.
    assert resumed[0][f"ours {stage}"]["buffer"] == trained.of(stage, "stock buffer")[0]


def test_the_client_state_keeps_its_types(resumed: list[Any]) -> None:
    expected = "{1: (tensor([0, 1, 2]), 'text'), (2, 3): {4}}"
    assert {rank["ours 1"]["state"] for rank in resumed} == {expected}


@stages
def test_all_but_small_tensors_and_buffers_are_read_behind_the_step(
    trained: Trained, stage: int
) -> None:
    deferred, eager = trained.of(stage, "deferred"), trained.of(stage, "eager")
    assert deferred[0] > 4 * eager[0] > 0
    if stage:  # without ZeRO, rank 0 saves everything
        assert deferred[1] > 4 * eager[1] > 0


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each way to load gives, by who saved."""
    (one,) = run("ways", tmp_path_factory.mktemp("ways"), 1)
    return one


@pytest.mark.parametrize(
    "way",
    [
        "as it was",
        "an older tag",
        "without the optimizer",
        "without the schedule",
        "the model alone",
        "with a function of the program",
        "into a program with a layer more",
        "into that, not strictly",
        "into other groups of the optimizer",
        "what is not there",
    ],
)
def test_each_option_of_deepspeeds_load_does_what_it_does_without_this_package(
    ways: dict[str, dict[str, Any]], way: str
) -> None:
    assert ways[way]["ours"] == ways[way]["stock"]
    fails = way in (
        "into a program with a layer more",
        "into other groups of the optimizer",
        "what is not there",
    )
    assert isinstance(ways[way]["ours"], str if fails else list), (
        "an error's name, or what came of it"
    )


def test_a_checkpoint_of_deepspeeds_own_is_loaded(trained: Trained, resumed: list[Any]) -> None:
    rest = [losses[SAVED_AFTER:] for losses in trained.of(1, "stock")]
    assert [rank["stock 1"]["losses"] for rank in resumed] == rest


def test_pipeline_stages_are_saved_and_resumed(trained: Trained) -> None:
    for rank in trained.ranks:
        each = rank["pipeline"]
        assert each["ours"] == each["stock"]
        assert each["resumed"] == each["stock"][SAVED_AFTER:]
        assert each["deferred"] > 0


def test_a_job_with_the_configuration_of_the_example_goes_on(tmp_path: Path) -> None:
    """``examples/deepspeed.json``, as it lies there."""
    for rank in run("example", tmp_path):
        assert rank["path"] is not None
        assert rank["resumed"] == rank["losses"][SAVED_AFTER:]
        assert rank["deferred"] > 0
    assert not verify(tmp_path / f"global_step{SAVED_AFTER}").damages
