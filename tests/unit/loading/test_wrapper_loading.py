"""Tensors that consist of other tensors: stored as their parts, and loaded in place."""

import pytest
import torch
from support.state.checkpoints import async_save, committed, load_by_both, raises, save
from support.state.wrapped import Blocks, Other, Sometimes, blocks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner, track
from dcp_datastates.errors import IncompatibleStateError, UnsupportedTensorError


def _same(found, expected):
    return torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)


WAYS = {
    "dcp.async_save": lambda state, path: async_save(state, path).result(60),
    "dcp.save": lambda state, path: save(state, path, planner=DataStatesSavePlanner()),
    "async_save": lambda state, path: dcp_datastates.async_save(state, path).result(60),
}


@pytest.mark.parametrize("way", WAYS)
def test_wrappers_come_back_in_place_wherever_they_lie(way, tmp_path):
    def state(*seeds):
        one, two, three = (blocks(seed=seed) for seed in seeds)
        plain = torch.full((5,), float(seeds[0]))
        return {"model": {"w": one, "b": plain}, "list": [0, two], "p": torch.nn.Parameter(three)}

    saved, found = state(1, 2, 3), state(0, 0, 0)
    WAYS[way](saved, tmp_path)
    places = found["model"]["w"].codes.data_ptr(), found["list"][1].scales.data_ptr()
    load_by_both(found, tmp_path, unexpected="error")
    assert _same(found["model"]["w"], saved["model"]["w"])
    assert _same(found["list"][1], saved["list"][1])
    assert _same(found["p"], saved["p"])
    assert torch.equal(found["model"]["b"], saved["model"]["b"])
    assert places == (found["model"]["w"].codes.data_ptr(), found["list"][1].scales.data_ptr())


def test_a_wrapper_within_a_wrapper(tmp_path):
    saved, found = (Blocks(blocks(seed=seed), torch.full((4,), seed)) for seed in (1, 0))
    async_save({"w": saved}, tmp_path).result(60)
    load_by_both({"w": found}, tmp_path, unexpected="error")
    assert _same(found.codes, saved.codes)
    assert torch.equal(found.scales, saved.scales)


def test_a_part_that_the_wrapper_lacks_is_told_of(tmp_path, caplog):
    """Float8 weights of torchao have a scale at some times only; other classes a zero point."""
    saved, found = blocks(seed=1, kind=Sometimes), blocks(kind=Sometimes)
    saved.zero = torch.ones(3)
    async_save({"w": saved}, tmp_path).result(60)
    with raises(IncompatibleStateError, "'w.zero'", "1 of the 4"):
        load_by_both({"w": found}, tmp_path, unexpected="error")
    assert _same(found, blocks())
    load_by_both({"w": found}, tmp_path, unexpected="error", exclude="w.zero")
    assert _same(found, saved)
    load_by_both({"w": found}, tmp_path)
    assert "'w.zero'" in caplog.text


def test_another_class_within_a_wrapper_is_refused(tmp_path):
    async_save({"w": Blocks(blocks(seed=1), torch.zeros(4))}, tmp_path).result(60)
    found = Blocks(blocks(kind=Other), torch.zeros(4))
    with raises(IncompatibleStateError, "'w'", "codes: support.state.wrapped.Other"):
        load_by_both({"w": found}, tmp_path)
    assert _same(found.codes, blocks())


def test_the_parts_are_tensors_of_their_own(tmp_path):
    saved = blocks(seed=1, label=7)
    async_save({"w": saved}, tmp_path).result(60)
    parts = dcp_datastates.load(tmp_path, allow_objects=False)["w"]
    assert bytes(parts.pop("__wrapper__").numpy()).decode() == "support.state.wrapped.Blocks 7"
    assert parts.keys() == {"codes", "scales"}
    assert torch.equal(parts["codes"], saved.codes)
    into = {"w": {"scales": torch.zeros(4)}}
    dcp_datastates.load(tmp_path, into, only="w.scales", unexpected="error")
    assert torch.equal(into["w"]["scales"], saved.scales)


def test_keys_choose_wrappers_and_no_object_is_needed(tmp_path):
    saved, found = {"a": blocks(seed=1), "b": blocks(seed=2)}, {"a": blocks(), "b": blocks()}
    async_save(saved, tmp_path).result(60)
    dcp_datastates.load(tmp_path, found, only="a", allow_objects=False, unexpected="error")
    assert _same(found["a"], saved["a"])
    assert _same(found["b"], blocks())


