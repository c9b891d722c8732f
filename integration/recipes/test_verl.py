"""The recipe for verl: its own FSDP engine's checkpoint manager, replaced by that of the recipe, on ranks of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT
from support.jobs.processes import Ended, run_ranks

import dcp_datastates as ds

pytest.importorskip("verl")


def job(world: int, scratch: Path, failpoints: str = "", **arguments: Any) -> list[Ended]:
    """Run the ranks in ``scratch``, with the module of the recipe."""
    (scratch / "verl_datastates.py").write_text((ROOT / "examples/verl_datastates.py").read_text())
    environment = {
        "VERL_USE_EXTERNAL_MODULES": "verl_datastates",
        "DCP_DATASTATES_FAILPOINTS": failpoints,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(scratch)
        return run_ranks(
            "verl_job:train",
            world,
            scratch / "ranks",
            environments=[environment] * world,
            folder=str(scratch),
            seconds=240,
            **arguments,
        )


def losses(ended: list[Ended]) -> list[dict[int, str]]:
    return [one.result() for one in ended]


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_a_killed_job_of_verl_goes_on_with_equal_losses(kind: str, tmp_path: Path) -> None:
    whole = losses(job(2, tmp_path, kind=kind, first=1, last=6, save=2))
    saved = tmp_path / "global_step_2" / "actor" / "step-2"
    assert not ds.verify(saved).damages

    killed = job(2, tmp_path, kind=kind, first=3, last=6, save=4, failpoints="vote.before@1=kill")
    assert [one.exit_code for one in killed] == [-9, -9]
    assert ds.latest(tmp_path / "global_step_4" / "actor") is None

    resumed = losses(job(2, tmp_path, kind=kind, first=3, last=6, save=None))
    assert resumed == [{step: each[step] for step in range(3, 7)} for each in whole]
    for one in job(2, tmp_path, kind=kind, first=5, last=6, save=None):
        assert "no committed checkpoint" in one.error


def test_it_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    losses(job(2, tmp_path, kind="fsdp2", first=1, last=2, save=2))
    (alone,) = losses(job(1, tmp_path, kind="fsdp2", first=3, last=4, save=4))
    assert list(alone) == [3, 4]
    state = ds.load(tmp_path / "global_step_4" / "actor" / "step-4")
    assert {float(each["step"]) for each in state["optimizer"]["state"].values()} == {4.0}
