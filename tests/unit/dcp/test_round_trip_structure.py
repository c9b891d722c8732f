"""Everything around the tensors comes back too: names, nesting, Python objects, nothing at all."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from support.state.checkpoints import (
    assert_same,
    async_save,
    committed,
    load,
    load_everything,
    put,
    raises,
    save,
    zeros,
)
from support.state.states import Opinion, filled

from dcp_datastates import verify
from dcp_datastates.errors import DataStatesError

both_ways = pytest.mark.parametrize("how", ["save", "async_save"])


@both_ways
def test_tuples_and_sets_come_back_as_objects(how, tmp_path):
    state = {"tuple": (1, "two", 3.0), "set": {1, 2}, "frozen": frozenset("ab"), "bytes": b"\0\xff"}
    put(how, state, tmp_path)
    assert_same(load(dict.fromkeys(state), tmp_path, allow_objects=True), state)


@both_ways
def test_training_objects_come_back(how, place):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    state = {
        "scheduler": scheduler.state_dict(),
        "torch rng": torch.get_rng_state(),
        "python rng": random.getstate(),
        "numpy rng": np.random.RandomState(5).get_state(legacy=False),
        "opinion": Opinion("mine", [0.5, 0.25]),
        "step": 7,
        "rate": 1e-300,
        "none": None,
        "big": 10**40,
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
    }
    put(how, state, place)
    loaded = load_everything(place)
    for name in (
        "torch rng",
        "opinion",
        "step",
        "rate",
        "none",
        "big",
        "dtype",
        "size",
        "python rng",
    ):
        assert_same(loaded[name], state[name], name)
    assert loaded["scheduler"]["last_epoch"] == 3
    restored = np.random.RandomState()
    restored.set_state(loaded["numpy rng"])
    assert restored.randint(1 << 30) == np.random.RandomState(5).randint(1 << 30)


@both_ways
def test_an_empty_state_dict_is_a_checkpoint(how, tmp_path):
    path = tmp_path / "empty"
    put(how, {}, path)
    assert committed(path)
    assert load({}, path) == {}
    assert load_everything(path) == {}


@both_ways
def test_a_state_of_objects_alone_comes_back(how, place):
    state = {"step": 3, "name": "a" * 100_000}
    put(how, state, place)
    assert load({"step": 0, "name": ""}, place) == state


def test_a_state_of_empty_tensors_alone_comes_back(place):
    state = {"a": torch.empty(0), "b": torch.empty(3, 0, dtype=torch.int8)}
    save(state, place)
    assert_same(load(zeros(state), place), state)


NAMES = [
    "weights.0.Ωμέγα",
    "emoji 🚀",
    "__metadata__",
    "__dcp_datastates__.crc32c.r00000-0",
    "a/b\\c",
    "..",
    ".hidden",
    "quote\"d 'name'",
    "new\nline\ttab",
    "nul\0byte",
    "x" * 10_000,
    "",
    " ",
    "CON",
    "DCP_SHARDING_INFO",
]


@both_ways
def test_unusual_names_come_back(how, place):
    state = {name: filled((11,), torch.float32, seed) for seed, name in enumerate(NAMES)}
    put(how, state, place)
    assert_same(load(zeros(state), place), state)


@both_ways
def test_objects_with_unusual_names_come_back(how, tmp_path):
    state = {name: {"number": seed} for seed, name in enumerate(NAMES)}
    put(how, state, tmp_path)
    assert_same(load({name: {"number": -1} for name in NAMES}, tmp_path), state)


def test_a_name_that_is_not_text_is_refused_and_not_committed(tmp_path):
    path = tmp_path / "c"
    with raises((DataStatesError, ValueError), "Unicode"):
        save({"\ud800": torch.ones(2)}, path)
    assert not committed(path)


@both_ways
def test_a_directory_whose_name_is_not_text_is_saved_to(how, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/step\xff-1")
    for number in range(2):
        state = {"w": torch.full((70_000,), float(number)), "n": number}
        put(how, state, path)
        assert_same(load_everything(path), state)
    assert verify(path).whole


@pytest.mark.parametrize("mutable", ["list", "dict", "object", "tensor in tuple"])
def test_python_values_are_those_at_the_call(mutable, tmp_path):
    values = {
        "list": [1, 2, 3],
        "dict": {"a": {"b": 1}},
        "object": Opinion("before", [1.0]),
        "tensor in tuple": (torch.ones(4), "t"),
    }
    value = values[mutable]
    future = async_save({"value": value, "w": torch.ones(100_000)}, tmp_path, reads=0.5)
    if mutable == "list":
        value.append(4)
    elif mutable == "dict":
        value["a"]["b"] = 2
    elif mutable == "object":
        value.name = "after"
        value.weights.append(2.0)
    else:
        value[0].fill_(5)
    future.result(60)
    found = load_everything(tmp_path)["value"]
    expected = {
        "list": [1, 2, 3],
        "dict": {"a": {"b": 1}},
        "object": Opinion("before", [1.0]),
        "tensor in tuple": (torch.ones(4), "t"),
    }[mutable]
    assert_same(found, expected)
