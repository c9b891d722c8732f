"""Python values as JSON: what a planner notes comes back as it was, or is refused by the save."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.state.checkpoints import raises, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_datastates import DataStatesReader
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format import values

DEEP = b'{"names":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
DIGITS = b'{"names":' + b"9" * 4_000_000 + b"}"


class _NotingPlanner(DefaultSavePlanner):
    """Notes something of its own beside the paths."""

    note: object = None

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data["mine"] = self.note
        return plans, metadata


SHARED = [1, 2]

NOTES = {
    "nested": {"a": [(1, 2.5), None, True, "b", b"c", -(1 << 40), 1 << 90, ("x", (), [])]},
    "shared": [SHARED, SHARED, {"a": SHARED}],
    "torch": [torch.float32, torch.strided, torch.Size((1, 2))],
    "shapes": {f"w{number}": (number, 11008) for number in range(3000)},
    "like a tag": {"tuple": [1], "dict": {"tuple": {}}},
    "text": "\ud800 ü\0\n",
    "infinite": float("inf"),
}


@pytest.mark.parametrize("note", NOTES)
def test_plain_data_of_a_planner_come_back(note, tmp_path):
    planner = _NotingPlanner()
    planner.note = NOTES[note]
    save({"w": torch.ones(3)}, tmp_path, planner=planner)
    found = DataStatesReader(tmp_path).read_metadata().planner_data["mine"]
    assert found == NOTES[note]
    assert repr(found) == repr(NOTES[note])


def _deep():
    value = []
    for _ in range(300):
        value = [value]
    return value


def _cycle():
    value = []
    value.append(value)
    return value


REFUSED = {
    "object": object(),
    "path": Path("x"),
    "deep": _deep(),
    "cycle": _cycle(),
    "set": {1, 2},
    "keys": {1: 2},
    "pattern": re.compile("x"),
    "huge": 10**100,
    "tensor": torch.ones(1),
}


@pytest.mark.parametrize("note", REFUSED)
def test_what_has_no_place_in_the_metadata_is_refused_by_the_save(note, tmp_path):
    planner = _NotingPlanner()
    planner.note = REFUSED[note]
    with raises(ConfigurationError, "planner_data"):
        save({"w": torch.ones(3)}, tmp_path / "c", planner=planner)
    assert not (tmp_path / "c" / ".metadata").exists()


@pytest.mark.parametrize("text", [b"[[1]", b"1e", DEEP, DIGITS, b"\xff"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(values.ValueRefused):
        values.load(text)


def test_a_value_that_nests_deeply_is_refused():
    nested = json.loads("[" * 200 + "]" * 200)
    with pytest.raises(values.ValueRefused, match="deeper"):
        values.from_json(nested)


_json = st.recursive(
    st.one_of(st.text(max_size=2), st.integers(), st.none()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["tuple", "dict", "a"]), inner, max_size=2)
    ),
)


@given(_json)
def test_what_looks_like_a_tag_comes_back(value):
    found = values.from_json(values.load(values.dump(values.to_json(value))))
    assert repr(found) == repr(value)
