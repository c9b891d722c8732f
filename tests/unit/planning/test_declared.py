"""Of plain tensors, those that an optimizer owns are declared equal on all ranks."""

import pytest
import torch
from support.state.plans import item, replica, thing
from torch.distributed.checkpoint.planner import WriteItemType

import dcp_datastates
from dcp_datastates.planning.balance import SPLIT_FROM
from dcp_datastates.planning.flat_state import declared

LARGE = (SPLIT_FROM // 4 // 64, 64)
"""A shape of the fewest bytes that may be cut, as float32."""
SMALL = (LARGE[0] - 1, 64)


@pytest.fixture
def owned():
    """Makes parameters of an optimizer that is tracked as long as the test runs."""
    optimizers = []

    def owned(shape):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        optimizers.append(torch.optim.SGD([parameter], lr=1.0))
        dcp_datastates.track(optimizers[-1])
        return parameter.detach()

    return owned


def _types(items, state):
    return [each.type for each in declared(items, state, None)]


@pytest.mark.parametrize("shape", [LARGE, SMALL, (3,), (), (0, 5)])
def test_a_tensor_of_an_optimizer_becomes_a_chunk(owned, shape):
    items = [item("w", shape)]
    (found,) = declared(items, {"w": owned(shape)}, None)
    assert found == replica("w", shape)


def test_all_others_stay_as_they_are(owned):
    items = [thing("o"), item("free", LARGE), replica("shard", LARGE)]
    state = {"o": 1, "free": torch.zeros(LARGE), "shard": owned(LARGE)}
    assert declared(items, state, None) == items
    assert declared([], {}, None) == []


def test_each_tensor_is_looked_at_by_itself(owned):
    state = {"free": torch.zeros(LARGE), "w": owned(LARGE), "v": owned(LARGE)}
    types = _types([item(name, LARGE) for name in state], state)
    assert types == [WriteItemType.TENSOR, WriteItemType.SHARD, WriteItemType.SHARD]
