"""A resume is compared with the run before it: an exact one is told equal, and each defect is named."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
from support.state.loops import Loop, manager
from support.state.resumed import DEFECTS, FLIPPED, train
from support.waiting import lines

from dcp_datastates.journal import audit

END = 44
"""The first run dies after step 43, and its newest checkpoint is step 30."""


def _died(root, **options):
    assert train(root, END, **options) is None


def test_an_exact_resume_is_told_equal(tmp_path):
    _died(tmp_path)
    with lines() as said:
        found = train(tmp_path, END + 5, seed=1)
    assert (found.outcome, found.after, found.steps, found.last) == ("equal", 30, 13, 43)
    assert [
        each
        for each in said
        if "rank 0: steps 31 to 43 after the resume equal those before" in each
    ]
    assert str(found) == "rank 0: steps 31 to 43 after the resume equal those before"


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named(defect, tmp_path):
    _died(tmp_path, defect=defect)
    with lines(logging.WARNING) as said:
        found = train(tmp_path, END + 5, seed=1, defect=defect)
    assert found.outcome == "different"
    assert DEFECTS[defect] in found.cause
    assert any(str(found) in each for each in said)
    first = {"a bit": (30 + FLIPPED, 31 + FLIPPED), "no scheduler": (32, 33)}.get(defect, (31,))
    assert found.step in first
    in_optimizer = defect in ("no optimizer", "moments dropped")
    first = () if defect == "a copy" else ("exp_avg of 0.weight" if in_optimizer else "0.weight",)
    assert found.tensors[:1] == first
    assert all(repr(name) in str(found) for name in found.tensors)
    if defect == "no generator":
        assert "generators" in found.what


def test_a_resume_after_several_crashes_is_compared_with_the_newest_run(tmp_path):
    _died(tmp_path)
    assert train(tmp_path, END, seed=1, defect="moments dropped").outcome == "different"
    assert train(tmp_path, 40, seed=2, defect="moments dropped").outcome == "equal"
    assert train(tmp_path, END, seed=3).outcome == "different"


def test_a_run_that_ends_earlier_is_told_equal_as_far_as_it_came(tmp_path):
    _died(tmp_path)
    with lines() as said:
        found = train(tmp_path, 33, seed=1)
    assert (found.outcome, found.steps, found.last) == ("equal", 2, 32)
    assert any("steps 31 to 32 after the resume equal" in each for each in said)


def test_nothing_is_compared_where_the_run_before_ended_with_its_checkpoint(tmp_path):
    _died(tmp_path, save_last=True)
    with lines() as said:
        assert train(tmp_path, END + 3, seed=1).outcome == "not compared"
    assert any("has no steps after 43 to compare the resume with" in each for each in said)


@pytest.mark.parametrize("lost", ["the journal", "nothing is kept"])
def test_without_a_journal_nothing_is_compared(lost, tmp_path):
    if lost == "the journal":
        _died(tmp_path)
        shutil.rmtree(tmp_path / ".datastates-journal")
        assert train(tmp_path, END, seed=1).outcome == "not compared"
    else:
        _died(tmp_path, journal=False)
        assert train(tmp_path, END, seed=1, journal=False) is None
        assert not (tmp_path / ".datastates-journal").exists()


def test_a_loss_that_is_measured_otherwise_is_named(tmp_path):
    _died(tmp_path)
    found = train(tmp_path, END, seed=1, scale=1.5)
    assert found.what == ("loss",)
    assert "the loss is another number" in found.cause


def test_an_audited_loop_says_that_it_saves_nothing(tmp_path, monkeypatch):
    order = {"root": str(tmp_path), "steps": 1, "report": f"{tmp_path}/report-"}
    monkeypatch.setenv(audit.VARIABLE, json.dumps(order))
    loop = Loop()
    with lines() as said, manager(tmp_path) as saves:
        assert saves.save(0, loop.state) is None
        assert saves.stopping
    assert any("saves and deletes nothing" in line for line in said)
    assert not list(tmp_path.glob("step-*"))
