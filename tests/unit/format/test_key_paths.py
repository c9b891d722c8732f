"""Names and paths of the values in a nested state: those of DCP's own function, with the types of keys."""

from collections import OrderedDict
from enum import IntEnum

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dcp_datastates.format.key_paths import flatten, key_of


class Color(IntEnum):
    RED = 1


TENSOR = torch.ones(1)
KEYS = st.one_of(st.sampled_from(["a", "b", "a.b", "1", ""]), st.integers(0, 3), st.just(Color.RED))
LEAVES = st.sampled_from([TENSOR, 1, None, (TENSOR,), "text"])
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.lists(inner, max_size=3),
    ),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, STATES, max_size=5))
def test_the_names_and_the_order_are_those_of_dcp(state):
    try:
        expected, plain = flatten_state_dict(state)
    except ValueError:
        expected = None
    try:
        values, paths = flatten(state)
    except ValueError:  # also of an empty dict with the name of a value, which DCP leaves out
        return
    assert expected is not None, "DCP refuses two values with one name"
    assert list(values.items()) == list(expected.items())
    for name, value in values.items():
        assert tuple(str(part) for part in plain[name]) == tuple(
            str(part[-1]) if isinstance(part, tuple) else str(part) for part in paths[name]
        )
        found = state
        for part in paths[name]:
            found = found[key_of(part)]
        assert found is value
