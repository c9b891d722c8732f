"""Jobs of the real Lightning on two ranks: killed, resumed, and with failing saves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.processes import Ended, run_ranks

import dcp_datastates as ds

STEPS = 7
LATE = {"read_deadline": 600.0}
"""No tensor of a save is read before the next backward pass: a save whose job is killed before it is not committed."""


def job(
    function: str, world: int, tmp_path: Path, environment: dict[str, str] | None = None, **arguments: Any
) -> list[Ended]:
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            **(environment or {}),
        }
        for rank in range(world)
    ]
    return run_ranks(
        f"lightning_jobs:{function}", world, tmp_path / "scratch", environments=environments, **arguments
    )


def train(folder: Path, tmp_path: Path, world: int = 2, **arguments: Any) -> dict[str, Any]:
    ranks = [one.result() for one in job("train", world, tmp_path, folder=str(folder), **arguments)]
    return ranks[0]


def step(folder: Path, number: int) -> Path:
    return folder / f"step={number}.ckpt"


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_killed_job_goes_on_from_the_newest_commit_with_equal_losses(tmp_path: Path, kind: str) -> None:
    whole = train(tmp_path / "whole", tmp_path, kind=kind, options=LATE)
    assert list(whole["losses"]) == list(range(1, STEPS + 1))
    # Forward and backward come before the optimizer's step, where the gate waits for the reads.
    assert whole["events"][:4] == ["backward", "step", "backward", "step"]
    assert not ds.verify(step(tmp_path / "whole", 6)).damages

    folder = tmp_path / "killed"
    ended = job(
        "train", 2, tmp_path, folder=str(folder), kind=kind, options=LATE, kill_after=6, waits_for=4,
        save_last=kind == "fsdp2",
    )
    assert [one.exit_code for one in ended] == [-9, -9]
    assert (step(folder, 4) / ".metadata").exists()
    assert step(folder, 6).is_dir()
    assert not (step(folder, 6) / ".metadata").exists()

    resumed = train(folder, tmp_path, kind=kind, resume="newest")
    assert resumed["losses"] == {number: whole["losses"][number] for number in (5, 6, 7)}
    assert resumed["lr"] == whole["lr"]
