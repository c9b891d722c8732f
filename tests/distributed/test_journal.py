"""Each rank has a journal, and compares its own; at another number of ranks, losses alone are compared."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import torch.distributed as dist
from support.commands import run_cli
from support.jobs.ranks import run_on_ranks
from support.jobs.scripts import environment_of_python, ranks_of_torchrun
from support.state.resumed import DEFECTS, train
from support.waiting import lines


def _run(path, end, seed=0, defect="", resumed=True, scale=1.0, outcome="equal"):
    rank, world = dist.get_rank(), dist.get_world_size()
    with lines(logging.WARNING) as said:
        found = train(path, end, seed=seed, defect=defect, scale=scale)
    if not resumed:
        assert found is None
        return
    assert (found.rank, found.world, found.after) == (rank, world, 30)
    assert found.outcome == outcome, str(found)
    if defect:
        assert DEFECTS[defect] in found.cause
    if outcome == "different":
        assert any(each.startswith(f"rank {rank}: the resume of step 30") for each in said)


def _files(path):
    return sorted(each.name[-2:] for each in (path / ".datastates-journal").iterdir())


def test_each_rank_compares_its_own(shared_dir):
    run_on_ranks(2, _run, path=shared_dir, end=44, resumed=False)
    assert _files(shared_dir) == ["-0", "-1"]
    run_on_ranks(2, _run, path=shared_dir, end=44, seed=1)
    assert _files(shared_dir) == ["-0", "-0", "-1", "-1"]


@pytest.mark.parametrize("defect", ["no loader", "moments dropped"])
def test_a_defect_is_named_by_each_rank(defect, shared_dir):
    run_on_ranks(2, _run, path=shared_dir, end=44, resumed=False, defect=defect)
    run_on_ranks(2, _run, path=shared_dir, end=44, seed=1, defect=defect, outcome="different")


@pytest.mark.parametrize(
    ("scale", "outcome"), [(1.0, "equal"), (1.001, "equal"), (1.1, "different")]
)
def test_at_another_number_of_ranks_losses_are_compared(scale, outcome, shared_dir):
    # Without a loader and generators, which such a restore refuses or leaves out.
    run_on_ranks(2, _same_loss, path=shared_dir, end=44, scale=1.0, outcome=None)
    run_on_ranks(1, _same_loss, path=shared_dir, end=44, scale=scale, outcome=outcome)


def _same_loss(path, end, scale, outcome):
    from support.state.loops import Stateful, manager

    with manager(path, 15, journal=True, save_last=False) as saves:
        state = {"model": Stateful({"step": 0})}
        done = saves.restore_latest(state)
        for step in range(0 if done is None else done + 1, end):
            saves.save(step, state, {"loss": scale / (1 + step)})
        found = saves.audit
    if outcome is None:
        assert found is None
    else:
        assert found.losses_only
        assert found.outcome == outcome, str(found)
        assert found.what == (() if outcome == "equal" else ("loss",))


PROGRAM = (
    ranks_of_torchrun(2)
    + """
from pathlib import Path
import torch.distributed as dist
from support.state.resumed import train
dist.init_process_group("gloo")
train(Path(sys.argv[1]), 1000, seed=5)
dist.destroy_process_group()
"""
)


def test_the_command_reads_the_reports_of_all_ranks(shared_dir, tmp_path, monkeypatch):
    run_on_ranks(2, _run, path=shared_dir, end=44, resumed=False)
    monkeypatch.setenv("PYTHONPATH", environment_of_python()["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, program, shared_dir]
    ended = run_cli("audit", shared_dir, "--json", "--", *command)
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["result"]) == (0, "equal")
    assert [(each["rank"], each["after"], each["last"]) for each in found["ranks"]] == [
        (0, 15, 35),
        (1, 15, 35),
    ]
    assert not list(shared_dir.glob(".datastates-audit-*"))
