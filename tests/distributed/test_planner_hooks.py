"""Planners with hooks of their own: no step of theirs is passed over, whatever is remembered."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, assert_same, entries, load, raises, zeros
from support.state.planners import (
    FailingPlanner,
    Skipping,
    own_step,
    owned,
    save_by,
    saved_alone,
    saver,
)
from support.state.states import filled
from support.tiers import sampled
from support.waiting import await_that
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesSavePlanner, DataStatesWriter
from dcp_datastates.dcp.planner import options_in_columns
from dcp_datastates.errors import DataStatesError


class _Noting(DataStatesSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        if any(plan.items for plan in plans):  # DCP shows it empty ones first
            assert {item.index.fqn for plan in plans for item in plan.items} == {"skip", "w"}
        noted = {**metadata.planner_data, "note": ("mine",)}
        return plans, dataclasses.replace(metadata, planner_data=noted)


def save_how(how, state, planner, path):
    """A save, synchronous or not, that is over on all ranks."""
    if how == "save":
        dcp.save(state, storage_writer=saver(path), planner=planner, process_group=own_group())
        dist.barrier()
    else:
        save_by(state, saver(path), planner)


@ranks(2)
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_subclass_that_edits_a_plan_has_its_way(how, shared_dir):
    skipping, noting = Skipping(), _Noting()
    for number in range(3):
        state = {"w": torch.full((4,), float(number)), "skip": torch.ones(3)}
        save_how(how, state, skipping, shared_dir / "skipping")
        save_how(how, state, noting, shared_dir / "noting")
        assert set(entries(shared_dir / "skipping")) == {"w"}
        metadata = DataStatesReader(shared_dir / "noting").read_metadata()
        assert metadata.planner_data == {"w": ("w",), "skip": ("skip",), "note": ("mine",)}
        for name in ("skipping", "noting"):
            found = load({"w": torch.zeros(4)}, shared_dir / name)
            assert found["w"].eq(number).all()
        dist.barrier()


@ranks(2)
@pytest.mark.parametrize(
    ("edits", "other", "how"),
    sampled(
        itertools.product(
            [0, 1], [DataStatesSavePlanner, DefaultSavePlanner], ["save", "async_save"]
        ),
        keep=[(0, DefaultSavePlanner, "async_save"), (1, DataStatesSavePlanner, "save")],
    ),
)
def test_a_subclass_that_edits_plans_on_one_rank_only_is_refused(edits, other, how, shared_dir):
    kind = Skipping if dist.get_rank() == edits else other
    with raises(DataStatesError, "one class on all ranks"):
        save_how(how, {"w": torch.ones(4)}, kind(), shared_dir / "c")
    dist.barrier()
    save_how(how, {"w": torch.ones(4)}, None, shared_dir / "c")
    assert_same(load({"w": torch.zeros(4)}, shared_dir / "c"), {"w": torch.ones(4)})


_PLAIN = DefaultSavePlanner.transform_object


def _doubling(planner, write_item, value):
    return _PLAIN(planner, write_item, value * 2 if isinstance(value, torch.Tensor) else value)


@pytest.mark.parametrize("kind", [DataStatesSavePlanner, DefaultSavePlanner])
def test_no_method_of_the_default_planner_can_be_overridden_unseen(kind):
    assert options_in_columns(kind()) is not None
    assert options_in_columns(type("Derived", (kind,), {"note": lambda self: None})()) is not None
    for name, method in vars(DefaultSavePlanner).items():
        if callable(method) and not name.startswith("__"):
            derived = type("Derived", (kind,), {name: lambda *args: None})
            assert options_in_columns(derived()) is None, name


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "on", "how"),
    sampled(
        itertools.product(
            [DataStatesSavePlanner, DefaultSavePlanner], ["object", "class"], ["save", "async_save"]
        ),
        keep=[
            (DataStatesSavePlanner, "class", "async_save"),
            (DefaultSavePlanner, "object", "save"),
        ],
    ),
)
def test_a_hook_that_is_set_later_is_not_passed_over_because_plans_are_remembered(
    kind, on, how, shared_dir
):
    torch.manual_seed(0)
    planner, state = kind(), {"w": torch.rand(300, 300)}
    owned = torch.nn.Parameter(state["w"])
    optimizer = torch.optim.SGD([owned], lr=0.0)
    dcp_datastates.track(optimizer)
    stored = []
    for number in range(6):
        if on == "object" and number == 3:
            planner.transform_object = functools.partial(_doubling, planner)
        hooked = contextlib.nullcontext()
        if on == "class" and number >= 3:
            hooked = mock.patch.object(kind, "transform_object", _doubling)
        with hooked:
            save_how(how, {"w": owned.detach()}, planner, shared_dir / "c")
        stored.append(load(zeros(state), shared_dir / "c")["w"])
        dist.barrier()
    for number, found in enumerate(stored):
        assert_same(found, state["w"] * (1 if number < 3 else 2))


def _replace_transform(planner):
    planner.transform_object = functools.partial(_doubling, planner)


def _replace_set_up(planner):
    """By one that takes no ``storage_meta``."""
    plain = planner.set_up_planner
    planner.set_up_planner = lambda state_dict, is_coordinator: plain(
        {name: value * 2 for name, value in state_dict.items()}, None, is_coordinator
    )


@ranks(1)
@pytest.mark.parametrize("replace", [_replace_transform, _replace_set_up])
def test_a_hook_that_is_set_right_after_the_call_has_the_state_to_work_on(replace, shared_dir):
    planner, state = DataStatesSavePlanner(), {"w": torch.rand(300, 300)}
    for _ in range(2):
        saved_alone(state, planner, shared_dir / "c")
    go_on = threading.Event()

    def held(plain, *args):
        assert go_on.wait(60)
        return plain(*args)

    by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE)
    with own_step("propose", held):  # of the save before
        before = dcp_datastates.async_save(state, writer=by, planner=planner)
        response = dcp_datastates.async_save(state, writer=by, planner=planner)
        replace(planner)
        go_on.set()
        before.result(60)
        response.result(60)
    assert_same(load(zeros(state), shared_dir / "c")["w"], state["w"] * 2)


@ranks(2)
def test_options_that_are_changed_on_the_planner_are_not_passed_over(shared_dir):
    planner = DataStatesSavePlanner()
    state, _optimizer = owned({"w": filled((4000, 300), torch.float32, 1)})
    by = saver(shared_dir / "c")
    for _ in range(2):
        save_by(state, by, planner)
    assert len(entries(shared_dir / "c")["w"].chunks) == 2
    dist.barrier()
    planner.dedup_save_to_lowest_rank = True
    save_by(state, by, planner)
    assert len(entries(shared_dir / "c")["w"].chunks) == 1
    dist.barrier()
    assert (by.last_save.written_bytes > state["w"].nbytes) == (dist.get_rank() == 0)
    nested = {"a": {"w": torch.ones(3)}}
    save_by(nested, by, planner)
    save_by(nested, by, planner)
    planner.flatten_state_dict = False
    save_by(nested, by, planner)
    assert set(entries(shared_dir / "c")) == {"a"}


@ranks(2)
@pytest.mark.parametrize(
    ("stock", "how"),
    sampled(
        itertools.product([0, 1], ["save", "async_save"]), keep=[(0, "async_save"), (1, "save")]
    ),
)
def test_the_default_planner_and_this_packages_go_together(stock, how, shared_dir):
    planner = DefaultSavePlanner() if dist.get_rank() == stock else DataStatesSavePlanner()
    for number in range(2):
        state = {"all": torch.full((8,), float(number)), f"{dist.get_rank()}": torch.ones(3)}
        save_how(how, state, planner, shared_dir / "c")
        found = load(
            {"all": torch.zeros(8), "0": torch.zeros(3), "1": torch.zeros(3)}, shared_dir / "c"
        )
        assert found["all"].eq(number).all()
        assert found["0"].eq(1).all()
        assert found["1"].eq(1).all()
        dist.barrier()


@ranks(2)
@pytest.mark.parametrize("where", ["set_up_planner", "create_local_plan", "resolve_data"])
def test_an_error_that_is_kept_keeps_nothing_that_the_save_was_given(where, shared_dir):
    weight, planner = torch.ones(1000), FailingPlanner(where)
    gone = [weakref.ref(weight)]
    if (
        where != "resolve_data"
    ):  # DCP's function that calls it is a closure: its frame keeps the planner
        gone.append(weakref.ref(planner))
    response = dcp_datastates.async_save(
        {"weight": weight},
        shared_dir / "c",
        planner=planner,
        reads="immediate",
        host_cache_size=CACHE,
    )
    kept = response.upload_completion.exception(60)
    assert "refused in" in str(kept)
    del weight, planner
    await_that(lambda: gc.collect() >= 0 and all(each() is None for each in gone))
    dist.barrier()
