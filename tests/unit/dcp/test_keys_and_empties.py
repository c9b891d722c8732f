"""The keys of dicts come back with their types, and empty dicts where they were, for every way to save and to load."""

import enum
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import CACHE, assert_same, load_everything, save, writer
from support.state.states import filled
from support.tiers import sampled
from support.waiting import lines
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates as ds
from dcp_datastates import CheckpointManager, DataStatesSavePlanner
from dcp_datastates.errors import IncompatibleStateError


class Phase(enum.IntEnum):
    WARM_UP = 1


class Kind(str, enum.Enum):
    BEST = "best"


KEYS = [0, -3, 10**12, 1.5, float("inf"), True, None, b"raw", (1, "a"), torch.float16]
EQUAL_KEYS = {Phase.WARM_UP: 1, np.int64(7): 7, Kind.BEST: "best"}
"""Keys that come back as another key, which is equal."""


TENSOR = filled((3, 2), torch.float32, 1)
LEAVES = {"number": 3, "tensor": TENSOR, "dict": {"x": TENSOR}, "list": [1, [2]], "tuple": (1, {})}


def with_empties():
    """Empty dicts at every position, beside every kind of value, in every container, at several depths."""
    cases = itertools.product(LEAVES.items(), range(3), ("list", "dict"), ("", "list", "dict"))
    for (kind, leaf), position, around, further in cases:
        values = [leaf, leaf]
        values.insert(position, {})
        value = values if around == "list" else dict(zip("abc", values, strict=True))
        value = {"": value, "list": [value], "dict": {"k": value}}[further]
        yield f"{position} beside a {kind} in a {around} {further}", value
    yield "alone", {}
    yield "in a list", [{}]
    yield "at two depths", [[{}], {}]
    yield "empty lists", [1, []]
    yield "empty lists beside tensors", [[], TENSOR, []]
    yield "an empty list", []


def with_keys():
    """Keys of every type, above every kind of value, at several depths."""
    for key, (kind, leaf) in itertools.product(KEYS, LEAVES.items()):
        yield f"{key} to a {kind}", {key: leaf}
    yield "at every depth", {0: {1: {}}, 2: [{3: TENSOR}]}
    yield "many", {number: {number: number} for number in range(12)}


STATE = {**dict(with_empties()), **dict(with_keys()), 5: TENSOR}


def by_async_save(state, path):
    ds.async_save(state, path, host_cache_size=CACHE).result(60)


def by_a_stock_planner(state, path):
    ds.async_save(state, path, host_cache_size=CACHE, planner=DefaultSavePlanner()).result(60)


def by_dcp(state, path):
    save(state, path, planner=DataStatesSavePlanner())


def by_dcp_async(state, path):
    to = writer(path)
    dcp.async_save(state, storage_writer=to, planner=DataStatesSavePlanner()).result(60)


def by_convert(state, path):
    file = Path(f"{path}.pt")
    torch.save(state, file)
    ds.convert(file, path)


def by_convert_twice(state, path):
    by_async_save(state, f"{path}-first")
    ds.convert(f"{path}-first", path, "datastates")


def by_path(path, _state):
    return ds.load(path)


def to_torch(path, _state):
    file = Path(f"{path}.out")
    ds.convert(path, file, "torch")
    return torch.load(file)


def into_a_state(path, state):
    return ds.load(path, cleared(state), unexpected="error")


