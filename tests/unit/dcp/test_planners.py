"""Any planner works: stock with cached plans, one that transforms, one that fails."""

import gc
import itertools
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import (
    CACHE,
    Malice,
    assert_same,
    async_save,
    clone,
    committed,
    load,
    load_everything,
    put,
    raises,
    save,
    writer,
    zeros,
)
from support.state.loops import owned
from support.state.planners import (
    FailingPlanner,
    HalvingPlanner,
    PlannerRefusal,
    forget_cached_plans,
)
from support.state.states import filled
from support.tiers import sampled, tries
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner
from dcp_datastates.dcp.object_planning import ObjectPlanning
from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.io import engine as engine_module
from dcp_datastates.wire.secret import signed


def _caching():
    return DefaultSavePlanner(enable_plan_caching=True)


def _number(path):
    """The one number that fills all of a checkpoint written by ``_filled_with``."""
    found = load_everything(path)
    numbers = {found["object"]["n"], *found["w"].unique().tolist(), *found["s"].unique().tolist()}
    assert len(numbers) == 1, f"{path} mixes saves: {numbers}"
    return numbers.pop()


def _filled_with(number):
    return {
        "w": torch.full((300_000,), float(number)),
        "s": torch.full((3,), number),
        "object": {"n": number},
    }


@pytest.mark.parametrize("between", tries(30, 300))
def test_a_cached_plan_never_leads_to_the_attempt_of_an_earlier_save(between, tmp_path):
    """DCP caches plans in the class, for as long as the process lives, whatever the process group."""
    forget_cached_plans()
    save(_filled_with(0), tmp_path / "best", planner=_caching())
    for number in range(between):
        save({"n": number}, tmp_path / "other", planner=DefaultSavePlanner())
    save(_filled_with(1), tmp_path / "best", planner=_caching())
    assert _number(tmp_path / "best") == 1


CHANGING = {
    "structure": [
        {"a": filled((5,), torch.float32)},
        {"a": filled((9,), torch.float32), "b": filled((2, 2), torch.int8)},
        {"b": filled((2, 2), torch.int16), "object": "x"},
        {"a": filled((5,), torch.float32)},
    ],
    "objects that grow": [{"text": "x" * 10_000 * n, "w": torch.ones(10)} for n in range(4)],
}


@pytest.mark.parametrize("states", CHANGING.values(), ids=CHANGING)
def test_cached_plans_notice_what_changes(states, tmp_path):
    planner = _caching()
    for number, state in enumerate(states):
        save(state, tmp_path / str(number), planner=planner)
    for number, state in enumerate(states):
        assert_same(load_everything(tmp_path / str(number)), state)


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_planner_that_transforms_decides_what_is_stored(how, tmp_path):
    state = {"w": torch.randn(200, 500), "n": torch.arange(100_000), "tiny": torch.randn(3)}
    put(how, state, tmp_path, planner=HalvingPlanner())
    expected = {"w": state["w"].half(), "n": state["n"], "tiny": state["tiny"].half()}
    assert_same(load(zeros(expected), tmp_path), expected)


def test_a_transforming_planner_sees_the_values_at_the_call(tmp_path):
    state, optimizer = owned(300_000, 3.0)
    expected = state["w"].half()
    future = async_save(state, tmp_path, planner=HalvingPlanner())
    optimizer.step()
    future.result(60)
    assert_same(load({"w": torch.zeros(300_000, dtype=torch.float16)}, tmp_path), {"w": expected})


class Around:
    """Plans by another planner, and doubles what is stored. Not one of this package's classes."""

    def __init__(self):
        self._inner = DataStatesSavePlanner()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def resolve_data(self, write_item):
        return self._inner.resolve_data(write_item) * 2


