"""Everything around the tensors comes back too: names, nesting, Python objects, nothing at all."""

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

from dcp_datastates.errors import DataStatesError

both_ways = pytest.mark.parametrize("how", ["save", "async_save"])


LITTLE = {
    "nothing": {},
    "objects": {"step": 3, "name": "a" * 100_000},
    "empty tensors": {"a": torch.empty(0), "b": torch.empty(3, 0, dtype=torch.int8)},
}


@both_ways
@pytest.mark.parametrize("state", LITTLE.values(), ids=LITTLE)
def test_a_state_of_nothing_or_of_one_kind_alone_comes_back(state, how, place):
    put(how, state, place)
    assert_same(load(zeros(state), place), state)
    assert_same(load_everything(place), state)


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
    state |= {f"object {name}": {name: seed} for seed, name in enumerate(NAMES)}
    put(how, state, place)
    assert_same(load(zeros(state) | {f"object {name}": {name: -1} for name in NAMES}, place), state)


def test_a_name_that_is_not_text_is_refused_and_not_committed(tmp_path):
    path = tmp_path / "c"
    with raises((DataStatesError, ValueError), "Unicode"):
        save({"\ud800": torch.ones(2)}, path)
    assert not committed(path)


def _rename(opinion):
    opinion.name = "after"
    opinion.weights.append(2.0)


MUTABLE = {
    "list": (lambda: [1, 2, 3], lambda value: value.append(4)),
    "dict": (lambda: {"a": {"b": 1}}, lambda value: value["a"].update(b=2)),
    "object": (lambda: Opinion("before", [1.0]), _rename),
    "tensor in tuple": (lambda: (torch.ones(4), "t"), lambda value: value[0].fill_(5)),
}


@pytest.mark.parametrize("kind", MUTABLE)
def test_python_values_are_those_at_the_call(kind, tmp_path):
    make, change = MUTABLE[kind]
    value = make()
    future = async_save({"value": value, "w": torch.ones(100_000)}, tmp_path, reads=0.5)
    change(value)
    future.result(60)
    assert_same(load_everything(tmp_path)["value"], make())
