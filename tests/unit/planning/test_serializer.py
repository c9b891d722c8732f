"""Objects as torch.save writes them; the bytes of small values, which recur, are kept."""

import io
import math

import pytest
import torch

from dcp_datastates.planning import column_planning
from dcp_datastates.planning.column_planning import serialize

KEPT = [None, True, False, 1, 0, 1.0, 0.0, math.inf, "1", "", 1 << 200, -1, "x" * 256]
OTHERS = [-0.0, math.nan, "x" * 257, 1 << 256, [1], {"a": 1}, b"x"]


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_values_that_are_equal_to_python_keep_their_own_bytes():
    for _ in range(2):
        assert list(map(serialize, KEPT + OTHERS)) == list(map(_saved, KEPT + OTHERS))


@pytest.mark.parametrize("value", KEPT, ids=repr)
def test_small_values_are_serialized_once(value):
    assert serialize(value) is serialize(value)


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_large_and_mutable_values_are_serialized_each_time(value):
    assert serialize(value) is not serialize(value)


def test_a_value_that_changes_is_serialized_as_it_is():
    value = {"step": 1}
    serialize(value)
    value["step"] = 2
    assert serialize(value) == _saved({"step": 2})


def test_steps_that_never_recur_do_not_pile_up():
    most = column_planning._kept.cache_parameters()["maxsize"]
    kept = serialize(-1)
    for step in range(most):
        serialize(step)
    assert column_planning._kept.cache_info().currsize == most
    assert serialize(-1) is not kept