def test_a_wrapper_that_is_left_unread_is_told_of(tmp_path):
    async_save({"a": blocks(seed=1), "b": blocks(seed=2)}, tmp_path).result(60)
    with raises(IncompatibleStateError, "'b.codes'", "3 of the 6"):
        load_by_both({"a": blocks()}, tmp_path, unexpected="error")
    load_by_both({"a": blocks()}, tmp_path, unexpected="error", exclude="b")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(8, 3), "a Tensor"),
        (None, "a NoneType"),
        (blocks(kind=Other), "support.state.wrapped.Other"),
        (blocks(label="other"), "Blocks 'other'"),
        (blocks(columns=4), "(8, 4)"),
        (blocks(rows=10), "(10, 3)"),
        (Blocks(torch.zeros(8, 3, dtype=torch.int16), torch.zeros(4)), "torch.int16"),
        (Blocks(torch.zeros(8, dtype=torch.int8), torch.zeros(4)), "(8,)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_a_tensor_changes(value, said, tmp_path):
    async_save({"a": blocks(seed=1), "w": blocks(seed=2)}, tmp_path).result(60)
    found = {"a": blocks(), "w": value}
    with raises(IncompatibleStateError, "'w", said):
        load_by_both(found, tmp_path)
    assert _same(found["a"], blocks())


def test_a_plain_checkpoint_is_copied_into_a_wrapper_as_the_class_does_it(tmp_path):
    values = torch.arange(24.0).view(8, 3)
    save({"w": values}, tmp_path)
    found = blocks(seed=1)
    load_by_both({"w": found}, tmp_path)
    assert torch.equal(found.dense(), values)


class _Hooked(DefaultSavePlanner):
    def lookup_object(self, index):
        return super().lookup_object(index)


def test_planners_with_hooks_are_refused_by_dcp_save_with_a_way_out(tmp_path):
    with raises(UnsupportedTensorError, "'w'", "Blocks", "DataStatesSavePlanner()"):
        save({"w": blocks(seed=1)}, tmp_path, planner=_Hooked())
    assert not committed(tmp_path)


@pytest.mark.parametrize("way", [save, async_save])
@pytest.mark.parametrize("kind", [DefaultSavePlanner, DataStatesSavePlanner])
def test_the_parts_are_stored_with_the_default_planner_as_with_this_packages(kind, way, tmp_path):
    state = {"m": {"w": blocks(seed=1)}, "n": [torch.ones(3), 4]}
    future = way(state, tmp_path, planner=kind())
    if future is not None:
        future.result(60)
    found = {"m": {"w": blocks()}, "n": [torch.zeros(3), 0]}
    load_by_both(found, tmp_path)
    assert _same(found["m"]["w"], state["m"]["w"])
    assert found["n"][0].eq(1).all()
    assert found["n"][1] == 4


@pytest.mark.parametrize("way", [save, async_save])
@pytest.mark.parametrize("kind", [DefaultSavePlanner, DataStatesSavePlanner])
def test_planners_that_do_not_flatten_are_refused(kind, way, tmp_path):
    """They would store the parts as one object, which no load puts into the wrapper."""
    with raises(UnsupportedTensorError, "'w'", "wraps"):
        future = way({"w": blocks(2048, 64)}, tmp_path, planner=kind(flatten_state_dict=False))
        future.result(60)
    assert not committed(tmp_path)


def test_parts_that_an_optimizer_owns_are_read_before_its_step_not_at_the_call(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(1024, 256))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state = blocks(1024, 256, seed=1)
    expected = state.codes.clone()
    optimizer.state[parameter]["moment"] = state
    track(optimizer)
    future = async_save({"m": state}, tmp_path, reads=3600)
    assert not future.done()
    optimizer.step()  # waits for the reads
    state.codes.zero_()
    future.result(60)
    found = blocks(1024, 256)
    load_by_both({"m": found}, tmp_path)
    assert torch.equal(found.codes, expected)


def test_plans_of_states_with_wrappers_are_cached(tmp_path):
    states = [blocks(seed=1), blocks(seed=2), blocks(columns=4)]
    handles = []
    for number, each in enumerate(states):
        handles.append(dcp_datastates.async_save({"cached": each}, tmp_path / str(number)))
        handles[-1].result(60)
    assert [handle.stats.steady for handle in handles] == [False, True, False]