def cleared(value):
    """The same structure with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: cleared(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(cleared, value))
    return None


def kinds(value):
    """The keys of all dicts, with their types: 1 and True are equal."""
    if isinstance(value, dict):
        return {(type(key), key): kinds(each) for key, each in value.items()}
    return list(map(kinds, value)) if isinstance(value, list) else type(value)


SAVES = (by_async_save, by_a_stock_planner, by_dcp, by_dcp_async, by_convert, by_convert_twice)
WAYS = [
    pytest.param(put, get, id=f"{put.__name__}-{get.__name__}")
    for put, get in itertools.product(SAVES, (by_path, to_torch, into_a_state))
]


@pytest.mark.parametrize(
    ("put", "get"),
    sampled(WAYS, lambda each: each.values[0] is by_async_save or each.values[1] is by_path),
)
def test_keys_and_empty_dicts_come_back(put, get, tmp_path):
    state = STATE
    put(state, tmp_path / "c")
    found = get(tmp_path / "c", state)
    assert_same(found, state)
    assert kinds(found) == kinds(state)


def test_the_manager_gives_them_to_a_state_that_has_none(tmp_path):
    with CheckpointManager(tmp_path, every=1, host_cache_size=CACHE) as checkpoints:
        checkpoints.save(0, {"state": STATE})
        for empty in ({}, cleared(STATE)):
            state = {"state": empty}
            assert checkpoints.restore(0, state) is not None
            assert_same(state["state"], STATE)
            assert state["state"] is empty, "it stays the program's own"


@pytest.mark.parametrize("key", EQUAL_KEYS)
def test_a_key_that_equals_a_plain_one_comes_back_plain(key, tmp_path):
    ds.save({"s": {key: TENSOR}}, tmp_path / "c")
    assert_same(ds.load(tmp_path / "c"), {"s": {EQUAL_KEYS[key]: TENSOR}})


def test_a_key_that_cannot_be_stored_is_named(tmp_path):
    with lines() as said:
        ds.save({"s": {frozenset({3}): 1}}, tmp_path / "c")
    assert ds.load(tmp_path / "c") == {"s": {"frozenset({3})": 1}}
    (line,) = [each for each in said if "comes back as a string" in each]
    assert "frozenset({3})" in line


def test_only_exclude_and_rename_take_empty_dicts_by_name(tmp_path):
    ds.save({"a": [1, {}], "b": {"c": {}, "d": 2}, "e": {}}, tmp_path / "c")
    assert ds.load(tmp_path / "c", only="a") == {"a": [1, {}]}
    assert ds.load(tmp_path / "c", exclude=["b.c", "a"]) == {"b": {"d": 2}, "e": {}}
    assert ds.load(tmp_path / "c", only="f", rename={"b.": "f."}) == {"f": {"c": {}, "d": 2}}
    with pytest.raises(IncompatibleStateError, match=r"'b\.c'"):
        ds.load(tmp_path / "c", {"b": {"c": 5, "d": 0}})


def test_dcp_s_own_planner_reads_what_has_types(tmp_path):
    ds.save({"s": {0: TENSOR, 1: {}}, "n": {2: 5}}, tmp_path / "c")
    assert_same(load_everything(tmp_path / "c"), {"s": {"0": TENSOR}, "n": {"2": 5}})


def optimizer():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    return torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    )


def stepped():
    made = optimizer()
    for group in made.param_groups:
        for number, parameter in enumerate(group["params"]):
            parameter.grad = torch.full_like(parameter, number + 1.0)
    made.step()
    return made


def by_stock_dcp(state, path):
    stock = f"{path}-stock"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(stock), no_dist=True)
    ds.convert(stock, path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("get", [by_path, to_torch])
@pytest.mark.parametrize("put", [*SAVES, save, by_stock_dcp])
def test_an_optimizer_takes_what_comes_back(put, get, tmp_path):
    before = stepped()
    put({"o": before.state_dict(), "epoch": 3}, tmp_path / "c")
    after = optimizer()
    after.load_state_dict(get(tmp_path / "c", None)["o"])
    assert_same(after.state_dict(), before.state_dict())
    assert all(after.state[each] for group in after.param_groups for each in group["params"])


def test_names_that_are_numbers_stay_names(tmp_path):
    state = {"o": {"state": {"0": {"step": 1}}, "param_groups": [{"params": ["0"]}]}}
    save(state, tmp_path / "c")
    assert_same(ds.load(tmp_path / "c"), state)
