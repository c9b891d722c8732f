"""What a loop goes on from: it resumes, starts from scratch and says so, or is refused; a former run loses nothing."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from support.simulated.object_stores import MemoryStore, installed
from support.state.checkpoints import raises
from support.state.loops import manager
from support.state.roots import committed_names

import dcp_datastates as ds
from dcp_datastates import Keep
from dcp_datastates.checkpoints.listing import checkpoints, directories
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import ConfigurationError, IncompatibleStateError
from dcp_datastates.storage.object_path import locate

KINDS = ["directory", "store"]


@pytest.fixture
def root(request, tmp_path, monkeypatch):
    """The root of a run, in a directory or in a store."""
    if request.param == "directory":
        return str(tmp_path)
    if request.param == "s3":
        return request.getfixturevalue("s3_root")
    return str(installed(monkeypatch, MemoryStore()).parent)


def save(root, *steps, value=1.0, **options):
    with manager(root, **options) as loop:
        for step in steps:
            loop.save(step, {"w": torch.full((1000,), value)})


def names(root):
    return [path.name for path in checkpoints(locate(root))]


def weight(path):
    return ds.load(path)["w"][0].item()


def set_aside(root):
    place = locate(root)
    return next(each for each in directories(place) if each.name.startswith("set-aside-"))


@pytest.mark.parametrize("root", KINDS, indirect=True)
@pytest.mark.parametrize("step", [0, 98, 99])
@pytest.mark.parametrize("keep", [None, 2])
def test_another_run_does_not_begin_among_the_checkpoints_of_a_former_one(root, step, keep):
    save(root, 96, 97, 98, 99, keep=2)
    with raises(ConfigurationError, "has step-99 (", "s old)", "restore_latest()", "another root"):
        save(root, step, value=2.0, keep=keep)
    assert names(root) == ["step-98", "step-99"]
    assert weight(ds.latest(root)) == 1.0


def test_a_loop_is_refused_by_its_first_step_also_if_no_save_was_due_there(tmp_path):
    save(tmp_path, 50)
    with raises(ConfigurationError, "begins at step 1"), manager(tmp_path, every=100) as loop:
        for step in range(1, 101):
            loop.save(step, {"w": torch.ones(10)})


def test_a_refused_loop_is_refused_again(tmp_path):
    save(tmp_path, 9)
    with manager(tmp_path, save_last=False) as loop:
        for step in range(2):
            with raises(ConfigurationError, "step-9"):
                loop.save(step, {"w": torch.ones(10)})
        assert loop.failures == 0
    assert committed_names(tmp_path) == ["step-9"]


@pytest.mark.parametrize("root", [*KINDS, "s3"], indirect=True)
def test_a_run_that_replaces_a_former_one_sets_it_aside(root, caplog):
    save(root, 1, 2, 3)
    ds.pin(locate(root) / "step-2", "eval")
    save(root, 0, 2, value=2.0, keep=1, fresh="replace")
    assert names(root) == ["step-2"]
    assert weight(locate(root) / "step-2") == 2.0
    aside = set_aside(root)
    assert names(str(aside)) == ["step-1", "step-2", "step-3"]
    assert {weight(aside / f"step-{step}") for step in (1, 2, 3)} == {1.0}
    assert pins(aside / "step-2") == ("eval",)
    assert aside.name in caplog.text


def test_a_run_that_replaces_a_former_one_sets_it_aside_on_each_tier(tmp_path, monkeypatch):
    fast, slow = str(tmp_path), str(installed(monkeypatch, MemoryStore()).parent)
    for value, options in ((1.0, {}), (2.0, {"fresh": "replace"})):
        with manager(fast, archive=slow, keep=1, **options) as loop:
            for step in (1, 2):
                loop.save(step, {"w": torch.full((1000,), value)})
            loop.wait()
    assert (names(fast), names(slow)) == (["step-2"], ["step-1", "step-2"])
    assert weight(f"{fast}/step-2") == weight(f"{slow}/step-1") == 2.0
    former = {name: weight(set_aside(slow) / name) for name in names(str(set_aside(slow)))}
    assert former == {"step-1": 1.0, "step-2": 1.0}
    assert names(str(set_aside(fast))) == ["step-2"]


def test_a_run_that_may_replace_others_goes_on_from_its_own(tmp_path):
    save(tmp_path, 5)
    state = {"w": torch.zeros(1000)}
    with manager(tmp_path, fresh="replace") as loop:
        assert loop.restore_latest(state) == 5
        loop.save(6, state)
    assert committed_names(tmp_path) == ["step-5", "step-6"]


@pytest.mark.parametrize("root", KINDS, indirect=True)
def test_a_restored_run_deletes_its_own_old_checkpoints(root):
    save(root, 1, 2, 3)
    with manager(root, keep=2) as loop:
        assert loop.restore_latest({"w": torch.zeros(1000)}) == 3
        loop.save(4, {"w": torch.ones(1000)})
    assert names(root) == ["step-3", "step-4"]


@pytest.mark.parametrize("root", KINDS, indirect=True)
def test_what_another_run_saves_meanwhile_is_not_deleted_and_does_not_count(root):
    with manager(root, keep=1) as loop:
        assert loop.restore_latest({"w": torch.zeros(1000)}) is None
        ds.save({"w": torch.zeros(1000)}, locate(root) / "step-70")
        for step in (1, 2):
            loop.save(step, {"w": torch.ones(1000)})
    assert names(root) == ["step-2", "step-70"]


def test_a_loop_that_has_loaded_by_itself_goes_on_above_and_keeps_by_its_rules(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save(tmp_path, 1, 2)
    save(tmp_path, 3, 4, keep=Keep(last=1))
    assert committed_names(tmp_path) == ["step-4"]
    assert "going on at step 3 without a restore" in caplog.text


@pytest.mark.parametrize("root", KINDS, indirect=True)
@pytest.mark.parametrize("restores", [True, False])
def test_a_start_from_scratch_is_a_line_of_the_log(root, restores, caplog):
    caplog.set_level(logging.INFO)
    with manager(root) as loop:
        if restores:
            assert loop.restore_latest({"w": torch.zeros(10)}) is None
        for step in range(3):
            loop.save(step, {"w": torch.ones(10)})
    (line,) = [each for each in caplog.messages if "starting from scratch" in each]
    assert line == f"starting from scratch: {root!r} is empty"


def test_numbers_may_have_zeros_in_front(tmp_path):
    save(tmp_path, 1, 2)
    os.rename(tmp_path / "step-2", tmp_path / "step-000002")
    state = {"w": torch.zeros(1000)}
    with manager(tmp_path, keep=1) as loop:
        assert (loop.steps(), loop.latest_step) == ([1, 2], 2)
        assert loop.restore(2, state) == 2
        assert loop.restore_latest(state) == 2
        loop.save(3, state)
    assert state["w"].eq(1).all()
    assert committed_names(tmp_path) == ["step-3"]


@pytest.mark.parametrize("root", KINDS, indirect=True)
@pytest.mark.parametrize("name", ["step-2-good", "best", "step_2", "checkpoint-2"])
def test_checkpoints_of_other_names_are_named_and_no_loop_starts_beside_them_in_silence(root, name):
    ds.save({"w": torch.ones(1000)}, locate(root) / name)
    state = {"w": torch.zeros(1000)}
    with manager(root) as loop, raises(ConfigurationError, f"other names: {name}"):
        loop.restore_latest(state)
    with manager(root, fresh="replace") as loop:
        assert loop.restore_latest(state) is None
        loop.save(0, state)
    assert names(root) == sorted([name, "step-0"])


def test_the_options_of_restores_are_given_once_and_a_call_may_have_others(tmp_path):
    save(tmp_path, 1)
    state = {"v": torch.zeros(1000), "new": torch.zeros(1)}
    with manager(tmp_path, rename={"w": "v"}, missing="ignore") as loop:
        assert loop.restore_latest(state) == 1
        assert state["v"].eq(1).all()
        with raises(ds.errors.IncompatibleStateError, "new"):
            loop.restore(1, state, missing="error")
    with manager(tmp_path, exclude="w") as loop:
        left = {"w": torch.zeros(1000)}
        assert loop.restore_latest(left) == 1
    assert left["w"].eq(0).all()


class _Fails:
    """An object that does not take its state, as on one of several ranks."""

    error: BaseException | None = None

    def state_dict(self):
        return {"at": 1}

    def load_state_dict(self, state):
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_state_that_is_half_restored_is_not_saved(error, tmp_path):
    weight, other = torch.ones(10), _Fails()
    with manager(tmp_path) as loop:
        loop.save(3, {"w": weight, "other": other})
    state = {"w": torch.zeros(10), "other": other}
    with manager(tmp_path, fresh="replace") as loop:
        other.error = error
        with pytest.raises(type(error)):
            loop.restore_latest(state)
        for _ in range(2):
            with raises(ConfigurationError, "step-3 has failed half way", "Restore again"):
                loop.save(4, state)
        other.error = None
        assert loop.restore_latest(state) == 3
        loop.save(4, state)
    assert names(tmp_path) == ["step-3", "step-4"]


def test_a_restore_that_is_refused_before_it_changes_anything_is_not_half(tmp_path):
    save(tmp_path, 3)
    state = {"w": torch.zeros(5)}
    with manager(tmp_path) as loop:
        with raises(IncompatibleStateError, "'w'"):
            loop.restore_latest(state)
        loop.save(4, state)
    assert names(tmp_path) == ["step-3", "step-4"]