def test_a_planner_around_ours_decides_what_is_stored_in_each_save(tmp_path):
    planner, state = Around(), {"w": torch.ones(200, 500)}
    for number in range(3):
        path, options = tmp_path / str(number), {"metrics": {"loss": float(number)}}
        dcp_datastates.save(state, path, planner=planner, host_cache_size=CACHE, **options)
        assert_same(load(zeros(state), path), {"w": torch.full((200, 500), 2.0)})
        assert dcp_datastates.inspect(path).metrics == {"loss": number}


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_planner_around_ours_is_refused_where_dcp_calls_it(how, tmp_path):
    """It would be asked for nothing: ours plans nothing towards DCP."""
    state = {"w": torch.ones(200, 500)}
    with raises(ConfigurationError, "derive from it"):
        put(how, state, tmp_path, planner=Around())
    save(state, tmp_path, planner=DataStatesSavePlanner())
    assert_same(load(zeros(state), tmp_path), state)


def test_keeping_the_nesting_unflattened_works(tmp_path):
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"w": filled((100,), torch.float32), "object": {"a": {"b": 1}}}
    save(state, tmp_path, planner=planner)
    assert_same(load_everything(tmp_path), state)


@pytest.mark.parametrize(
    ("where", "how"),
    sampled(
        itertools.product(
            [
                *("set_up_planner", "create_local_plan", "create_global_plan"),
                *("finish_plan", "resolve_data"),
            ],
            ["save", "async_save"],
        ),
        keep=lambda case: (case[1] == "save") == (case[0] == "finish_plan"),
    ),
)
def test_a_failing_planner_fails_its_save_only(where, how, tmp_path):
    state, optimizer = owned(500_000, 3.0)
    state["small"] = torch.ones(4)
    ours = writer(reads=30)
    bad, good = tmp_path / "bad", tmp_path / "good"
    with raises(PlannerRefusal, where):
        if how == "save":
            save(state, bad, planner=FailingPlanner(where))
        else:
            future = async_save(
                state, None, by=ours, checkpoint_id=bad, planner=FailingPlanner(where)
            )
            optimizer.step()  # must not wait for a save that is no more
            future.result(60)
    assert not committed(bad)
    expected = clone(state)
    future = async_save(state, None, by=ours, checkpoint_id=good)
    optimizer.step()
    future.result(60)
    assert_same(load_everything(good), expected)
    gc.collect()
    stats = engine_module.stats()
    assert stats is not None
    assert stats.free_segments == stats.total_segments, "a failed save kept its host cache"


class _Stopping(DefaultSavePlanner):
    """Fails between DCP's planning and the writer's, if it is told to."""

    stops = False

    def finish_plan(self, new_plan):
        if self.stops:
            raise PlannerRefusal
        return super().finish_plan(new_plan)


def test_a_save_that_fails_while_dcp_plans_leaves_no_empty_plan_in_a_planners_cache(tmp_path):
    forget_cached_plans()
    state, planner = {"w": torch.ones(3)}, _Stopping(enable_plan_caching=True)
    for number in range(2):
        dcp.save(state, checkpoint_id=tmp_path / f"stock-{number}", planner=planner)
        found = {"w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=tmp_path / f"stock-{number}")
        assert_same(found, state)
        planner.stops = True
        with raises(PlannerRefusal):
            save({"other": torch.ones(5)}, tmp_path / "c", planner=planner)
        planner.stops = False


@pytest.mark.parametrize("secret", ["", "r" * 32])
def test_plans_of_strangers_are_not_unpickled(secret, tmp_path, monkeypatch):
    """Who may write to the job's store does not know the job's secret."""
    victim, planner = tmp_path / "created", HalvingPlanner()
    planning = ObjectPlanning(planner, lambda _: planner.create_local_plan(), None)
    monkeypatch.setenv("DCP_DATASTATES_SECRET", secret)
    forged = signed(pickle.dumps(Malice(victim)))
    monkeypatch.setenv("DCP_DATASTATES_SECRET", "s" * 32)
    for read in (planning.take, lambda data: planning.assign([data])):
        with raises(DataStatesError, "not signed by the job's secret"):
            read(forged)
    assert not victim.exists()
