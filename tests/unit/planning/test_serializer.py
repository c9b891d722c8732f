"""Objects as torch.save writes them; the bytes of small values, which recur, are kept."""

from __future__ import annotations

import io
import math

import pytest
import torch

from dcp_datastates.planning import serializer
from dcp_datastates.planning.serializer import Serializer

VALUES = [None, True, False, 1, 0, 1.0, 0.0, -0.0, math.nan, "1", "", 1 << 200, -1]


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_values_that_are_equal_to_python_keep_their_own_bytes():
    one = Serializer()
    for _ in range(2):
        assert [one.serialize(value) for value in VALUES] == list(map(_saved, VALUES))


@pytest.mark.parametrize("value", [*VALUES, "x" * 256], ids=repr)
def test_small_values_are_serialized_once(value):
    one = Serializer()
    assert one.serialize(value) is one.serialize(value)


@pytest.mark.parametrize("value", ["x" * 257, 1 << 256, [1], {"a": 1}, b"x"], ids=repr)
def test_large_and_mutable_values_are_serialized_each_time(value):
    one = Serializer()
    assert one.serialize(value) is not one.serialize(value)
    assert one.serialize(value) == _saved(value)


def test_a_value_that_changes_is_serialized_as_it_is():
    one, value = Serializer(), {"step": 1}
    one.serialize(value)
    value["step"] = 2
    assert one.serialize(value) == _saved({"step": 2})


def test_steps_that_never_recur_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(serializer, "_KEPT", 3)
    one = Serializer()
    kept = one.serialize(-1)
    for step in range(5):
        one.serialize(step)
    assert one.serialize(-1) is not kept
