"""Of plain tensors, those that an optimizer owns are declared equal on all ranks."""

import pytest
from support.state.plans import item, replica, thing

from dcp_datastates.planning.flat_state import declared

SHAPE = (4, 64)


@pytest.mark.parametrize("shape", [SHAPE, (3,), (), (0, 5)])
def test_a_tensor_of_an_optimizer_becomes_a_chunk(shape):
    assert declared([item("w", shape)], {"w"}) == [replica("w", shape)]


def test_all_others_stay_as_they_are():
    items = [thing("o"), item("free", SHAPE), replica("shard", SHAPE), item("w", SHAPE)]
    assert declared(items, {"o", "shard", "w"}) == [*items[:3], replica("w", SHAPE)]
    assert declared([], {"w"}) == []
