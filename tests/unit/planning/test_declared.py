"""Of plain tensors, those that an optimizer owns are declared equal on all ranks."""

import pytest
from support.state.plans import item, replica, thing

from dcp_datastates.planning.balance import SPLIT_FROM
from dcp_datastates.planning.flat_state import declared

LARGE = (SPLIT_FROM // 4 // 64, 64)
"""A shape of the fewest bytes that may be cut, as float32."""
SMALL = (LARGE[0] - 1, 64)


@pytest.mark.parametrize("shape", [LARGE, SMALL, (3,), (), (0, 5)])
def test_a_tensor_of_an_optimizer_becomes_a_chunk(shape):
    assert declared([item("w", shape)], {"w"}) == [replica("w", shape)]


def test_all_others_stay_as_they_are():
    items = [thing("o"), item("free", LARGE), replica("shard", LARGE)]
    assert declared(items, {"o", "shard"}) == items
    assert declared([], {"w"}) == []


def test_each_tensor_is_looked_at_by_itself():
    items = [item(name, LARGE) for name in ("free", "w", "v")]
    assert declared(items, {"w", "v"}) == [items[0], replica("w", LARGE), replica("v", LARGE)]
